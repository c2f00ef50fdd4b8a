"""Predicts the bytes of a row's state and of a step's workspace, from geometry alone. Units: bytes and tokens.

Source: reference, autoregressive §4.3, with what our caches really keep: positions in steps of growth, and a little
more than the window where a layer slides.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.contracts.cache import capacity_for, window_capacity
from engine.contracts.kv_scheme import PLAIN_KV, layer_scheme
from engine.generation.bindings.prefill_policy import sdpa_fallback_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry
    from engine.contracts.kv_scheme import KvStorageScheme
    from engine.contracts.vision import VisionGeometry

ELEMENT_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
WORKSPACE_HIDDEN_STATES = 67
"""Activations of one token in a step, as so many hidden states: the reference's 0.55 MB at 4096 numbers of 16 bits."""
WORKSPACE_LOGITS = 14
"""Numbers in float32 that a step holds for each row and token of the vocabulary, at its peak: logits, what choosing
tokens makes of them, and what the step before keeps until it is read. Measured."""
CANVAS_LOGITS = 8
"""The same for each position of a canvas and token of the vocabulary: scores, what acceptance and feedback make of
them, and the scores of another row's unit, which is started before this one is read. Measured."""
TOWER_HIDDEN_STATES, TOWER_HEADS, TOWER_INNER_STATES, TOWER_PIXELS = 10, 16, 4, 3
"""What a vision tower holds of one patch at its peak: so many hidden states, queries of all heads and inner states, and
its pixels in float32. Measured."""
TOWER_SCORES = 2
"""How often a tower holds the scores of one layer, where they are written down. Measured."""
USABLE_SHARE = 0.75
"""Of the memory that is available once the weights are resident, this much may be planned with."""
PREFIX_SHARE = 0.25
"""Of the memory for the states of rows, this much may hold kept prefixes while no row needs it."""


def row_bytes(
    geometry: GraphGeometry,
    tokens: int,
    element_bytes: int,
    *,
    kv: KvStorageScheme = PLAIN_KV,
    chunk_tokens: int = 0,
) -> int:
    """Bytes of a row's caches when they hold `tokens`; also what it adds at most to storage that rows share.

    Args:
        geometry: the graph's sizes.
        tokens: prompt and completion together.
        element_bytes: bytes of a number in the activations' dtype.
        kv: how keys and values are stored.
        chunk_tokens: the widest chunk of the row's prompt; the first one is plain until it was read.
    """
    attended = 0
    for layer, (kind, values) in enumerate(zip(geometry.layer_types, geometry.key_values, strict=True)):
        scheme = layer_scheme(kv, layer, sliding=kind == "sliding_attention")
        settled = _slots(geometry, kind, tokens) * scheme.token_bytes(values, element_bytes)
        unconverted = min(tokens, scheme.start + chunk_tokens)
        plain = _slots(geometry, kind, unconverted) * PLAIN_KV.token_bytes(values, element_bytes)
        attended += max(settled, plain)
    return attended + recurrent_bytes(geometry, element_bytes) + canvas_bytes(geometry, element_bytes)


def recurrent_bytes(geometry: GraphGeometry, element_bytes: int) -> int:
    """Bytes of a row's recurrent layers: the state now and, to take a token back, the one before it."""
    one = 0 if geometry.recurrent is None else geometry.recurrent.nbytes(element_bytes)
    return 2 * geometry.recurrent_layers * one


def canvas_bytes(geometry: GraphGeometry, element_bytes: int) -> int:
    """Bytes that a row under revision keeps between passes: the feedback of its canvas. 0 for other methods."""
    return geometry.canvas_length * geometry.hidden_size * element_bytes


def images_bytes(geometry: GraphGeometry, composition: Composition, images: Sequence[int]) -> int:
    """Bytes that a row's images take beside their keys and values, of which each has so many tokens.

    Pixels stay until the row ends, and the tower works on one image at a time.
    """
    vision = geometry.vision
    if vision is None or not images:
        return 0
    pixels = sum(images) * vision.token_pixels**2 * 3
    return pixels + _tower_bytes(vision, composition, vision.patches(max(images)))


def _tower_bytes(vision: VisionGeometry, composition: Composition, patches: int) -> int:
    """Bytes of the tower's workspace for an image of so many patches."""
    element_bytes = ELEMENT_BYTES[composition.compute_dtype]
    values = (
        TOWER_HIDDEN_STATES * vision.hidden_size
        + TOWER_HEADS * vision.heads * vision.head_dim
        + TOWER_INNER_STATES * vision.intermediate_size
    )
    scores = TOWER_SCORES * vision.heads * patches * element_bytes if composition.device == "cpu" else 0
    return patches * (values * element_bytes + scores + TOWER_PIXELS * vision.patch_pixels**2 * 3 * 4)


def unit_tokens(geometry: GraphGeometry, chunk_tokens: int) -> int:
    """The widest unit of a row whose prompt is read in chunks of `chunk_tokens`: a chunk, or a canvas."""
    return max(chunk_tokens, geometry.canvas_length)


def workspace_bytes(geometry: GraphGeometry, composition: Composition, *, step_tokens: int, context_tokens: int) -> int:
    """Bytes that a step of `step_tokens` needs beside weights and state, for rows that become `context_tokens` long.

    A step is never wider than its rows' prompts together, which the caller knows.
    """
    token_bytes = WORKSPACE_HIDDEN_STATES * geometry.hidden_size * ELEMENT_BYTES[composition.compute_dtype]
    positions = geometry.canvas_length * CANVAS_LOGITS or min(step_tokens, composition.max_rows) * WORKSPACE_LOGITS
    logits_bytes = positions * geometry.vocab_size * 4
    seen_tokens = context_tokens + geometry.canvas_length
    return step_tokens * token_bytes + logits_bytes + _score_bytes(geometry, composition, step_tokens, seen_tokens)


def usable_bytes(available_bytes: int) -> int:
    """Bytes for rows and their steps, of `available_bytes` free once the weights are resident."""
    return int(available_bytes * USABLE_SHARE)


def _score_bytes(geometry: GraphGeometry, composition: Composition, queries: int, context_tokens: int) -> int:
    """Bytes of attention scores: a CPU writes all of one layer's down, and twice where it composes exponentials."""
    if composition.device != "cpu":
        return sdpa_fallback_bytes(geometry, queries, context_tokens)
    slides = geometry.sliding_window and "full_attention" not in geometry.layer_types
    keys = min(context_tokens, geometry.sliding_window + queries) if slides else context_tokens
    copies = 2 if composition.composes_exponentials else 1
    return copies * geometry.heads * queries * keys * ELEMENT_BYTES[composition.compute_dtype]


def _slots(geometry: GraphGeometry, kind: str, tokens: int) -> int:
    """Tokens for which a layer of `kind` reserves storage when the row holds `tokens`."""
    if kind == "sliding_attention" and geometry.sliding_window:
        return min(capacity_for(tokens), window_capacity(geometry.sliding_window))
    return capacity_for(tokens)
