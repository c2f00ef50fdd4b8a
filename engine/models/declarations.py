"""What the kinds of graphs promise, apart from the graphs, so that it can be told without one. Imports no mlx."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.contracts.graph import (
    AdapterCapability,
    GraphDeclaration,
    KvCapability,
    MediaCapability,
    SpeculationCapability,
)

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig

_NO_ADAPTERS: Final = AdapterCapability(batched=False, mountable=False)
_NO_SPECULATION: Final = SpeculationCapability(
    adapters=False,
    logprobs=False,
    affine_kv=False,
    turbo_kv=False,
    external_tokens=False,
    grammar_proposals=False,
)

DECODER: Final = GraphDeclaration(
    adapters=AdapterCapability(batched=True, mountable=True),
    kv=KvCapability(delayed_affine="ordinary"),
    speculation=_NO_SPECULATION,
)
"""Our decoder graph: nothing that no request can ask of it yet."""

DENOISER: Final = GraphDeclaration(
    method="denoising",
    packed_segments=False,
    adapters=AdapterCapability(batched=False, mountable=True),
    kv=KvCapability(dense_reads=True),
    speculation=_NO_SPECULATION,
)
"""Our denoising graph: one row at a time, over keys and values in plain form; without a tower, no media."""

SEEING_DENOISER: Final = replace(DENOISER, media=MediaCapability(input="pixels"))
"""The same with a vision tower: still images."""

FOREIGN: Final = GraphDeclaration(packed_segments=False, adapters=_NO_ADAPTERS, speculation=_NO_SPECULATION)
"""A graph of mlx-lm: one row at a time, and nothing that reaches into the graph."""


def native(config: ModelConfig) -> GraphDeclaration:
    """What our graph of `config` promises."""
    if config.method == "autoregressive":
        return DECODER
    return DENOISER if config.vision is None else SEEING_DENOISER
