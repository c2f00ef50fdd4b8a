"""Models from Hugging Face, in the standard cache that all of its tools share.

Only what we read is fetched: configurations, tokenizers, templates and safetensors; never a pickle. Imported when a
hub model is asked for, since its client is slow to import.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from huggingface_hub import DryRunFileInfo, constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    DryRunError,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from engine.artifacts.pulling import Progress, bytes_under, growth_reported
from engine.contracts.errors import EngineError, MissingArtifactError, NotFoundError

_log = logging.getLogger(__name__)

_WANTED: Final = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]
# Subfolders and Mistral's second copy of the same weights.
_UNWANTED: Final = ["*/*", "consolidated*"]


class _SilentBar(tqdm):
    """The client's own progress bar, switched off: progress is ours to show."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **(options | {"disable": True}))  # type: ignore[no-untyped-call]


def cached_snapshot(repository: str, revision: str | None = None) -> Path | None:
    """The folder of `repository` in the cache, None unless all that we read of it is there. Never touches a network."""
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                local_files_only=True,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except (OSError, ValueError):
        return None


def cached_repositories() -> dict[str, Path]:
    """The newest snapshot folder of every model repository in the cache."""
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    return {
        found.repo_id: max(found.revisions, key=lambda revision: revision.last_modified).snapshot_path
        for found in repositories
        if found.repo_type == "model" and found.revisions
    }


def download_snapshot(
    repository: str, revision: str | None, progress: Progress, *, endpoint: str | None = None
) -> Path:
    """Fetch what we read of `repository` and return its folder in the cache; what is there already stays.

    Args:
        repository: "org/name".
        revision: a branch, tag or commit; None is the default branch.
        progress: told how much has arrived.
        endpoint: another hub than the one that the user's settings name.

    Raises:
        NotFoundError: no such repository or revision, or it is private.
        MissingArtifactError: it is gated, holds nothing for us, or could not be fetched.
    """
    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": _WANTED,
        "ignore_patterns": _UNWANTED,
        "tqdm_class": _SilentBar,
        "endpoint": endpoint,
    }
    try:
        files: list[DryRunFileInfo] = snapshot_download(repository, dry_run=True, **options)
        total_bytes = sum(file.file_size or 0 for file in files if file.will_download)
        with growth_reported(lambda: bytes_under(_cache_folder(repository)), total_bytes, progress):
            return Path(snapshot_download(repository, **options))
    except DryRunError as error:
        cached = cached_snapshot(repository, revision)
        if cached is not None:
            return cached
        raise _refusal(repository, revision, error.__cause__) from error
    except Exception as error:
        raise _refusal(repository, revision, error) from error


def _refusal(repository: str, revision: str | None, cause: BaseException | None) -> EngineError:
    """Our error for what the hub's client met: a repository that does not answer to us, or no hub at all."""
    if isinstance(cause, GatedRepoError):
        return MissingArtifactError(repository, "is gated: accept its terms on its page, then `hf auth login`")
    if isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError):
        return NotFoundError("model", f"{repository}@{revision}" if revision else repository)
    # Its text may quote folders of this machine.
    _log.warning("the hub's client gave up on %s: %s", repository, type(cause).__name__)
    return MissingArtifactError(repository, "could not be fetched: the hub cannot be reached, or broke off")


def _cache_folder(repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}")
