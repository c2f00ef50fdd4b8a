"""The front door over a script: what a scenario refuses is refused here, everything else is the real engine's."""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from engine.contracts.composition import Composition
from engine.contracts.errors import OverloadedError, UnavailableError, UnsupportedOptionError
from engine.contracts.graph import GraphDeclaration, GraphDescriptor, GraphGeometry
from engine.contracts.load import no_load_progress
from engine.contracts.model import ModelInfo, RuntimeInfo
from engine.execution.engine import Engine
from engine.execution.resident import DEFAULT_DISK_BYTES, DurablePlace, Resident
from engine.execution.scheduler import Limits
from engine.execution.scripted.script import END_ID, read_script
from engine.execution.scripted.stepper import CanvasStepper, ScriptedStepper
from engine.execution.scripted.text import bytes_of_prompt, scripted_text_model
from engine.generation.bindings.prefill_policy import DEFAULT_CHUNK_TOKENS, FixedChunk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.contracts.events import GenerationRequest
    from engine.contracts.load import LoadProgress
    from engine.execution.engine import Generation
    from engine.execution.job import Stepper
    from engine.execution.resident import EngineSettings
    from engine.execution.scripted.script import Script

logger = logging.getLogger(__name__)

STEP_TOKENS: Final = 4 * DEFAULT_CHUNK_TOKENS
STATE_BYTES: Final = 1 << 40
ABI: Final = "script-v1"


class ScriptedEngine(Engine):
    """An engine that plays the scenarios of a file, for tests of clients; nothing of it needs mlx."""

    def __init__(self, settings: EngineSettings, script_file: Path) -> None:
        """Read the script.

        Raises:
            ConfigurationError: it cannot be used.
        """
        super().__init__(settings)
        self._script = read_script(script_file)
        self._attempts: Counter[tuple[str, str]] = Counter()

    async def generate(
        self, request: GenerationRequest, *, require_open: Callable[[], None] = lambda: None
    ) -> Generation:
        """Refuse what the scenario refuses, then accept as ever.

        Raises:
            NotFoundError: the prompt names a scenario that the script does not have.
            EngineError: as the engine.
        """
        self._refuse_attempt(request)
        return await super().generate(request, require_open=require_open)

    async def load_model(
        self,
        reference: str,
        progress: Callable[[LoadProgress], None] = no_load_progress,  # noqa: ARG002 - the engine's own
    ) -> ModelInfo:
        """Nothing else is loaded into a process that needs no mlx.

        Raises:
            UnsupportedOptionError: always.
        """
        raise UnsupportedOptionError("model", f"{reference!r} cannot be loaded: this engine plays a script")

    def _begin_loading(self, report: Callable[[Resident], None]) -> Callable[[], Stepper]:
        def load() -> Stepper:
            durable = _durable_place(self._script, self._settings)
            kind = CanvasStepper if self._script.revises else ScriptedStepper
            limits = _limits(self._settings)
            stepper = kind(self._script, limits, clock=time.perf_counter, sleep=time.sleep, store=durable.store)
            report(_resident(self._script, self._settings, limits, durable))
            return stepper

        return load

    def _refuse_attempt(self, request: GenerationRequest) -> None:
        scenario = self._script.scenario_of(bytes_of_prompt(request.prompt))
        if scenario.refusal is None:
            return
        attempt = (scenario.name, request.request_id)
        self._attempts[attempt] += 1
        refused = self._attempts[attempt] <= scenario.refusal.times
        fields = {"request_id": request.request_id, "attempt": self._attempts[attempt], "refused": refused}
        logger.info("scripted attempt", extra={"fields": fields})
        if not refused:
            return
        if scenario.refusal.retry_after_seconds is None:
            raise UnavailableError("loading", "the script is not ready for this request yet")
        raise OverloadedError("the script", limit=0, used=0, retry_after_seconds=scenario.refusal.retry_after_seconds)


def _limits(settings: EngineSettings) -> Limits:
    step_tokens = settings.prefill_step_tokens or STEP_TOKENS
    return Limits(
        max_rows=settings.max_rows,
        prefill_step_tokens=step_tokens,
        prefill_chunk_tokens=step_tokens,
        mixed_prefill_tokens=step_tokens,
        state_bytes=settings.state_bytes or STATE_BYTES,
    )


def _durable_place(script: Script, settings: EngineSettings) -> DurablePlace:
    """Where generations of a durable script are kept: their tokens, since there is no state to take checkpoints of."""
    if not script.is_durable or settings.checkpoint_bytes == 0:
        return DurablePlace(refusal="this script keeps nothing of its generations")
    disk = importlib.import_module("engine.state.durable_disk")  # imports mlx, which other scripts do without
    capacity_bytes = settings.checkpoint_bytes or DEFAULT_DISK_BYTES
    store = disk.DurableDisk(
        settings.state_dir, capacity_bytes=capacity_bytes, max_age_seconds=settings.checkpoint_age_seconds
    )
    return DurablePlace(store=store)


def _resident(script: Script, settings: EngineSettings, limits: Limits, durable: DurablePlace) -> Resident:
    return Resident(
        info=_model_info(script, settings),
        text=scripted_text_model(script),
        prefill_policy=FixedChunk(DEFAULT_CHUNK_TOKENS),
        step_tokens=limits.prefill_step_tokens,
        state_bytes=limits.state_bytes,
        holds_workspace=False,
        prefix_bytes=0,
        durable=durable,
    )


def _model_info(script: Script, settings: EngineSettings) -> ModelInfo:
    """The smallest shape that a model can have; its state takes 8 bytes a token."""
    return ModelInfo(
        name=script.model_name,
        fingerprint=script.fingerprint,
        model_type="scripted",
        descriptor=GraphDescriptor(
            id=f"scripted:{script.model_name}",
            backend="script",
            graph_abi=ABI,
            state_abi=ABI,
            artifact=script.fingerprint,
        ),
        declaration=GraphDeclaration(method="denoising" if script.revises else "autoregressive"),
        geometry=GraphGeometry(
            vocab_size=script.vocab_size,
            hidden_size=1,
            layers=1,
            heads=1,
            kv_heads=1,
            head_dim=1,
            context_length=script.context_tokens,
            layer_types=("full_attention",),
            canvas_length=script.canvas_tokens,
        ),
        composition=Composition(prefill_tail_split=False, max_rows=settings.max_rows),
        runtime=RuntimeInfo(device="cpu", device_name="a script", mlx_version=""),
        eos_token_ids=(END_ID,),
        bos_token_id=None,
        option_defaults=script.defaults,
        weights_bytes=0,
        parameters=0,
        stored_quantization="",
        has_chat_template=True,
        load_seconds=0.0,
    )
