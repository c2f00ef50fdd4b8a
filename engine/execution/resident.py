"""A resident model as the front door sees it, and the two halves of bringing it in.

Files are found and opened beside the loop while the engine thread prepares the runtime; then the text half (tokenizer,
template) is opened while the engine thread alone reads the tensors.
"""

from __future__ import annotations

import importlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.adapters.files import open_adapters
from engine.artifacts import catalogue
from engine.artifacts.artifact import open_artifact
from engine.artifacts.identity import weights_fingerprint
from engine.contracts.errors import MissingArtifactError, UnavailableError
from engine.execution.state_room import MemoryFacts
from engine.runtime.prepare import prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from engine.adapters.files import AdapterFiles
    from engine.artifacts.artifact import Artifact
    from engine.artifacts.pulling import PullProgress
    from engine.contracts.model import ModelInfo
    from engine.contracts.prefill import PrefillPolicy
    from engine.execution.job import Stepper
    from engine.execution.text_model import TextModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to load and within which bounds.

    `model` is an alias, a Hugging Face id, a folder or a `.gguf` file. `device`, `dtype` and `blas` None mean
    automatic. `state_dir` keeps compiled kernels and remembered fingerprints. `state_bytes` bounds the KV state of
    all rows together; None bounds it, with the workspace of their steps, by what is free beside the weights.
    `row_tile_tokens` makes a row's bits independent of its neighbours, at the price that decision 0002 states; None
    shares products freely.
    `prefix_cache_bytes` bounds the states that are kept for later prompts, within `state_bytes` and only as long as no
    row needs the room; None means a quarter of it, 0 none. `prefix_cache_dir` keeps them on disk too, within
    `prefix_cache_disk_bytes` (None: 8 GiB). `adapters` are ids and folders of adapters to mount.
    """

    model: str
    state_dir: Path
    device: str | None = None
    dtype: str | None = None
    blas: str | None = None
    max_queue: int = 64
    max_rows: int = 32
    prefill_step_tokens: int | None = None
    state_bytes: int | None = None
    row_tile_tokens: int | None = None
    prefix_cache_bytes: int | None = None
    kv_storage: str = "plain"
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_bytes: int | None = None
    adapters: tuple[tuple[str, Path], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on this machine: its name, its files, opened and checked against each other, and adapters to mount."""

    name: str
    artifact: Artifact
    adapters: tuple[AdapterFiles, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded model: its facts, its text half, how prompts are cut, and what rows and kept prefixes may hold.

    `holds_workspace` as in `MemoryFacts`.
    """

    info: ModelInfo
    text: TextModel
    prefill_policy: PrefillPolicy
    step_tokens: int
    state_bytes: int
    holds_workspace: bool
    prefix_bytes: int

    @property
    def memory(self) -> MemoryFacts:
        """What predictions of its memory are made from."""
        return MemoryFacts(
            geometry=self.info.geometry,
            composition=self.info.composition,
            prefill_policy=self.prefill_policy,
            weights_bytes=self.info.weights_bytes,
            step_tokens=self.step_tokens,
            state_bytes=self.state_bytes,
            holds_workspace=self.holds_workspace,
        )


def find_files(settings: EngineSettings) -> ModelFiles:
    """Find the model's files, fetching them if they are not on this machine, and open them; no tensor is read.

    Raises:
        EngineError: there is no such model, or its files cannot be used.
    """
    adapters = open_adapters(settings.adapters)
    location = _locate(settings.model)
    return ModelFiles(name=location.name, artifact=open_artifact(location.path), adapters=adapters)


def open_text(files: Future[ModelFiles]) -> TextModel:
    """The text half of `files`, once they are found.

    Raises:
        EngineError: they were not found, or their text half cannot be used.
    """
    text_model = importlib.import_module("engine.execution.text_model")  # imported beside the reading of weights
    opened: TextModel = text_model.open_text_model(files.result().artifact)
    return opened


def load_on_engine_thread(
    settings: EngineSettings,
    files: Future[ModelFiles],
    text: Future[TextModel],
    report: Callable[[Resident], None],
    is_stopping: Callable[[], bool],
) -> Stepper:
    """Prepare the runtime, then bring the tensors in; the first thing that the engine thread does.

    `report` gets the resident model once it is warm.

    Raises:
        EngineError: the model cannot be loaded here, or `is_stopping` says that nobody wants it any more.
    """
    started_at = time.perf_counter()
    runtime = prepare_runtime(
        RuntimeSettings(
            cache_directory=settings.state_dir / "cache",
            device=settings.device,
            compute_dtype=settings.dtype,
            blas=settings.blas,
        )
    )
    loading = importlib.import_module("engine.execution.loading")  # imports mlx, which the runtime has made ready
    model_files = files.result()
    with ThreadPoolExecutor(1, thread_name_prefix="mlx-stream-hash") as pool:
        fingerprint = pool.submit(
            weights_fingerprint, model_files.artifact.weight_files, settings.state_dir / "cache" / "fingerprints"
        )
        loaded = loading.load_model(
            model_files,
            runtime,
            settings,
            fingerprint=fingerprint.result,
            has_chat_template=lambda: text.result().template is not None,
            before_each=lambda: _go_on(is_stopping, text),
            started_at=started_at,
        )
    stepper: Stepper = loaded.stepper
    report(
        Resident(
            info=loaded.info,
            text=text.result(),
            prefill_policy=loaded.binding.prefill_policy,
            step_tokens=stepper.limits.prefill_step_tokens,
            state_bytes=stepper.limits.state_bytes,
            holds_workspace=settings.state_bytes is None,
            prefix_bytes=stepper.prefixes.capacity_bytes,
        )
    )
    return stepper


def _go_on(is_stopping: Callable[[], bool], text: Future[TextModel]) -> None:
    """Raise when nobody wants the tensors any more: the engine is asked to stop, or the text half has failed."""
    if is_stopping():
        raise UnavailableError("stopped", "the engine was stopped while its model was loading")
    if text.done():
        text.result()


def _locate(reference: str) -> catalogue.ModelLocation:
    try:
        return catalogue.resolve(reference)
    except MissingArtifactError:
        logger.info("fetching model %s", reference)
        return catalogue.pull(reference, _log_progress())


def _log_progress() -> Callable[[PullProgress], None]:
    """Logs a pull's progress, at most once every five seconds."""
    last = 0.0

    def log(progress: PullProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 5:
            last = now
            logger.info("%s: %d of %d MB", progress.stage, progress.done_bytes // 10**6, progress.total_bytes // 10**6)

    return log
