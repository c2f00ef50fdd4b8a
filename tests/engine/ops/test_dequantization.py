"""The host's unpacking against the library's, bit for bit where the library does not fuse its two steps."""

import mlx.core as mx
import numpy as np
import pytest

from engine.ops.dequantization import STRETCH_VALUES, Dequantizer


@pytest.fixture
def dequantizer():
    made = Dequantizer()
    yield made
    made.close()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_values_equal_the_librarys(dequantizer, bits, group_size, dtype):
    for shape in ((7, 256), (2 * STRETCH_VALUES // 256 + 3, 256), (3, 5, 128)):
        random = np.random.default_rng(bits)
        words = mx.array(random.integers(0, 2**32, size=(*shape[:-1], shape[-1] * bits // 32), dtype=np.uint32))
        scales, biases = (
            mx.array(random.normal(size=(*shape[:-1], shape[-1] // group_size))).astype(dtype) for _ in range(2)
        )
        wide = [part.astype(mx.float32) for part in (scales, biases)]
        wanted = mx.dequantize(words, *wide, group_size=group_size, bits=bits)
        found = dequantizer.dense(words, scales, biases, bits=bits)
        assert found.shape == shape
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-6, atol=1e-5)


def test_a_later_matrix_leaves_an_earlier_one_alone(dequantizer):
    words = mx.array(np.random.default_rng(1).integers(0, 2**32, size=(8, 8), dtype=np.uint32))
    ones, zeros = mx.ones((8, 2)), mx.zeros((8, 2))
    first = dequantizer.dense(words, ones, zeros, bits=4)
    before = np.array(first)
    dequantizer.dense(words, ones * 3, zeros, bits=4)
    assert np.array_equal(np.array(first), before)


def test_other_forms_are_left_to_the_library():
    assert Dequantizer.handles(4, "affine")
    assert not Dequantizer.handles(4, "mxfp4")
    assert not Dequantizer.handles(3, "affine")
