"""A resident model as the front door sees it, and the two halves of bringing it in.

Files are found and opened beside the loop while the engine thread prepares the runtime. Then the engine thread lays out
the weights, and the text half (tokenizer, template) is opened while compiled code reads them.
"""

from __future__ import annotations

import importlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from engine.adapters.files import open_adapters
from engine.artifacts import catalogue
from engine.artifacts.artifact import open_artifact
from engine.artifacts.identity import weights_fingerprint
from engine.contracts.errors import MissingArtifactError, UnavailableError, UnsupportedOptionError
from engine.contracts.load import LoadPhase, LoadProgress, no_load_progress
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
    from engine.contracts.durability import DurableStore
    from engine.contracts.model import ModelInfo
    from engine.contracts.prefill import PrefillPolicy
    from engine.execution.job import Stepper
    from engine.execution.text_model import TextModel
    from engine.runtime.prepare import Runtime

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_DISK_BYTES: Final = 8 * 1024**3
"""What `prefix_cache_dir` may hold, and durable generations under `state_dir`, where nothing else is said."""
PAUSE_SECONDS: Final = 0.01
"""How long the engine thread waits for other threads of a load before it looks after its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to load and within which bounds.

    `model` is an alias, a Hugging Face id, a folder or a `.gguf` file. `device`, `dtype` and `blas` None mean
    automatic. `state_dir` keeps compiled kernels and remembered fingerprints. `state_bytes` bounds the KV state of
    all rows together; None bounds it, with the workspace of their steps, by what is free beside the weights.
    `row_tile_tokens` makes a row's bits independent of its neighbours, at the price that decision 0002 states; None
    shares products freely.
    `max_queue_seconds` bounds how long a generation may wait for a row; None: as long as its caller does.
    `prefix_cache_bytes` bounds the states that are kept for later prompts, within `state_bytes` and only as long as no
    row needs the room; None means a quarter of it, 0 none. `prefix_cache_dir` keeps them on disk too, within
    `prefix_cache_disk_bytes` (None: 8 GiB). `adapters` are ids and folders of adapters to mount, and `adapters_dir`
    the folder below which more may be mounted while the model serves.
    `checkpoint_bytes` bounds what is kept of durable generations under `state_dir` (None: 8 GiB; 0 refuses them), and
    `checkpoint_age_seconds` how long it is kept after it was written last.
    """

    model: str
    state_dir: Path
    device: str | None = None
    dtype: str | None = None
    blas: str | None = None
    max_queue: int = 64
    max_queue_seconds: float | None = None
    max_rows: int = 32
    prefill_step_tokens: int | None = None
    state_bytes: int | None = None
    row_tile_tokens: int | None = None
    prefix_cache_bytes: int | None = None
    kv_storage: str = "plain"
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_bytes: int | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    adapters_dir: Path | None = None
    checkpoint_bytes: int | None = None
    checkpoint_age_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on this machine: its name, its files, opened and checked against each other, and adapters to mount."""

    name: str
    artifact: Artifact
    adapters: tuple[AdapterFiles, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DurablePlace:
    """Where durable generations are kept; without a `store`, `refusal` says why none can be."""

    store: DurableStore | None = None
    refusal: str = ""

    def require(self) -> DurableStore:
        """The store.

        Raises:
            UnsupportedOptionError: there is none.
        """
        if self.store is None:
            raise UnsupportedOptionError("delivery.durable", self.refusal)
        return self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded model: its facts, its text half, how prompts are cut, and what rows and kept prefixes may hold.

    `holds_workspace` as in `MemoryFacts`; `number` is what the engine thread knows it by.
    """

    info: ModelInfo
    text: TextModel
    prefill_policy: PrefillPolicy
    step_tokens: int
    state_bytes: int
    holds_workspace: bool
    prefix_bytes: int
    durable: DurablePlace
    number: int = 0

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


def find_files(
    settings: EngineSettings, *, progress: Callable[[LoadProgress], None] = no_load_progress, paths: bool = True
) -> ModelFiles:
    """Find the model's files, fetching them if they are not on this machine, and open them; no tensor is read.

    Args:
        settings: which model, and which adapters with it.
        progress: told what is done; called from any thread.
        paths: whether the model may be named by a path.

    Raises:
        EngineError: there is no such model, or its files cannot be used.
    """
    adapters = open_adapters(settings.adapters)
    location = _locate(settings.model, progress, paths=paths)
    progress(LoadProgress(phase=LoadPhase.VALIDATING))
    return ModelFiles(name=location.name, artifact=open_artifact(location.path), adapters=adapters)


def open_text(files: Future[ModelFiles]) -> TextModel:
    """The text half of `files`, once they are found. Begun when weights are about to be read, and done beside that.

    Raises:
        EngineError: they were not found, or their text half cannot be used.
    """
    text_model = importlib.import_module("engine.execution.text_model")  # imported beside the reading of weights
    opened: TextModel = text_model.open_text_model(files.result().artifact)
    return opened


def prepare(settings: EngineSettings) -> Runtime:
    """Bring the machinery up; the first thing that the engine thread does.

    Raises:
        ConfigurationError: a setting cannot be honoured on this machine.
    """
    return prepare_runtime(
        RuntimeSettings(
            cache_directory=settings.state_dir / "cache",
            device=settings.device,
            compute_dtype=settings.dtype,
            blas=settings.blas,
        )
    )


def load_on_engine_thread(
    settings: EngineSettings,
    runtime: Runtime,
    files: Future[ModelFiles],
    begin_text: Callable[[], Future[TextModel]],
    *,
    is_unwanted: Callable[[], bool],
    progress: Callable[[LoadProgress], None] = no_load_progress,
    beside: bool = False,
) -> tuple[Stepper, Resident]:
    """Bring the tensors in, on the engine thread, and warm the model.

    Args:
        settings: how it is held.
        runtime: the prepared machinery.
        files: its files, once they are found.
        begin_text: begins to open its text half, which takes the interpreter for a while: called once compiled code
            reads the weights, which needs none.
        is_unwanted: asked between tensors, and whether to give up; others may have their turn meanwhile.
        progress: told what is done.
        beside: whether another model is resident.

    Raises:
        EngineError: the model cannot be loaded here, or nobody wants it any more.
    """
    started_at = time.perf_counter()
    reading = importlib.import_module("engine.execution.graph_reading")  # imports mlx, which the runtime has made ready
    model_files = files.result()
    _require_wanted(is_unwanted)
    text: Future[TextModel] | None = None

    def go_on() -> None:
        _require_wanted(is_unwanted)
        if text is not None and text.done():
            text.result()  # a text half that cannot be used ends the load

    def use_the_interpreter() -> Future[TextModel]:
        """What is left to do beside compiled code that reads."""
        nonlocal text
        if text is None:
            text = begin_text()
            importlib.import_module("engine.execution.loading")
        return text

    pool = ThreadPoolExecutor(1, thread_name_prefix="mlx-stream-hash")
    try:
        fingerprint = pool.submit(
            weights_fingerprint, model_files.artifact.weight_files, settings.state_dir / "cache" / "fingerprints"
        )
        read = reading.read_graph(
            model_files,
            runtime,
            settings,
            before_each=go_on,
            before_waiting=use_the_interpreter,
            progress=progress,
            beside=beside,
        )
        opened = use_the_interpreter()
        loading = importlib.import_module("engine.execution.loading")
        loaded = loading.load_model(
            model_files,
            read,
            runtime,
            settings,
            fingerprint=lambda: _awaited(fingerprint, go_on),
            has_chat_template=lambda: _awaited(opened, go_on).template is not None,
            before_each=go_on,
            progress=progress,
            started_at=started_at,
        )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    stepper: Stepper = loaded.stepper
    return stepper, Resident(
        info=loaded.info,
        text=opened.result(),
        prefill_policy=loaded.binding.prefill_policy,
        step_tokens=stepper.limits.prefill_step_tokens,
        state_bytes=stepper.limits.state_bytes,
        holds_workspace=settings.state_bytes is None,
        prefix_bytes=stepper.prefixes.capacity_bytes,
        durable=loaded.durable,
    )


def _awaited(future: Future[T], go_on: Callable[[], None]) -> T:
    """The result of `future`; others have their turn until it is there."""
    while True:
        try:
            return future.result(timeout=PAUSE_SECONDS)
        except TimeoutError:
            if future.done():  # the work itself has timed out
                raise
            go_on()


def _require_wanted(is_unwanted: Callable[[], bool]) -> None:
    if is_unwanted():
        raise UnavailableError("stopped", "the load was given up")


def _locate(reference: str, progress: Callable[[LoadProgress], None], *, paths: bool) -> catalogue.ModelLocation:
    try:
        return catalogue.resolve(reference, paths=paths)
    except MissingArtifactError:
        logger.info("fetching model %s", reference)
        log = _log_progress()

        def fetched(pulled: PullProgress) -> None:
            log(pulled)
            progress(
                LoadProgress(phase=LoadPhase.FETCHING, done_bytes=pulled.done_bytes, total_bytes=pulled.total_bytes)
            )

        return catalogue.pull(reference, fetched, paths=paths)


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
