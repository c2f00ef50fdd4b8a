"""Columns of a vocabulary: the best tokens and the bound for all others, whatever the size is divisible by."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.columns import HEIGHT, Columns, best_columns, largest


@given(st.integers(0, 10**6), st.integers(1, 5 * HEIGHT), st.integers(1, 9), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_no_token_outside_the_best_columns_is_above_the_bound(seed, size, count, levels):
    values = np.random.default_rng(seed).integers(0, levels, size=(3, size)).astype(np.float32)
    columns = Columns(mx.array(values), padding=-mx.inf)
    best, bound = best_columns(columns.maxima, count)
    ids, taken = np.array(columns.ids(best)), np.array(columns.take(best))
    for row in range(3):
        real = ids[row] < size
        assert (np.diff(ids[row].astype(np.int64)) > 0).all()
        assert taken[row][real].tolist() == values[row][ids[row][real]].tolist()
        assert (taken[row][~real] == -np.inf).all()
        left = np.delete(values[row], ids[row][real])
        assert left.size == 0 or left.max() <= bound[row].item()
        assert taken[row].max() == values[row].max()


@pytest.mark.parametrize("size", [1, HEIGHT, 1000, 4096])
@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_the_largest_tells_of_a_value_that_is_not_finite_wherever_it_stands(size, value):
    for place in {0, size // 2, size - 1}:
        values = mx.random.normal((2, size), key=mx.random.key(1))
        values[1, place] = value
        found = largest(values)
        assert mx.isfinite(found).tolist() == [True, False]
        assert found[0].item() == mx.max(values[0]).item()
