"""How much memory rows need, and whether it is there: the one prediction that admission and estimates share.

Pure arithmetic on what headers say. Units: bytes and tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.contracts.memory import MemoryEstimate
from engine.generation.memory import row_bytes, workspace_bytes

if TYPE_CHECKING:
    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry
    from engine.contracts.memory import MemoryLoad
    from engine.contracts.model import ModelInfo
    from engine.contracts.prefill import PrefillPolicy

ELEMENT_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a prediction is made from: sizes, forms, and the memory that rows' states may take together."""

    geometry: GraphGeometry
    composition: Composition
    prefill_policy: PrefillPolicy
    weights_bytes: int
    step_tokens: int
    state_bytes: int


def needed_bytes(
    geometry: GraphGeometry, composition: Composition, *, prompt_tokens: int, max_tokens: int, chunk_tokens: int
) -> int:
    """Bytes that a row's state takes at its longest."""
    return row_bytes(
        geometry,
        prompt_tokens + max_tokens,
        ELEMENT_BYTES[composition.compute_dtype],
        kv=composition.kv,
        chunk_tokens=min(prompt_tokens, chunk_tokens),
    )


def smallest_row_bytes(model: ModelInfo) -> int:
    """Bytes of the state of a row with a prompt of one token and one token of output."""
    return needed_bytes(model.geometry, model.composition, prompt_tokens=1, max_tokens=1, chunk_tokens=1)


def estimate(facts: MemoryFacts, load: MemoryLoad) -> MemoryEstimate:
    """Predict `load`; like admission, it cuts completions to the room that the context leaves."""
    room = max(0, facts.geometry.context_length - load.prompt_tokens)
    row = _row_bytes(facts, load.prompt_tokens, min(load.max_tokens, room))
    contexts = range(1, facts.geometry.context_length + 1)
    return MemoryEstimate(
        weights_bytes=facts.weights_bytes,
        kv_bytes=load.rows * row if load.prompt_tokens or load.max_tokens else 0,
        workspace_bytes=workspace_bytes(facts.geometry, facts.step_tokens),
        state_bytes=facts.state_bytes,
        max_context_tokens=bisect_right(contexts, facts.state_bytes, key=lambda tokens: _row_bytes(facts, tokens, 0)),
    )


def _row_bytes(facts: MemoryFacts, prompt_tokens: int, max_tokens: int) -> int:
    chunk_tokens = facts.prefill_policy.chunk_size(max(1, prompt_tokens))
    return needed_bytes(
        facts.geometry,
        facts.composition,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        chunk_tokens=chunk_tokens,
    )
