"""The predicted memory of a model under a load, and what is left at one moment. Units: bytes and tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLoad:
    """Generations at the same time, each with a prompt and at most so many generated tokens.

    `images` are those of each prompt; their tokens are among `prompt_tokens`, and each is as large as images become.
    """

    prompt_tokens: int
    max_tokens: int
    rows: int = 1
    images: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a load takes, and what may be used: weights, the workspace of any step, and the memory for rows' states.

    `fits` says whether all rows of the load can run at the same time; `max_context_tokens` is the longest that one row
    can become, prompt and completion together.
    """

    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int
    fits: bool
    max_context_tokens: int

    @property
    def total_bytes(self) -> int:
        """All of the load."""
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One moment of the memory that one more request would come from.

    Attributes:
        smallest_request_bytes: what the smallest request takes of the memory for rows while nobody else is there.
        state_limit_bytes: the memory for rows.
        free_bytes: memory of the machine that the kernel can still find for this process.
        active_bytes: what mlx holds: weights, states, the workspace of a step.
        active_limit_bytes: what it should hold at most on this device; None where the machine's memory is all there is.
    """

    smallest_request_bytes: int
    state_limit_bytes: int
    free_bytes: int
    active_bytes: int
    active_limit_bytes: int | None = None
