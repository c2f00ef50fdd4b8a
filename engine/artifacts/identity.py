"""Which weights these are: one SHA-256 over the names and bytes of a model's weight files.

Files are hashed once: digests are remembered on disk under everything the file system says about a file (real path,
device, inode, size, modification and change time). The memory is a convenience: losing it costs time alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.artifacts.model_files import open_file, read_file
from engine.contracts.errors import ArtifactError, CorruptArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SEED: Final = b"mlx-stream weights 1\n"
_DIGEST_CHARACTERS: Final = 64
_ENTRY_LIMIT_BYTES: Final = 2**16

_Revision = tuple[str, int, int, int, int, int]


def weights_fingerprint(files: Iterable[Path], memory_folder: Path | None = None) -> str:
    """SHA-256 (hex) over `files`, sorted by name: each one's name, size and SHA-256.

    Args:
        files: the files that hold tensors.
        memory_folder: where digests are remembered; None hashes every time.

    Raises:
        MissingArtifactError, CorruptArtifactError: a file is gone, cannot be read, or changes while it is hashed.
    """
    whole = hashlib.sha256(_SEED)
    for file in sorted(files, key=lambda file: file.name):
        digest, size_bytes = _file_digest(file, memory_folder)
        whole.update(f"{len(file.name.encode())}:{file.name}:{size_bytes}:{digest}\n".encode())
    return whole.hexdigest()


def _file_digest(file: Path, memory_folder: Path | None) -> tuple[str, int]:
    """The digest and the size of one file, from memory when nothing about it has changed."""
    with open_file(file) as stream:
        revision = _revision(file)
        size_bytes = revision[3]
        remembered = _recall(memory_folder, revision)
        if remembered is not None:
            return remembered, size_bytes
        digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        if _revision(file) != revision:
            raise CorruptArtifactError(file.name, "changes while it is read")
    _remember(memory_folder, revision, digest)
    return digest, size_bytes


def _revision(file: Path) -> _Revision:
    real = file.resolve(strict=True)
    status = real.stat()
    return str(real), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _entry(memory_folder: Path, revision: _Revision) -> Path:
    return memory_folder / f"{hashlib.sha256(revision[0].encode(errors='surrogateescape')).hexdigest()}.json"


def _recall(memory_folder: Path | None, revision: _Revision) -> str | None:
    if memory_folder is None:
        return None
    try:
        known = json.loads(read_file(_entry(memory_folder, revision), _ENTRY_LIMIT_BYTES))
    except (ArtifactError, ValueError):
        return None
    if not isinstance(known, dict) or known.get("revision") != list(revision):
        return None
    digest = known.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == _DIGEST_CHARACTERS else None


def _remember(memory_folder: Path | None, revision: _Revision, digest: str) -> None:
    """Write the entry whole or not at all; a folder that cannot be written is no error."""
    if memory_folder is None:
        return
    with contextlib.suppress(OSError):
        memory_folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=memory_folder, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
                json.dump({"revision": revision, "sha256": digest}, file)
            Path(temporary).replace(_entry(memory_folder, revision))
        except OSError:
            Path(temporary).unlink(missing_ok=True)
