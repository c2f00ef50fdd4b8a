"""The predicted memory of a model under a load. Units: bytes and tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLoad:
    """Generations at the same time, each with a prompt and at most so many generated tokens."""

    prompt_tokens: int
    max_tokens: int
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a load takes, beside what may be used. `state_bytes` is the part of the budget that rows' states share.

    `max_context_tokens` is the longest that one row can become: prompt and completion together.
    """

    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    state_bytes: int
    max_context_tokens: int

    @property
    def total_bytes(self) -> int:
        """All of the load."""
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def budget_bytes(self) -> int:
        """What may be used: weights, workspace, and the memory for states."""
        return self.weights_bytes + self.workspace_bytes + self.state_bytes

    @property
    def fits(self) -> bool:
        """Whether all rows of the load can run at the same time."""
        return self.kv_bytes <= self.state_bytes
