"""GGUF headers: metadata and tensor accounts, read in pure Python and validated against the size of the file.

No length that a file claims is believed before it is compared with what is left of the file. Tensor data is read by
`gguf_blocks`. Source: the GGUF specification, versions 2 and 3 (little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.artifacts.gguf_types import TENSOR_TYPES, UNREAD_TYPES, BlockType
from engine.artifacts.model_files import open_file
from engine.artifacts.tensor_header import TensorHeader
from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MetadataValue = int | float | bool | str | tuple["MetadataValue", ...]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT_BYTES: Final = 32
_MOST_DIMENSIONS: Final = 4
_MOST_ITEMS: Final = 2**24
_LONGEST_TEXT_BYTES: Final = 2**26
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata by key, and tensors by the name that the file gives them."""

    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorHeader]


def read_header(path: Path) -> GgufHeader:
    """Read and validate the header of a GGUF file.

    Raises:
        MissingArtifactError: there is no such file.
        CorruptArtifactError: it is cut or contradicts itself.
        UnsupportedArtifactError: another format, version, byte order or tensor type.
    """
    with open_file(path) as file:
        size_bytes = file.seek(0, 2)
        if size_bytes < len(_MAGIC):
            raise CorruptArtifactError(path.name, f"is {size_bytes} bytes long, too short for a header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size_bytes).header()


class _Reader:
    """A cursor over one mapped file."""

    def __init__(self, path: Path, data: mmap.mmap, size_bytes: int) -> None:
        self._path = path
        self._data = data
        self._size_bytes = size_bytes
        self._at = 0

    def header(self) -> GgufHeader:
        self._check_kind()
        tensor_count, metadata_count = self._u64(), self._u64()
        metadata: dict[str, MetadataValue] = {}
        for _ in range(metadata_count):
            key = self._text("a metadata key")
            if key in metadata:
                raise self._corrupt(f"states {key!r} twice")
            metadata[key] = self._value(self._u32(), key)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        return GgufHeader(metadata=metadata, tensors=self._place(infos, _alignment_bytes(self._path.name, metadata)))

    def _check_kind(self) -> None:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise UnsupportedArtifactError(self._path.name, "is not a GGUF file")
        version = self._u32()
        if version not in _VERSIONS:
            big_endian = version >> 16 != 0
            what = "has the big-endian byte order" if big_endian else f"has GGUF version {version}"
            raise UnsupportedArtifactError(self._path.name, f"{what}; read are little-endian versions 2 and 3")

    def _value(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._corrupt(f"gives {key!r} the unknown type {kind}")
        return self._scalars(_SCALARS[kind], 1)[0]

    def _array(self, key: str) -> tuple[MetadataValue, ...]:
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            return self._texts(count, key)
        if kind not in _SCALARS:
            raise UnsupportedArtifactError(
                self._path.name, f"gives {key!r} an array of type {kind}, which we do not read"
            )
        return self._scalars(_SCALARS[kind], count)

    def _scalars(self, code: str, count: int) -> tuple[MetadataValue, ...]:
        self._need_items(count, struct.calcsize(f"<{code}"))
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _texts(self, count: int, key: str) -> tuple[str, ...]:
        """A hundred thousand strings pass here, so this loop calls no method of ours."""
        self._need_items(count, _U64.size)
        data, at, end, length_at = self._data, self._at, self._size_bytes, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    raise self._cut()
                if at - start > _LONGEST_TEXT_BYTES:
                    raise self._corrupt(f"claims a text of {at - start} bytes in {key!r}")
                found.append(data[start:at].decode())
        except struct.error:
            raise self._cut() from None
        except UnicodeDecodeError:
            raise self._corrupt(f"holds text in {key!r} that is not UTF-8") from None
        self._at = at
        return tuple(found)

    def _text(self, key: str) -> str:
        return self._texts(1, key)[0]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Name, row-major shape, type, and offset from the start of the data."""
        name = self._text("a tensor name")
        dimensions = self._u32()
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._corrupt(f"gives tensor {name!r} {dimensions} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(dimensions)]))
        kind, offset_bytes = self._u32(), self._u64()
        if kind not in TENSOR_TYPES:
            what = UNREAD_TYPES.get(kind, f"number {kind}")
            read = ", ".join(block.name for block in TENSOR_TYPES.values())
            raise UnsupportedArtifactError(
                self._path.name, f"tensor {name!r} has the type {what}, which we do not read; read are {read}"
            )
        if 0 in shape or shape[-1] % TENSOR_TYPES[kind].values:
            raise self._corrupt(
                f"gives tensor {name!r} the shape {list(shape)}, no whole {TENSOR_TYPES[kind].name} blocks"
            )
        return name, shape, TENSOR_TYPES[kind], offset_bytes

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], BlockType, int]], alignment_bytes: int
    ) -> dict[str, TensorHeader]:
        """Check every tensor's span against the file and against its neighbours."""
        data_start = self._at + -self._at % alignment_bytes
        end, tensors = data_start, dict[str, TensorHeader]()
        for name, shape, block, offset_bytes in sorted(infos, key=lambda info: info[3]):
            start, nbytes = data_start + offset_bytes, math.prod(shape) // block.values * block.nbytes
            if name in tensors:
                raise self._corrupt(f"names tensor {name!r} twice")
            if offset_bytes % alignment_bytes:
                raise self._corrupt(f"places tensor {name!r} at {offset_bytes}, no multiple of {alignment_bytes} bytes")
            if start < end:
                raise self._corrupt(f"lets tensor {name!r} overlap the one before it")
            end = start + nbytes
            if end > self._size_bytes:
                raise self._corrupt(f"is {self._size_bytes} bytes long, tensor {name!r} ends at {end}")
            tensors[name] = TensorHeader(
                name=name, file=self._path, dtype=block.name, shape=shape, offset_bytes=start, nbytes=nbytes
            )
        return tensors

    def _u32(self) -> int:
        return int.from_bytes(self._take(_U32.size), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(_U64.size), "little")

    def _take(self, length_bytes: int) -> bytes:
        self._need(length_bytes)
        self._at += length_bytes
        return self._data[self._at - length_bytes : self._at]

    def _need(self, length_bytes: int) -> None:
        if length_bytes > self._size_bytes - self._at:
            raise self._cut()

    def _need_items(self, count: int, item_bytes: int) -> None:
        if count > _MOST_ITEMS:
            raise self._corrupt(f"claims an array of {count} values, at most {_MOST_ITEMS} are allowed")
        self._need(count * item_bytes)

    def _cut(self) -> CorruptArtifactError:
        return self._corrupt(f"is {self._size_bytes} bytes long and ends inside its header")

    def _corrupt(self, detail: str) -> CorruptArtifactError:
        return CorruptArtifactError(self._path.name, detail)


def _alignment_bytes(file: str, metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise CorruptArtifactError(file, f"general.alignment is {value!r}, no power of two")
    return value
