"""The stream of one generation, as the front door hands it out: started → (progress | canvas | tokens)* → finished.

The generation's end is always a `GenerationFinished`; an error inside it says what the status must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.contracts.errors import EngineError
    from engine.contracts.execution import ResolvedExecution
    from engine.contracts.graph import GraphDescriptor
    from engine.contracts.options import GenerateOptions, ResolvedOptions
    from engine.contracts.prompt import Prompt
    from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call. `caller` scopes `request_id`; an empty `request_id` is minted. `model` "" means the served one.

    A higher `priority` leaves the queue and is prefilled earlier. Of equals who wait, those whose `deadline_seconds`
    (what was left of the call's time when it arrived) end soon go before those who have time.
    `max_prompt_tokens` is a bound on the prompt, within the model's context.
    `draft_blocks` asks for the canvases that are still being revised.
    """

    prompt: Prompt
    options: GenerateOptions
    request_id: str = ""
    model: str = ""
    caller: str = ""
    priority: int = 0
    draft_blocks: bool = False
    max_prompt_tokens: int | None = None
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted:
    """The generation left the queue and holds a row. Counts are tokens."""

    generation_id: str
    request_id: str
    model: str
    weights_fingerprint: str
    descriptor: GraphDescriptor
    execution: ResolvedExecution
    options: ResolvedOptions
    prompt_tokens: int
    cached_tokens: int = 0
    resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How much of the prompt has been prefilled. Merging keeps the newest."""

    prefilled_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """Committed tokens and the text that became final with them (either may be empty)."""

    tokens: tuple[GeneratedToken, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasRevised:
    """What block `block_index` would become after `step` passes; `committed` when that is its end.

    Its tokens reach past an end token or the budget: only `TokensGenerated` says what was generated. Of one block, a
    slow reader finds the newest alone.
    """

    block_index: int
    step: int
    tokens: tuple[int, ...]
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The end. `error` is None for STOP and LENGTH; `matched_stop` names the stop sequence that was met."""

    finish_reason: FinishReason
    stats: GenerateStats
    matched_stop: str = ""
    error: EngineError | None = None


GenerationEvent = GenerationStarted | PrefillProgress | CanvasRevised | TokensGenerated | GenerationFinished
