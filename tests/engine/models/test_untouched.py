"""Memory that mlx hands out without a look at it: of the right shape, writable in place, and nobody else's."""

import mlx.core as mx
import numpy as np
import pytest

from engine.models.untouched import untouched


@pytest.mark.parametrize("shape", [(1,), (3, 5), (576, 1536), (2, 3, 700, 700)])
def test_what_is_written_from_outside_is_what_mlx_computes_with(shape):
    array = untouched(shape)
    assert array.shape == shape
    assert array.dtype == mx.float32
    values = np.arange(array.size, dtype=np.float32).reshape(shape)
    np.array(array, copy=False)[:] = values
    np.testing.assert_array_equal(np.array(array + 1), values + 1)


def test_arrays_share_nothing_and_stay_as_they_were_written():
    arrays = [untouched((64, 4096)) for _ in range(8)]
    for number, array in enumerate(arrays):
        np.array(array, copy=False)[:] = number
    assert [mx.all(array == number).item() for number, array in enumerate(arrays)] == [True] * 8


def test_its_memory_is_given_back():
    mx.clear_cache()
    before = mx.get_active_memory()
    array = untouched((1024, 1024))
    assert mx.get_active_memory() >= before + array.nbytes
    del array
    mx.clear_cache()
    assert mx.get_active_memory() <= before
