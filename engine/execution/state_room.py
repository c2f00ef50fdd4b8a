"""What the smallest request needs of the memory for KV state, so that a service can warn of too little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.execution.accepting import ELEMENT_BYTES
from engine.generation.memory import row_bytes

if TYPE_CHECKING:
    from engine.contracts.model import ModelInfo


def smallest_row_bytes(model: ModelInfo) -> int:
    """Bytes of the state of a row with a prompt of one token and one token of output."""
    composition = model.composition
    return row_bytes(model.geometry, 2, ELEMENT_BYTES[composition.compute_dtype], kv=composition.kv, chunk_tokens=1)
