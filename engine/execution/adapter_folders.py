"""From the name of an adapter's folder, as a caller writes it, to a folder inside the operator's one, and no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.adapters.config import CONFIG_FILES
from engine.adapters.files import WEIGHT_FILES
from engine.contracts.errors import (
    ConfigurationError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedArtifactError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SOURCE_CHARACTERS: Final = 512
SOURCE_RULE: Final = "must be a folder inside the adapter directory, in plain words: no '..', no '\\', no leading '/'"


def adapter_folder(directory: Path | None, source: str) -> Path:
    """The folder that `source` names below `directory`, links followed.

    What lies outside and what is not there are refused in the same words. Of the files in it that are read, none may
    be a link to outside.

    Raises:
        ConfigurationError: the operator has named no such directory.
        InvalidRequestError: `source` could reach outside.
        NotFoundError: nothing inside is called so.
        UnsupportedArtifactError: a file in it is a link that leaves `directory`.
    """
    if directory is None:
        raise ConfigurationError("adapters_dir", "is not set, so no adapter can be mounted while the model serves")
    if len(source) > MAX_SOURCE_CHARACTERS or not source.isprintable() or not all(_are_plain(source)):
        raise InvalidRequestError.of("source", SOURCE_RULE)
    try:
        root = directory.resolve(strict=True)
        folder = (root / source).resolve(strict=True)
    except (OSError, RuntimeError):
        raise NotFoundError("adapter folder", source) from None
    if not (folder.is_relative_to(root) and folder != root and folder.is_dir()):
        raise NotFoundError("adapter folder", source)
    _refuse_links_to_outside(folder, root)
    return folder


def _refuse_links_to_outside(folder: Path, root: Path) -> None:
    for name in (*CONFIG_FILES, *WEIGHT_FILES):
        target = Path(os.path.realpath(folder / name))  # of a link that leads round in circles, too
        if not target.is_relative_to(root):
            raise UnsupportedArtifactError(f"{folder.name}/{name}", "is a link to outside the adapter directory")


def _are_plain(source: str) -> Iterator[bool]:
    yield bool(source) and "\\" not in source
    for part in source.split("/"):
        yield part not in ("", ".", "..") and not part.startswith("~")
