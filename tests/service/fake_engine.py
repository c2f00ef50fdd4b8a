"""A scripted engine with the real one's front door: it says what a test tells it to, and records what it was asked."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from engine.contracts.adapters import AdapterInfo
from engine.contracts.cancellation import AbortReason
from engine.contracts.composition import Composition
from engine.contracts.durability import Continuation, DurableIdentity, DurableStore
from engine.contracts.errors import (
    DuplicateRequestError,
    EngineError,
    GenerationAborted,
    UnavailableError,
    UnsupportedOptionError,
)
from engine.contracts.events import (
    CanvasRevised,
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    GenerationStarted,
    PrefillProgress,
    TokensGenerated,
)
from engine.contracts.execution import ResolvedExecution
from engine.contracts.graph import GraphDeclaration, GraphDescriptor, GraphGeometry
from engine.contracts.load import (
    ClearReport,
    EngineLoad,
    GenerationPhase,
    GenerationStatus,
    LoadProgress,
    UnloadReport,
)
from engine.contracts.memory import MemoryEstimate, MemoryLoad, MemoryReading
from engine.contracts.model import ModelInfo, RuntimeInfo
from engine.contracts.options import OptionDefaults, ResolvedOptions
from engine.contracts.prompt import ChatPrompt
from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats
from engine.execution.delivery import Mailbox
from engine.execution.engine import EngineState

NUMBERS = itertools.count()

DESCRIPTOR = GraphDescriptor(
    id="llama:tiny",
    backend="mlx",
    graph_abi="mlx-hidden-bsh-v1",
    state_abi="legacy-cache-array-v1",
    artifact="sha256:0123",
)

MODEL = ModelInfo(
    name="tiny",
    fingerprint="sha256:0123",
    model_type="llama",
    descriptor=DESCRIPTOR,
    declaration=GraphDeclaration(),
    geometry=GraphGeometry(
        vocab_size=64,
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        context_length=128,
        layer_types=("full_attention", "full_attention"),
    ),
    composition=Composition(),
    runtime=RuntimeInfo(device="cpu", device_name="a CPU", mlx_version="0", blas="openblas"),
    eos_token_ids=(2, 3),
    bos_token_id=1,
    option_defaults=OptionDefaults(temperature=0.5),
    weights_bytes=1000,
    parameters=250,
    stored_quantization="Q4_1",
    has_chat_template=True,
    load_seconds=0.25,
)

OPTIONS = ResolvedOptions(
    max_tokens=16,
    eos_token_ids=(2, 3),
    stop_sequences=("END",),
    prefill_chunk_size=8,
    temperature=0.0,
    top_p=0.0,
    top_k=0,
    min_p=0.0,
    min_tokens_to_keep=1,
    seed=2**64 - 1,
    seed_was_explicit=False,
)


IDENTITY = DurableIdentity(model="tiny", weights="w", tokenizer="t", kv_storage="bf16", adapters="", arithmetic="a")


def adapter(adapter_id: str) -> AdapterInfo:
    return AdapterInfo(
        id=adapter_id,
        revision=f"sha256:{adapter_id}",
        rank=8,
        scale=2.5,
        mounted_layers=2,
        applied_tensors=28,
        skipped_tensors=("one", "two"),
        file_bytes=400,
        resident_bytes=300,
    )


class FakeGeneration:
    """One scripted generation; it ends by its script, or as soon as it is aborted."""

    def __init__(
        self,
        request: GenerationRequest,
        script: Script,
        on_finished: Callable[[], None],
        generation_id: str = "",
        known: tuple[int, ...] = (),
    ) -> None:
        self.request = request
        self.known = known
        self.generation_id = generation_id or uuid.uuid4().hex
        self.request_id = request.request_id or self.generation_id
        self.model = MODEL.name
        self.arrived_at = time.time()
        self.aborted_at: float | None = None
        self.number = next(NUMBERS)
        self.abort_reason: AbortReason | None = None
        self.aborted = asyncio.Event()
        self.emitted = 0
        self._mailbox = Mailbox(on_finished=on_finished)
        self._task = asyncio.ensure_future(self._run(script))

    async def next_event(self) -> GenerationEvent:
        return await self._mailbox.next_event()

    async def finished(self) -> GenerationFinished:
        return await self._mailbox.finished()

    def abort(self, reason: AbortReason) -> None:
        if self.abort_reason is None:
            self.abort_reason = reason
            self.aborted_at = time.perf_counter()
            self.aborted.set()

    def status(self) -> GenerationStatus:
        return GenerationStatus(
            number=self.number,
            generation_id=self.generation_id,
            request_id=self.request_id,
            model=self.model,
            phase=GenerationPhase.DECODING if self.emitted else GenerationPhase.QUEUED,
            prompt_tokens=5,
            prefilled_tokens=4,
            generated_tokens=self.emitted,
            arrived_at=self.arrived_at,
        )

    def start(self, **changes: object) -> None:
        """Emit the first event."""
        started = GenerationStarted(
            generation_id=self.generation_id,
            request_id=self.request_id,
            model=MODEL.name,
            weights_fingerprint=MODEL.fingerprint,
            descriptor=DESCRIPTOR,
            execution=ResolvedExecution(),
            options=OPTIONS,
            prompt_tokens=5,
        )
        self._mailbox.put(dataclasses.replace(started, **changes))

    def progress(self, prefilled_tokens: int, prompt_tokens: int) -> None:
        """Emit the progress of the prefill."""
        self._mailbox.put(PrefillProgress(prefilled_tokens, prompt_tokens))

    def say(self, *texts: str) -> None:
        """Emit one token per text."""
        tokens = []
        for text in texts:
            tokens.append(GeneratedToken(10 + self.emitted, self.emitted, text.encode()))
            self.emitted += 1
        self._mailbox.put(TokensGenerated(tuple(tokens), "".join(texts)))

    async def revise(self, canvas: CanvasRevised) -> None:
        """Emit a canvas, and wait until it was read: a newer one would take its place."""
        self._mailbox.put(canvas)
        await self.read()

    async def read(self) -> None:
        """Wait until what was emitted is read."""
        while self._mailbox._output:  # noqa: ASYNC110 - the mailbox tells nobody that it was read
            await asyncio.sleep(0)

    def end(self, reason: FinishReason = FinishReason.STOP, error: EngineError | None = None, **more: str) -> None:
        """Emit the end."""
        stats = GenerateStats(prompt_tokens=5, generated_tokens=self.emitted, queue_ms=1.5, cache_tokens=(7, 8))
        self._mailbox.put(GenerationFinished(finish_reason=reason, stats=stats, error=error, **more))

    async def _run(self, script: Script) -> None:
        play, aborted = asyncio.ensure_future(script(self)), asyncio.ensure_future(self.aborted.wait())
        await asyncio.wait({play, aborted}, return_when=asyncio.FIRST_COMPLETED)
        aborted.cancel()
        if play.done():
            return play.result()
        play.cancel()
        self._end_aborted(self.abort_reason or AbortReason.REQUESTED)
        return None

    def _end_aborted(self, reason: AbortReason) -> None:
        if reason is AbortReason.SHUTDOWN:
            self.end(FinishReason.ERROR, UnavailableError("stopped", "the service is shutting down"))
        elif reason is AbortReason.DEADLINE:
            self.end(FinishReason.DEADLINE, GenerationAborted(reason))
        else:
            self.end(FinishReason.CANCELLED, GenerationAborted(reason))


Script: TypeAlias = Callable[[FakeGeneration], Awaitable[None]]


async def say_hello(generation: FakeGeneration) -> None:
    """The default script: three tokens and an ordinary end."""
    generation.start()
    for text in ("Hel", "lo", "!"):
        generation.say(text)
        await asyncio.sleep(0)
    generation.end()


def never_end(*texts: str) -> Script:
    """A script that starts, says `texts`, and goes on for ever."""

    async def script(generation: FakeGeneration) -> None:
        generation.start()
        for text in texts:
            generation.say(text)
        await asyncio.Event().wait()

    return script


async def never_start(generation: FakeGeneration) -> None:
    """A script that stays in the queue."""
    await asyncio.Event().wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeAcceptance:
    """A checked request for a durable generation; its key is what was asked."""

    generation_id: str
    request_id: str
    prompt_ids: list[int]
    options: ResolvedOptions
    checkpoint_key: str
    identity: DurableIdentity

    def continuing(self, generation_id: str, continuation: Continuation) -> FakeAcceptance:
        options = dataclasses.replace(self.options, seed=continuation.seed)
        return dataclasses.replace(self, generation_id=generation_id, options=options)


class FakeEngine:
    """What the service sees of an engine."""

    def __init__(self, settings: object = None, durable_store: DurableStore | None = None) -> None:
        self.settings = settings
        self._durable_store = durable_store
        self.identity = IDENTITY
        self.script: Script = say_hello
        self.refusal: Exception | None = None
        self.acceptance: Callable[[], Awaitable[None]] | None = None
        self.requests: list[GenerationRequest] = []
        self.generations: list[FakeGeneration] = []
        self.folders: list[object] = []
        self.accepted = asyncio.Event()
        self.live: dict[str, FakeGeneration] = {}
        self.state = EngineState.READY
        self.stalled = 0.0
        self.step = 0.0
        self.load_error: EngineError | None = None
        self.info = MODEL
        self.unloaded = False
        self.observers: list[Callable[[], None]] = []
        self.busy = EngineLoad(queue_limit=7)
        self.reading: MemoryReading | None = None
        self.changes: list[tuple[object, ...]] = []
        self.progress: list[LoadProgress] = []
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.stopped = False
        self._failed = asyncio.Event()

    @property
    def model(self) -> ModelInfo:
        if self.state is not EngineState.READY:
            raise UnavailableError(self.state.value)
        return self.info

    @property
    def can_serve(self) -> bool:
        return self.state is EngineState.READY and not self.unloaded

    def observe(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.observers.append(changed)
        return lambda: self.observers.remove(changed)

    def load(self) -> EngineLoad:
        return self.busy

    def memory(self) -> MemoryReading | None:
        return self.reading

    def live_generations(self) -> list[GenerationStatus]:
        return sorted((one.status() for one in self.live.values()), key=lambda status: status.number)

    def abort_all(self) -> int:
        generations = list(self.live.values())
        for generation in generations:
            generation.abort(AbortReason.SHUTDOWN)
        return len(generations)

    async def load_model(self, reference: str, progress: Callable[[LoadProgress], None]) -> ModelInfo:
        self.changes.append(("load", reference))
        for one in self.progress:
            progress(one)
            await asyncio.sleep(0)
        try:
            await self.load_gate.wait()
        except asyncio.CancelledError:
            self.changes.append(("load given up",))
            raise
        if self.load_error is not None:
            raise self.load_error
        return MODEL

    async def unload_model(self, name: str) -> UnloadReport:
        self.changes.append(("unload", name))
        return UnloadReport(freed_bytes=1000, aborted_generations=2)

    async def mount_adapter(self, adapter_id: str, source: str, *, model: str) -> AdapterInfo:
        self.changes.append(("mount", adapter_id, source, model))
        return adapter(adapter_id)

    async def unmount_adapter(self, adapter_id: str, *, model: str) -> int:
        self.changes.append(("unmount", adapter_id, model))
        return 300

    async def clear_prefixes(self, *, model: str, salt: str | None) -> ClearReport:
        self.changes.append(("clear", model, salt))
        return ClearReport(cleared_entries=3, freed_bytes=4000)

    def stalled_seconds(self) -> float:
        return self.stalled

    def step_seconds(self) -> float:
        return self.step

    def fail(self) -> None:
        self.state = EngineState.FAILED
        self._failed.set()

    async def start(self) -> ModelInfo:
        self.state = EngineState.LOADING
        await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self.state = EngineState.READY
        return MODEL

    async def until_reading(self, seconds: float) -> None:
        del seconds

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        self.stopped = True
        for generation in list(self.live.values()):
            generation.abort(AbortReason.SHUTDOWN)
        self.state = EngineState.STOPPED

    async def wait_failed(self) -> None:
        await self._failed.wait()

    async def generate(
        self, request: GenerationRequest, *, require_open: Callable[[], None] = lambda: None
    ) -> FakeGeneration:
        self.requests.append(request)
        _ = self.model
        if self.refusal is not None:
            raise self.refusal
        if self.acceptance is not None:
            await self.acceptance()
        require_open()
        if request.request_id in self.live:
            raise DuplicateRequestError(request.request_id)
        return self._run(request)

    @property
    def durable_store(self) -> DurableStore:
        if self._durable_store is None:
            raise UnsupportedOptionError("delivery.durable", "this engine keeps nothing")
        return self._durable_store

    async def prepare(self, request: GenerationRequest) -> FakeAcceptance:
        _ = self.model, self.durable_store
        if self.refusal is not None:
            raise self.refusal
        await asyncio.sleep(0)  # as the real one, which tokenizes beside the loop
        if self.acceptance is not None:
            await self.acceptance()
        generation_id = uuid.uuid4().hex
        logprobs = bool(request.options.logprobs)
        prompt_ids = list(getattr(request.prompt, "ids", (1, 2, 3)))
        asked = f"{prompt_ids} {request.options.max_tokens} {request.options.seed}"
        return FakeAcceptance(
            generation_id=generation_id,
            request_id=request.request_id or generation_id,
            prompt_ids=prompt_ids,
            options=dataclasses.replace(OPTIONS, logprobs=logprobs),
            checkpoint_key=hashlib.sha256(asked.encode()).hexdigest(),
            identity=self.identity,
        )

    def durable_identity(self, request: GenerationRequest) -> DurableIdentity:
        return self.identity

    def begin(
        self,
        request: GenerationRequest,
        acceptance: FakeAcceptance,
        folder: object = None,
        continuation: Continuation | None = None,
    ) -> FakeGeneration:
        request = dataclasses.replace(request, request_id=acceptance.request_id)
        if request.request_id in self.live:
            raise DuplicateRequestError(request.request_id)
        self.folders.append(folder)
        known = () if continuation is None else continuation.generated
        return self._run(request, acceptance.generation_id, known)

    def _run(self, request: GenerationRequest, generation_id: str = "", known: tuple[int, ...] = ()) -> FakeGeneration:
        def ended() -> None:
            self.live.pop(generation.request_id, None)

        generation = FakeGeneration(request, self.script, ended, generation_id, known)
        self.generations.append(generation)
        self.accepted.set()
        self.live[generation.request_id] = generation
        return generation

    def abort(self, *, caller: str, request_id: str = "", generation_id: str = "") -> FakeGeneration | None:
        for generation in self.live.values():
            if generation.request_id == request_id or generation.generation_id == generation_id:
                generation.abort(AbortReason.REQUESTED)
                return generation
        return None

    def estimate_memory(self, load: MemoryLoad, *, model: str) -> MemoryEstimate:
        return MemoryEstimate(
            weights_bytes=1000,
            kv_bytes=load.rows * (load.prompt_tokens + load.max_tokens),
            workspace_bytes=10,
            budget_bytes=1110,
            fits=load.rows * (load.prompt_tokens + load.max_tokens) <= 100,
            max_context_tokens=77,
        )

    async def tokenize(
        self, text: str, *, model: str, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[int]:
        return [int(add_special_tokens), int(parse_special_tokens), *text.encode()]

    async def detokenize(self, ids: Sequence[int], *, model: str, skip_special_tokens: bool) -> str:
        return f"{list(ids)} {skip_special_tokens}"

    async def render_chat(self, chat: ChatPrompt, *, model: str) -> tuple[str, list[int]]:
        return "|".join(message.role for message in chat.messages), [len(chat.messages)]
