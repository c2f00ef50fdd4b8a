"""How busy an engine is, what its live generations do, and how far a load of a model has come.

Counters only grow over an engine's life. Units are in the names. Importing this module never imports mlx.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

STEP_TOKEN_EDGES: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper edges of the classes in which steps are counted by their tokens; a last class holds what is larger.

Source: the edges of vLLM's `iteration_tokens_total`, so that dashboards can be shared.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One moment of an engine.

    Attributes:
        running: generations that hold a row.
        queued: generations that hold none yet, those for whom one is free included.
        row_limit: most generations that may hold a row.
        queue_limit: most generations that may wait while no row, or no memory for one, is free.
        state_bytes: memory promised to the rows that run.
        state_limit_bytes: memory that rows may be promised in all.
        prefix_entries: states kept for later prompts, in memory.
        prefix_bytes: what they hold.
        prefix_limit_bytes: what they may hold.
        step_age_seconds: how long the step in hand has taken; 0 when idle.
        steps: steps that were started.
        step_tokens: steps by `STEP_TOKEN_EDGES`, each class by itself.
        packed_tokens: tokens of all steps.
        prefilled_tokens: prompt tokens that were computed.
        generated_tokens: tokens that were committed.
    """

    running: int = 0
    queued: int = 0
    row_limit: int = 0
    queue_limit: int = 0
    state_bytes: int = 0
    state_limit_bytes: int = 0
    prefix_entries: int = 0
    prefix_bytes: int = 0
    prefix_limit_bytes: int = 0
    step_age_seconds: float = 0.0
    steps: int = 0
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_EDGES) + 1)
    packed_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0

    @property
    def state_share(self) -> float:
        """The part of the memory for rows that is promised, from 0 to 1."""
        return min(1.0, self.state_bytes / self.state_limit_bytes) if self.state_limit_bytes > 0 else 0.0


class GenerationPhase(enum.Enum):
    """What a live generation does."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStatus:
    """A live generation at one moment. `number` orders generations by arrival; `arrived_at` is Unix time in seconds."""

    number: int
    generation_id: str
    request_id: str
    model: str
    phase: GenerationPhase
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    arrived_at: float


class LoadPhase(enum.Enum):
    """Phases of a load, in order."""

    FETCHING = "fetching"
    VALIDATING = "validating"
    READING = "reading"
    WARMING = "warming"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a load has come; `total_bytes` is 0 while it is not known."""

    phase: LoadPhase
    done_bytes: int = 0
    total_bytes: int = 0


def no_load_progress(progress: LoadProgress) -> None:
    """Ignore `progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadReport:
    """What taking a model off has freed and ended."""

    freed_bytes: int
    aborted_generations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearReport:
    """What forgetting kept prefixes has freed, in memory and on disk."""

    cleared_entries: int
    freed_bytes: int
