"""Two streams of a CPU for the parts of one step: a stream computes its operations one after another on one core.

Only products use more cores than one, so what stands between them is shared out. Each part is the same arithmetic as
in one stream: nothing is summed across parts, and bits do not change. Source: decision 0014.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHARED_TOKENS = 64
"""Fewer tokens than this are not worth the handing over between two streams; measured in decision 0014."""


def in_turns(parts: Sequence[Callable[[], mx.array]]) -> list[mx.array]:
    """The results of `parts`, every second of which is computed beside the others."""
    results = []
    for index, part in enumerate(parts):
        if index % 2:
            with mx.stream(_second_stream()):
                results.append(part())
        else:
            results.append(part())
    return results


def in_halves(function: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    """`function` of two arrays, token by token; of [1, T, size] the second half is computed beside the first."""

    def halved(one: mx.array, other: mx.array) -> mx.array:
        if one.ndim != 3 or one.shape[1] < SHARED_TOKENS:
            return function(one, other)
        middle = one.shape[1] // 2
        halves = in_turns(
            [lambda: function(one[:, :middle], other[:, :middle]), lambda: function(one[:, middle:], other[:, middle:])]
        )
        return mx.concatenate(halves, axis=1)

    return halved


@functools.cache
def _second_stream() -> mx.ThreadLocalStream:
    # One for the process: each thread that computes gets its own behind it, and it goes with the thread.
    return mx.new_thread_local_stream(mx.cpu)
