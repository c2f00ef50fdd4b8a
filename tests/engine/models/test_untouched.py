"""Memory that mlx hands out without a look at it: of the right shape, writable in place, and nobody else's."""

import mlx.core as mx
import numpy as np
import pytest

from engine.models.untouched import STRETCH_VALUES, UntouchedMemory, untouched


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


def test_matrices_lie_side_by_side_and_share_nothing():
    memory = UntouchedMemory()
    shapes = [(3, 5), (64, 4096), (1, 1), (7, 9)]
    matrices = [memory.matrix(*shape) for shape in shapes]
    for number, matrix in enumerate(matrices):
        np.array(matrix, copy=False)[:] = number
    assert [matrix.shape for matrix in matrices] == shapes
    assert [mx.all(matrix == number).item() for number, matrix in enumerate(matrices)] == [True] * len(shapes)
    starts = [np.array(matrix, copy=False).ctypes.data for matrix in matrices]
    assert [later - starts[0] for later in starts] == [0, 64, 64 + 4 * 64 * 4096, 128 + 4 * 64 * 4096]
    wide = memory.matrix(1, STRETCH_VALUES + 1)  # larger than a stretch
    assert wide.size == STRETCH_VALUES + 1
