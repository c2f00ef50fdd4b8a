"""Rows' state as one file: safetensors whose header says what it is, and holds the digest of everything.

Kept prefixes and checkpoints are such files, each with a format and facts of its own. A file is written beside its
place, synced, and renamed: under its name there is a whole entry or none. What is no regular file of this user alone is
foreign: it is not read, and not waited for. Touches no array; tensors are bytes here. Units: tokens and bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from engine.artifacts.safetensors import read_open_header
from engine.contracts.errors import CorruptArtifactError
from engine.contracts.snapshot import LayerSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from engine.artifacts.tensor_header import TensorHeader

SUFFIX: Final = ".safetensors"
PARTIAL_SUFFIX: Final = ".part"
_LENGTH_BYTES: Final = 8
_OWN_FACTS: Final = frozenset({"format", "layers", "data_sha256", "header_sha256"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTensor:
    """A tensor as it lies in a file: its dtype by safetensors' name, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class FileFormat:
    """What a file says it is: `name`, the same in every version of a module, and the version that is read."""

    name: str
    version: int

    @property
    def beginning(self) -> bytes:
        """How every header begins that any version has written."""
        return f'{{"__metadata__": {{"format": "{self.name} '.encode("ascii")

    def __str__(self) -> str:
        """As the header has it."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHeader:
    """What a file says of itself. `layers` hold no arrays; `digest` covers the header, and with it every byte."""

    facts: Mapping[str, str]
    layers: tuple[LayerSnapshot, ...]
    digest: str = ""


class ForeignFileError(Exception):
    """The file was written by something or somebody else."""


def write_state_file(
    path: Path, form: FileFormat, header: StateHeader, layers: Sequence[Mapping[str, HostTensor]]
) -> str:
    """Write `layers`, which hold tensors by name; returns the digest of the header.

    Raises:
        OSError: it cannot be written; nothing is left behind then.
    """
    tensors = {f"{place}.{name}": tensor for place, layer in enumerate(layers) for name, tensor in layer.items()}
    digest, encoded = _encoded(form, header, tensors)
    with _renamed_when_whole(path) as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.data)
    return digest


def read_state_header(path: Path, form: FileFormat) -> StateHeader:
    """What the header of `path` says, verified.

    Raises:
        ForeignFileError: another program, another version of this one, or another user has written it.
        ArtifactError: it is damaged.
        OSError: it is gone, or cannot be read now.
    """
    with _opened(path, form) as file:
        return _checked(file, path, form)[0]


def read_state_file(path: Path, form: FileFormat) -> tuple[StateHeader, list[dict[str, HostTensor]]]:
    """The whole entry, every byte verified. Raises what `read_state_header` raises."""
    with _opened(path, form) as file:
        header, tensors, digest = _checked(file, path, form)
        data = _read_data(file, path, tensors, digest)
    start = min((tensor.offset_bytes for tensor in tensors), default=0)
    layers: list[dict[str, HostTensor]] = [{} for _ in header.layers]
    for tensor in tensors:
        place, _, name = tensor.name.partition(".")
        if not place.isdecimal() or int(place) >= len(layers):
            raise CorruptArtifactError(path.name, f"has a tensor {tensor.name!r} of no layer")
        piece = data[tensor.offset_bytes - start : tensor.offset_bytes - start + tensor.nbytes]
        layers[int(place)][name] = HostTensor(dtype=tensor.dtype, shape=tensor.shape, data=piece)
    return header, layers


def is_of_format(path: Path, form: FileFormat) -> bool:
    """Whether any version of the format's module has written `path` for this user, be it damaged since.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with _opened(path, form):
            return True
    except ForeignFileError:
        return False


def remove_if_orphaned(path: Path) -> None:
    """Remove what a writer that was killed has left; the file of a living one is locked, and stays.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        with _opened_for_reading(path) as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except (FileNotFoundError, ForeignFileError):
        return


@contextmanager
def _opened(path: Path, form: FileFormat) -> Iterator[BinaryIO]:
    """The file at `path`, after it was seen that some version of the format's module has written it."""
    with _opened_for_reading(path) as file:
        file.seek(_LENGTH_BYTES)
        if file.read(len(form.beginning)) != form.beginning:
            raise ForeignFileError(f"{path.name} is no {form.name}")
        file.seek(0)
        yield file


@contextmanager
def _opened_for_reading(path: Path) -> Iterator[BinaryIO]:
    """The regular file at `path`, if it belongs to this user and nobody else can write into it; waits for nothing."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise ForeignFileError(f"{path.name} is no file") from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(handle)  # not by a file object, which refuses folders
        raise ForeignFileError(f"{path.name} is no file of this user alone")
    with os.fdopen(handle, "rb") as file:
        yield file


@contextmanager
def _renamed_when_whole(path: Path) -> Iterator[BinaryIO]:
    partial, file = _locked_partial(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _locked_partial(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path` that is locked.

    Between its making and its lock it looks like an orphan to other servers; one that was removed is made again.
    """
    while True:
        partial = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
        file = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return partial, file
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        file.close()


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk. Raises `OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encoded(form: FileFormat, header: StateHeader, tensors: Mapping[str, HostTensor]) -> tuple[str, bytes]:
    """The header's digest, and the header."""
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
        "format": str(form),
        **header.facts,
        "layers": json.dumps([_layer_facts(layer) for layer in header.layers], sort_keys=True),
        "data_sha256": digest.hexdigest(),
    }
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    metadata["header_sha256"] = _header_digest(metadata, shapes)
    return metadata["header_sha256"], json.dumps({"__metadata__": metadata} | table).encode("ascii")


def _layer_facts(layer: LayerSnapshot) -> dict[str, object]:
    return {
        "kind": layer.kind,
        "tokens": layer.tokens,
        "least_tokens": layer.least_tokens,
        **({"start": layer.start} if layer.start else {}),
        "facts": dict(layer.facts),
    }


def _header_digest(metadata: Mapping[str, str], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """SHA-256 over everything that the header says, but for this digest itself."""
    said = [sorted(item for item in metadata.items() if item[0] != "header_sha256"), sorted(shapes.items())]
    return hashlib.sha256(json.dumps(said).encode("ascii")).hexdigest()


def _checked(file: BinaryIO, path: Path, form: FileFormat) -> tuple[StateHeader, list[TensorHeader], str]:
    """The header, those of the tensors, and the digest of their data."""
    tensors, metadata = read_open_header(file, path)
    if metadata.get("format") != str(form):
        raise ForeignFileError(f"{path.name} has the format {metadata.get('format')!r}")
    shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors.values()}
    if metadata.get("header_sha256") != _header_digest(metadata, shapes):
        raise CorruptArtifactError(path.name, "has a header that does not fit its digest")
    try:
        layers = tuple(LayerSnapshot(**facts, arrays={}) for facts in json.loads(metadata["layers"]))
        header = StateHeader(
            facts={name: text for name, text in metadata.items() if name not in _OWN_FACTS},
            layers=layers,
            digest=metadata["header_sha256"],
        )
        return header, list(tensors.values()), metadata["data_sha256"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise unreadable_header(path, error) from None


def unreadable_header(path: Path, error: Exception) -> CorruptArtifactError:
    """The header fits its digest and says what cannot be."""
    return CorruptArtifactError(path.name, f"has a header that cannot be read ({error})")


def _read_data(file: BinaryIO, path: Path, headers: Sequence[TensorHeader], digest: str) -> memoryview:
    """The bytes of all tensors, which lie side by side. Read, not mapped: a file may be cut while it is in use."""
    size_bytes = sum(header.nbytes for header in headers)
    data = np.empty(size_bytes, dtype=np.uint8).data
    file.seek(min((header.offset_bytes for header in headers), default=0))
    read_bytes = 0
    while read_bytes < size_bytes and (count := file.readinto(data[read_bytes:])):  # type: ignore[attr-defined]
        read_bytes += count
    if read_bytes != size_bytes or hashlib.sha256(data).hexdigest() != digest:
        raise CorruptArtifactError(path.name, "has data that do not fit their digest")
    return data
