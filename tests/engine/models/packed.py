"""Drives a bound graph by packed steps, as tests compare it."""

import mlx.core as mx
import numpy as np

from engine.contracts.graph import PackedSegment


def forward(binding, parts, caches):
    """Logits of each part's tokens, packed into one step."""
    tokens = mx.array([[token for part in parts for token in part]], dtype=mx.uint32)
    segments = [PackedSegment(len(part), cache) for part, cache in zip(parts, caches, strict=True)]
    flat = binding.project(binding.hidden(tokens, segments))[0]
    bounds = np.cumsum([len(part) for part in parts])[:-1].tolist()
    return mx.split(flat, bounds, axis=0) if bounds else [flat]


def logits_of(binding, prompt):
    """All tokens but the last in one step, the last in another."""
    caches = [binding.make_cache()]
    return mx.concatenate([forward(binding, [part], caches)[0] for part in (prompt[:-1], prompt[-1:])], axis=0)


def relative_difference(found, wanted):
    return (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item()
