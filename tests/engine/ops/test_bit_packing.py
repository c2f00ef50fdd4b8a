"""Packing loses nothing and wastes nothing."""

import mlx.core as mx
import numpy as np
import pytest

from engine.ops.bit_packing import pack, unpack


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_what_was_packed_is_unpacked(bits):
    numbers = np.random.default_rng(bits).integers(0, 2**bits, (2, 3, 96)).astype(np.uint32)
    numbers[0, 0, :64] = np.repeat([0, 2**bits - 1], 32)
    words = pack(mx.array(numbers), bits)
    assert (words.dtype, words.nbytes * 8) == (mx.uint32, numbers.size * bits)
    assert np.array_equal(np.array(unpack(words, bits)), numbers)
