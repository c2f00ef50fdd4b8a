"""A vocabulary laid out in columns, so that the best of its tokens are found without looking at each of them again.

Token i stands in row i // B of column i % B. The maxima of the columns cost one cheap pass; whatever is sought then
lies in the columns with the best of them. The rest is padded. Q is rows of the step, V the vocabulary.
"""

from __future__ import annotations

import mlx.core as mx

HEIGHT = 16


class Columns:
    """Values [Q, V] in columns [Q, `HEIGHT`, B]."""

    def __init__(self, values: mx.array, *, padding: float) -> None:
        rows, vocabulary = values.shape
        missing = -vocabulary % HEIGHT
        if missing:
            values = mx.pad(values, [(0, 0), (0, missing)], constant_values=padding)
        self.count = values.shape[-1] // HEIGHT
        self._values = values.reshape(rows, HEIGHT, self.count)
        self.maxima = mx.max(self._values, axis=-2)
        """The largest value of each column [Q, B]; NaN where one value is."""

    def ids(self, columns: mx.array) -> mx.array:
        """Ids of the tokens in `columns` [Q, M]: [Q, `HEIGHT` * M], ascending where the columns are."""
        rows = mx.arange(HEIGHT, dtype=mx.uint32)[:, None] * self.count
        return (rows + columns[:, None, :]).reshape(columns.shape[0], -1)

    def take(self, columns: mx.array) -> mx.array:
        """Their values, in the same order."""
        return mx.take_along_axis(self._values, columns[:, None, :], axis=-1).reshape(columns.shape[0], -1)


def best_columns(maxima: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` columns with the largest of `maxima` [Q, B], or all of them.

    Returns:
        Their numbers [Q, M] uint32, ascending, and a bound [Q]: no other column has a larger maximum.
    """
    if count >= maxima.shape[-1]:
        everything = mx.broadcast_to(mx.arange(maxima.shape[-1], dtype=mx.uint32), maxima.shape)
        return everything, mx.full(maxima.shape[:1], -mx.inf)
    order = mx.argpartition(-maxima, count, axis=-1)
    bound = mx.take_along_axis(maxima, order[:, count : count + 1], axis=-1)[:, 0]
    return mx.sort(order[:, :count], axis=-1), bound


def largest(values: mx.array) -> mx.array:
    """The largest [Q] of `values` [Q, V]; NaN where one of them is."""
    return mx.max(Columns(values, padding=-mx.inf).maxima, axis=-1)
