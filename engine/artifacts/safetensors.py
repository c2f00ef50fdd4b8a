"""Safetensors headers: read, validated in full, and never trusted with an allocation. Reads no tensor data.

A header is refused unless its tensors tile the data section exactly: no overlap, no gap, nothing after the end.
Source: the safetensors format (8 bytes of length, a JSON object, the data).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TypeGuard

from engine.artifacts.fields import read_object
from engine.artifacts.model_files import is_named, open_file
from engine.artifacts.tensor_header import TensorHeader
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILES: Final = ("model.safetensors", "weights.safetensors")
HEADER_LIMIT_BYTES: Final = 100_000_000
INDEX_LIMIT_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8
_PYTORCH: Final = frozenset({".bin", ".pt", ".pth"})

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
}


def read_folder(folder: Path) -> dict[str, TensorHeader]:
    """Headers of the weights in `folder`: those that its index names, else its single file.

    Raises:
        MissingArtifactError: no weights, a shard that is not there, or a tensor that its shard lacks.
        CorruptArtifactError, UnsupportedArtifactError: see `read_header`.
    """
    if is_named(folder / INDEX_FILE):
        return _read_shards(folder)
    for name in SINGLE_FILES:
        if is_named(folder / name):
            return read_header(folder / name)
    others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PYTORCH)
    instead = f"; it has {others[0]}: PyTorch files are not read" if others else ""
    raise MissingArtifactError(folder.name, f"holds no weights ({INDEX_FILE} or {' or '.join(SINGLE_FILES)}){instead}")


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Validate the header of one file and return its tensors in the order of their data.

    Raises:
        CorruptArtifactError: the file is cut or contradicts itself; the message holds the sizes.
        UnsupportedArtifactError: a dtype that we do not read, named with its tensor.
    """
    with open_file(path) as file:
        return read_open_header(file, path)[0]


def read_open_header(file: BinaryIO, path: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """As `read_header`, of a file that is open at its start, and the texts beside its tensors; errors name `path`."""
    header, data_start, size_bytes = _read_header_object(file, path)
    texts = _texts(path.name, header.pop("__metadata__", None))
    tensors = [_tensor(path, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset_bytes, tensor.nbytes))
    _check_tiling(path.name, tensors, data_start, size_bytes)
    return {tensor.name: tensor for tensor in tensors}, texts


def _read_header_object(file: BinaryIO, path: Path) -> tuple[dict[str, object], int, int]:
    """The JSON header, where the data starts, and the size of the file."""
    size_bytes = os.fstat(file.fileno()).st_size
    length_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size_bytes < _LENGTH_BYTES:
        raise CorruptArtifactError(path.name, f"is {size_bytes} bytes long, too short for a header")
    if length_bytes > size_bytes - _LENGTH_BYTES:
        raise CorruptArtifactError(
            path.name, f"claims a header of {length_bytes} bytes, the file has {size_bytes} bytes"
        )
    if length_bytes > HEADER_LIMIT_BYTES:
        raise CorruptArtifactError(
            path.name, f"claims a header of {length_bytes} bytes, at most {HEADER_LIMIT_BYTES} are allowed"
        )
    return _parse_header(path.name, file.read(length_bytes)), _LENGTH_BYTES + length_bytes, size_bytes


def _parse_header(file: str, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CorruptArtifactError(file, f"names {twice!r} twice in its header")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise CorruptArtifactError(file, "has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise CorruptArtifactError(file, "has a header that is not a JSON object")
    return header


def _texts(file: str, metadata: object) -> dict[str, str]:
    """The format allows texts alone there, and other readers of the file give up on anything else."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptArtifactError(file, "has a header whose __metadata__ is no object of texts")
    return dict(metadata)


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorHeader:
    if not isinstance(entry, dict):
        raise CorruptArtifactError(path.name, f"tensor {name!r} has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape):
        raise CorruptArtifactError(path.name, f"tensor {name!r} has no valid shape")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptArtifactError(path.name, f"tensor {name!r} has no valid data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise UnsupportedArtifactError(path.name, f"tensor {name!r} has the dtype {dtype!r}, which we do not read")
    nbytes, needed = offsets[1] - offsets[0], math.prod(shape) * DTYPE_BYTES[dtype]
    if nbytes != needed:
        raise CorruptArtifactError(
            path.name, f"tensor {name!r} spans {nbytes} bytes, {dtype} {list(shape)} needs {needed}"
        )
    return TensorHeader(
        name=name, file=path, dtype=dtype, shape=tuple(shape), offset_bytes=data_start + offsets[0], nbytes=nbytes
    )


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _check_tiling(file: str, tensors: list[TensorHeader], data_start: int, size_bytes: int) -> None:
    end = data_start
    for tensor in tensors:
        if tensor.offset_bytes < end:
            raise CorruptArtifactError(file, f"tensor {tensor.name!r} overlaps the one before it")
        if tensor.offset_bytes > end:
            raise CorruptArtifactError(
                file, f"{tensor.offset_bytes - end} bytes before tensor {tensor.name!r} belong to no tensor"
            )
        end += tensor.nbytes
    if end != size_bytes:
        raise CorruptArtifactError(file, f"is {size_bytes} bytes long, its header describes {end} bytes")


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    """Tensors of all shards that the index names; each must lie in the shard that the index says.

    A tensor that the index does not mention is kept: whether the model has a use for it is the audit's question.
    """
    weight_map = _read_index(folder)
    shards = {name: _read_shard(folder, name) for name in dict.fromkeys(weight_map.values())}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise MissingArtifactError(shard, f"has no tensor {tensor!r}, which {INDEX_FILE} places there")
    found: dict[str, TensorHeader] = {}
    for shard, tensors in shards.items():
        for name, stored in tensors.items():
            if weight_map.get(name, shard) != shard:
                continue
            if name in found:
                raise CorruptArtifactError(shard, f"holds {name!r}, as {found[name].file.name} does")
            found[name] = stored
    return found


def _read_index(folder: Path) -> dict[str, str]:
    weight_map = read_object(folder / INDEX_FILE, limit_bytes=INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptArtifactError(INDEX_FILE, "names no tensors (weight_map)")
    for tensor, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or Path(shard).name != shard
            or "\\" in shard
        ):
            raise CorruptArtifactError(
                INDEX_FILE, f"places {tensor!r} in {shard!r}, which is no file name in its folder"
            )
    return weight_map


def _read_shard(folder: Path, name: str) -> dict[str, TensorHeader]:
    if not is_named(folder / name):
        raise MissingArtifactError(name, f"is not there, but {INDEX_FILE} names it")
    return read_header(folder / name)
