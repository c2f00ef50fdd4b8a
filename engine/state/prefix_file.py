"""One kept prefix as one file: safetensors whose header says what it is, and holds the digest of everything.

A file is written beside its place, synced, and renamed: under its name there is a whole entry or none. Touches no
array; tensors are bytes here. Units: tokens and bytes.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import json
import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from engine.artifacts.model_files import open_file
from engine.artifacts.safetensors import read_header, read_metadata
from engine.contracts.errors import CorruptArtifactError
from engine.contracts.snapshot import LayerSnapshot, usable_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from engine.artifacts.tensor_header import TensorHeader

FORMAT: Final = "mlx-stream prefix 1"
SUFFIX: Final = ".safetensors"
PARTIAL_SUFFIX: Final = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTensor:
    """A tensor as it lies in a file: its dtype by safetensors' name, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRecord:
    """What a file says of itself. `layers` hold no arrays; `identity` names the configuration that wrote it."""

    identity: str
    namespace: str
    key: bytes
    layers: tuple[LayerSnapshot, ...]

    def serves(self, tokens: int) -> bool:
        """Whether a row that shares the first `tokens` can begin with all of them."""
        return usable_tokens(self.layers, tokens) == tokens


class ForeignPrefixError(Exception):
    """The file is sound, but written by something else."""


def write_prefix_file(path: Path, record: PrefixRecord, layers: Sequence[Mapping[str, HostTensor]]) -> None:
    """Write an entry whose `layers` hold tensors by name.

    Raises:
        OSError: it cannot be written; nothing is left behind then.
    """
    tensors = {f"{place}.{name}": tensor for place, layer in enumerate(layers) for name, tensor in layer.items()}
    header = _header(record, tensors)
    with _renamed_when_whole(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(tensor.data)


def read_prefix_record(path: Path) -> PrefixRecord:
    """What the header of `path` says, verified.

    Raises:
        ForeignPrefixError: another program, or another version of this one, has written it.
        ArtifactError: the file is gone, cannot be read or is damaged.
    """
    return _checked(path)[0]


def read_prefix_file(path: Path) -> tuple[PrefixRecord, list[dict[str, HostTensor]]]:
    """The whole entry, every byte verified. Raises what `read_prefix_record` raises."""
    record, headers, digest = _checked(path)
    data = _read_data(path, list(headers.values()), digest)
    start = min((header.offset_bytes for header in headers.values()), default=0)
    layers: list[dict[str, HostTensor]] = [{} for _ in record.layers]
    for header in headers.values():
        place, _, name = header.name.partition(".")
        piece = data[header.offset_bytes - start : header.offset_bytes - start + header.nbytes]
        layers[int(place)][name] = HostTensor(dtype=header.dtype, shape=header.shape, data=piece)
    return record, layers


def remove_orphans(folder: Path) -> None:
    """Remove what writers that were killed have left; the files of living ones are locked, and stay."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            path.unlink(missing_ok=True)


@contextmanager
def _renamed_when_whole(path: Path) -> Iterator[BinaryIO]:
    partial = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(record: PrefixRecord, tensors: Mapping[str, HostTensor]) -> bytes:
    digest = hashlib.sha256()
    table: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        digest.update(tensor.data)
        table[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(tensor.data)],
        }
        end += len(tensor.data)
    metadata = {
        "format": FORMAT,
        "identity": record.identity,
        "namespace": record.namespace,
        "tokens": base64.b64encode(record.key).decode("ascii"),
        "layers": json.dumps([_layer_facts(layer) for layer in record.layers], sort_keys=True),
        "data_sha256": digest.hexdigest(),
    }
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    metadata["header_sha256"] = _header_digest(metadata, shapes)
    return json.dumps({"__metadata__": metadata} | table).encode("ascii")


def _layer_facts(layer: LayerSnapshot) -> dict[str, object]:
    return {
        "kind": layer.kind,
        "tokens": layer.tokens,
        "least_tokens": layer.least_tokens,
        "facts": dict(layer.facts),
    }


def _header_digest(metadata: Mapping[str, str], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """SHA-256 over everything that the header says, but for this digest itself."""
    said = [sorted(item for item in metadata.items() if item[0] != "header_sha256"), sorted(shapes.items())]
    return hashlib.sha256(json.dumps(said).encode("ascii")).hexdigest()


def _checked(path: Path) -> tuple[PrefixRecord, dict[str, TensorHeader], str]:
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise ForeignPrefixError(f"{path.name} has the format {metadata.get('format')!r}")
    headers = read_header(path)
    shapes = {header.name: (header.dtype, header.shape) for header in headers.values()}
    if metadata.get("header_sha256") != _header_digest(metadata, shapes):
        raise CorruptArtifactError(path.name, "has a header that does not fit its digest")
    try:
        return _record(metadata), headers, metadata["data_sha256"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CorruptArtifactError(path.name, f"has a header that cannot be read ({error})") from None


def _record(metadata: Mapping[str, str]) -> PrefixRecord:
    return PrefixRecord(
        identity=metadata["identity"],
        namespace=metadata["namespace"],
        key=base64.b64decode(metadata["tokens"], validate=True),
        layers=tuple(LayerSnapshot(**facts, arrays={}) for facts in json.loads(metadata["layers"])),
    )


def _read_data(path: Path, headers: Sequence[TensorHeader], digest: str) -> memoryview:
    """The bytes of all tensors, which lie side by side. Read, not mapped: a file may be cut while it is in use."""
    size_bytes = sum(header.nbytes for header in headers)
    data = np.empty(size_bytes, dtype=np.uint8).data
    with open_file(path) as file:
        file.seek(min((header.offset_bytes for header in headers), default=0))
        read_bytes = 0
        while read_bytes < size_bytes and (count := file.readinto(data[read_bytes:])):  # type: ignore[attr-defined]
            read_bytes += count
    if read_bytes != size_bytes or hashlib.sha256(data).hexdigest() != digest:
        raise CorruptArtifactError(path.name, "has data that do not fit their digest")
    return data
