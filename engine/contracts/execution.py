"""The resolved plan of one generation: what will really run, and why softer wishes were not met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.contracts.graph import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedExecution:
    """Frozen outcome of planning. `reasons` explains each mismatch that did not refuse the request.

    `kv_storage` is the store key of the form in which keys and values are kept.
    `row_tile_tokens` is set where a row's bits do not depend on its company; see `Composition`.
    """

    method: Method = "autoregressive"
    mechanism: Literal["continuous", "unsupported"] = "continuous"
    paged_kv: bool = False
    kv_storage: str = "bf16"
    prompt_cache: bool = False
    checkpoint: bool = False
    fill: bool = False
    compiled_decode: bool = False
    grammar_jump: bool = False
    reasons: tuple[str, ...] = ()
    row_tile_tokens: int | None = None
