"""Processors: what options add to, or take from, the scores of single tokens before anything is drawn.

In this order, each seeing what the one before left: logit bias, repetition, presence, frequency. (A grammar's mask
comes after them, and log-probabilities are read after that.) All rows of a step are processed together, at the price
of the tokens that are named and not of the vocabulary; rows that ask for nothing are not touched. Float32 throughout;
scores stay within its finite range.
Source: Keskar et al. 2019 (repetition); reference, autoregressive §3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from engine.sampling.recipe import LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.sampling.recipe import Draw, Penalty, Recipe


def process(logits: mx.array, draws: Sequence[Draw], unread: mx.array | None) -> mx.array:
    """Apply each row's processors.

    Args:
        logits: [R, V] float32, a row for each draw.
        draws: one for each row.
        unread: ids [U] that only the device knows, which draws refer to.

    Returns:
        [R, V] float32; `logits` itself when no row asks for anything.
    """
    if not any(draw.recipe.processes for draw in draws):
        return logits
    vocabulary = logits.shape[-1]
    scores = logits.reshape(-1)
    for change, entries in (
        (_added, _biases(draws, vocabulary)),
        (_divided, _windows(draws, _repetition, unread, vocabulary)),
        (_lowered, _windows(draws, _presence, unread, vocabulary)),
        (_lowered_each, _windows(draws, _frequency, unread, vocabulary)),
    ):
        if entries is not None:
            scores = change(scores, entries)
    return scores.reshape(logits.shape)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Tokens of all rows, one after the other: places [M] among all scores, and what their processor does with each."""

    places: mx.array
    values: mx.array


def _repetition(recipe: Recipe) -> Penalty | None:
    return recipe.repetition


def _presence(recipe: Recipe) -> Penalty | None:
    return recipe.presence


def _frequency(recipe: Recipe) -> Penalty | None:
    return recipe.frequency


def _added(scores: mx.array, entries: _Entries) -> mx.array:
    return _replaced(scores, entries, scores[entries.places] + entries.values)


def _divided(scores: mx.array, entries: _Entries) -> mx.array:
    """Less likely by a factor, once for each distinct id: duplicates write the same."""
    old = scores[entries.places]
    return _replaced(scores, entries, mx.where(old < 0, old * entries.values, old / entries.values))


def _lowered(scores: mx.array, entries: _Entries) -> mx.array:
    """Lowered once for each distinct id."""
    return _replaced(scores, entries, scores[entries.places] - entries.values)


def _lowered_each(scores: mx.array, entries: _Entries) -> mx.array:
    """Lowered once for each occurrence."""
    lowered = scores.at[entries.places].subtract(entries.values)
    return _replaced(lowered, entries, lowered[entries.places])


def _replaced(scores: mx.array, entries: _Entries, new: mx.array) -> mx.array:
    return mx.put_along_axis(scores, entries.places, mx.clip(new, -LARGEST, LARGEST), axis=0)


def _biases(draws: Sequence[Draw], vocabulary: int) -> _Entries | None:
    rows = [(row, draw.recipe) for row, draw in enumerate(draws) if len(draw.recipe.bias_ids)]
    if not rows:
        return None
    return _Entries(
        mx.array(np.concatenate([recipe.bias_ids + row * vocabulary for row, recipe in rows])),
        mx.array(np.concatenate([recipe.bias_values for _, recipe in rows])),
    )


def _windows(
    draws: Sequence[Draw], select: Callable[[Recipe], Penalty | None], unread: mx.array | None, vocabulary: int
) -> _Entries | None:
    """What the windows of one penalty hold in all rows, duplicates included; None when that is nothing."""
    places: list[int] = []
    values: list[float] = []
    late: list[tuple[int, int]] = []
    for row, draw in enumerate(draws):
        penalty = select(draw.recipe)
        if penalty is None:
            continue
        first = row * vocabulary
        known_tokens = penalty.window_tokens - (draw.unread is not None)
        window = [first + token for token in draw.history[-known_tokens:]] if known_tokens else []
        if draw.unread is not None:
            late.append((len(places) + len(window), draw.unread))
            window.append(first)
        places += window
        values += [penalty.value] * len(window)
    if not places:
        return None
    return _Entries(_with_unread(mx.array(places, dtype=mx.int32), late, unread), mx.array(values, dtype=mx.float32))


def _with_unread(places: mx.array, late: list[tuple[int, int]], unread: mx.array | None) -> mx.array:
    """`places` with each late one moved on by the id that the device holds for it."""
    if not late or unread is None:
        return places
    at, sources = zip(*late, strict=True)
    return places.at[mx.array(at)].add(unread[mx.array(sources)].astype(mx.int32))
