"""Prefill policy: large chunks for short prompts, a bounded attention workspace for long ones.

This changes the size of work units, never whether a request is admitted; explicit chunk sizes stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.contracts.graph import GraphGeometry, ResidentGraph
    from engine.contracts.prefill import PrefillPolicy

DEFAULT_CHUNK_TOKENS = 2048
SMALLEST_CHUNK_TOKENS = 8
WORKSPACE_BYTES = 1024**3
SCORE_BYTES = 2
FUSED_HEAD_DIMS = frozenset({64, 72, 80, 96, 128})


@dataclass(frozen=True, slots=True)
class FixedChunk:
    """The same chunk for every prompt."""

    tokens: int

    def chunk_size(self, prompt_tokens: int) -> int:  # noqa: ARG002 - the Protocol's parameter
        """Tokens per chunk."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class BoundedWorkspace:
    """Halves the chunk until the score workspace of the widest layer fits `WORKSPACE_BYTES`."""

    geometry: GraphGeometry

    def chunk_size(self, prompt_tokens: int) -> int:
        """Tokens per chunk."""
        chunk = DEFAULT_CHUNK_TOKENS
        while (
            chunk > SMALLEST_CHUNK_TOKENS and sdpa_fallback_bytes(self.geometry, chunk, prompt_tokens) > WORKSPACE_BYTES
        ):
            chunk //= 2
        return chunk


def resolve_mlx_prefill_policy(graph: ResidentGraph, override: int | None = None) -> PrefillPolicy:
    """Choose the policy of a graph; `override` (tokens) makes the chunk fixed, and at least 1."""
    if override is not None:
        return FixedChunk(max(1, override))
    if not graph.graph_capabilities.prefill.bounded_workspace:
        return FixedChunk(DEFAULT_CHUNK_TOKENS)
    return BoundedWorkspace(graph.geometry)


def sdpa_fallback_bytes(geometry: GraphGeometry, chunk_tokens: int, context_tokens: int) -> int:
    """Bytes of materialised attention scores for one chunk, where no fused kernel serves the head size.

    Source: reference, autoregressive §4.3.
    """
    queries = min(chunk_tokens, context_tokens)
    if queries <= SMALLEST_CHUNK_TOKENS or not geometry.heads or geometry.head_dim in FUSED_HEAD_DIMS:
        return 0
    widest = 0
    for kind in geometry.layer_types:
        keys = context_tokens
        if kind == "sliding_attention" and geometry.sliding_window > 0:
            keys = min(context_tokens, geometry.sliding_window + queries)
        widest = max(widest, geometry.heads * queries * keys * SCORE_BYTES)
    return widest
