"""From what a user writes to the model's files: an alias, a folder, a `.gguf` file, or `org/name` of Hugging Face.

Resolving looks at this machine alone; only `pull` fetches. A name that could be two things is an alias first, then
what exists as a path, then a hub repository; "./" in front always means a path. `org/name@revision` pins a revision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import platformdirs

from engine.artifacts.artifact import open_artifact
from engine.artifacts.packaged import PACKAGED_MODELS, PackagedModel, pull_packaged, pulled_path
from engine.artifacts.pulling import no_progress
from engine.contracts.errors import ArtifactError, MissingArtifactError, NotFoundError

if TYPE_CHECKING:
    from engine.artifacts.pulling import Progress

_APPLICATION: Final = "mlx-stream"
_LONGEST_REFERENCE: Final = 1024
_REPOSITORY: Final = re.compile(r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96})(@(?P<revision>[\w.-]{1,96}))?", re.ASCII)
_PATH_BEGINNINGS: Final = ("/", "./", "../", "~")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLocation:
    """A model on this machine: the name that callers know it by, and its folder or file."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One line of the list of models; `path` is None while the model is not on this machine."""

    name: str
    source: Literal["alias", "hub"]
    size_bytes: int
    summary: str = ""
    license: str = ""
    path: Path | None = None


def models_folder() -> Path:
    """Where pulled models are kept: `models` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir(_APPLICATION), "models")


def resolve(reference: str, *, folder: Path | None = None, paths: bool = True) -> ModelLocation:
    """Find the model `reference` on this machine; fetches nothing.

    Args:
        reference: alias, path or `org/name[@revision]`.
        folder: where pulled models are kept, instead of `models_folder()`.
        paths: whether a path is taken; one that comes from a network must not be.

    Raises:
        NotFoundError: it is no alias, no path and no repository name; known aliases are listed.
        MissingArtifactError: it is known, and not on this machine; `pull` can fetch aliases and repositories.
    """
    packaged = _packaged(reference)
    if packaged is not None:
        path = pulled_path(packaged, folder or models_folder())
        return ModelLocation(name=packaged.alias, path=_on_this_machine(reference, path))
    local = _local(reference) if paths else None
    if local is not None:
        return local
    repository, revision = _repository(reference)
    from engine.artifacts import hub  # slow to import

    return ModelLocation(name=repository, path=_on_this_machine(reference, hub.cached_snapshot(repository, revision)))


def require_known(reference: str) -> None:
    """Refuse what names no model, from its form and the paths of this machine; nothing is fetched or opened.

    Raises:
        NotFoundError: it is no alias, no path and no repository name; known aliases are listed.
        MissingArtifactError: it is a path that leads nowhere.
    """
    if _packaged(reference) is None and _local(reference) is None:
        _repository(reference)


def pull(
    reference: str, progress: Progress = no_progress, *, folder: Path | None = None, paths: bool = True
) -> ModelLocation:
    """Fetch the model `reference` unless it is on this machine, and say where it is.

    Args:
        reference: alias, path or `org/name[@revision]`; a path is returned as it is.
        progress: told what has arrived, from whichever thread notices.
        folder: where pulled models are kept, instead of `models_folder()`.
        paths: whether a path is taken; one that comes from a network must not be.

    Raises:
        NotFoundError: nothing has this name.
        ArtifactError: it cannot be fetched or kept, or is not what was pinned.
    """
    packaged = _packaged(reference)
    if packaged is not None:
        return ModelLocation(name=packaged.alias, path=pull_packaged(packaged, folder or models_folder(), progress))
    local = _local(reference) if paths else None
    if local is not None:
        return local
    repository, revision = _repository(reference)
    from engine.artifacts import hub  # slow to import

    return ModelLocation(name=repository, path=hub.download_snapshot(repository, revision, progress))


def list_models(*, folder: Path | None = None) -> list[CatalogueEntry]:
    """Every alias, then the hub's repositories on this machine that can be served."""
    return [*_list_packaged(folder or models_folder()), *_list_cached()]


def _packaged(reference: str) -> PackagedModel | None:
    return next((model for model in PACKAGED_MODELS if model.alias == reference), None)


def _local(reference: str) -> ModelLocation | None:
    """What `reference` names as a path; None when it is not meant as one."""
    if not reference or "\0" in reference or len(reference) > _LONGEST_REFERENCE:
        raise _unknown(reference)
    meant = reference.startswith(_PATH_BEGINNINGS) or reference.endswith(".gguf") or reference in (".", "..")
    try:
        path = Path(reference).expanduser().absolute()
        if path.exists():
            return ModelLocation(name=path.stem if path.suffix == ".gguf" else path.resolve().name, path=path)
    except (OSError, RuntimeError):
        raise _unknown(reference) from None
    if meant:
        raise MissingArtifactError(path.name, "no such file or folder")
    return None


def _repository(reference: str) -> tuple[str, str | None]:
    match = _REPOSITORY.fullmatch(reference)
    if match is None or ".." in reference or reference.startswith((".", "-")) or "/." in reference:
        raise _unknown(reference)
    return match["name"], match["revision"]


def _on_this_machine(reference: str, path: Path | None) -> Path:
    if path is None:
        raise MissingArtifactError(
            reference, f"is not on this machine; `mlx-stream models pull {reference}` fetches it"
        )
    return path


def _unknown(reference: str) -> NotFoundError:
    shown = reference if len(reference) <= _LONGEST_REFERENCE else f"{reference[:_LONGEST_REFERENCE]}..."
    return NotFoundError("model", shown, known=[model.alias for model in PACKAGED_MODELS])


def _list_packaged(folder: Path) -> list[CatalogueEntry]:
    return [
        CatalogueEntry(
            name=model.alias,
            source="alias",
            size_bytes=model.size_bytes,
            summary=model.summary,
            license=model.license,
            path=pulled_path(model, folder),
        )
        for model in PACKAGED_MODELS
    ]


def _list_cached() -> list[CatalogueEntry]:
    from engine.artifacts import hub  # slow to import

    entries = []
    for repository, path in sorted(hub.cached_repositories().items()):
        try:
            size_bytes = open_artifact(path).weights_bytes
        except ArtifactError:
            continue
        entries.append(CatalogueEntry(name=repository, source="hub", size_bytes=size_bytes, path=path))
    return entries
