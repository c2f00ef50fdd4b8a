"""Affine keys and values against attention over what they unpack to, and against the numbers that were given."""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.kv_scheme import AffineKv
from engine.ops.attention import causal_attention
from engine.state.affine_codec import AffineCodec

HEADS, KV_HEADS, DIM = 4, 2, 128


def dense(seed, count, heads=KV_HEADS):
    return mx.array(np.random.default_rng(seed).normal(size=(1, heads, count, DIM)).astype(np.float32))


def unpacked(packed, scales, biases, bits):
    """Numbers in numpy: the lowest bits of a word come first."""
    words = np.array(packed)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = ((words[..., None] >> shifts) & (2**bits - 1)).reshape(*words.shape[:-1], -1)
    groups = numbers.reshape(*np.array(scales).shape, -1)
    return (groups * np.array(scales)[..., None] + np.array(biases)[..., None]).reshape(numbers.shape)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_what_is_stored_is_within_half_a_step_of_what_was_given(bits, group_size):
    keys, values = dense(1, 20), dense(2, 20)
    parts = AffineCodec(bits=bits, group_size=group_size).encode(keys, values)
    for given, three in ((keys, parts[:3]), (values, parts[3:])):
        steps = np.repeat(np.abs(np.array(three[1])), group_size, axis=-1)
        # The library keeps zero exact, which may move the grid by up to half a step more.
        assert (np.abs(unpacked(*three, bits) - np.array(given)) <= steps * 1.01).all()
    stated = AffineKv(bits=bits, group_size=group_size).token_bytes(KV_HEADS * DIM, 4)
    assert sum(part.nbytes for part in parts) == 20 * stated


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (5.0, 0), (0.0, 12)])
def test_attention_equals_attention_over_what_the_parts_unpack_to(bits, group_size, length, composed, softcap, window):
    held = 12 + length - 1 if window else 40
    queries, keys, values = dense(3, length, HEADS), dense(1, held), dense(2, held)
    codec = AffineCodec(bits=bits, group_size=group_size, composed=composed)
    parts = codec.encode(keys, values)
    oracle = [mx.array(unpacked(*three, bits).astype(np.float32)) for three in (parts[:3], parts[3:])]
    found = codec.attend(queries, parts, scale=0.125, softcap=softcap, window=window)
    wanted = causal_attention(queries, *oracle, scale=0.125, softcap=softcap, window=window)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=3e-6)
    exact = causal_attention(queries, keys, values, scale=0.125, softcap=softcap, window=window)
    assert mx.abs(found - exact).max().item() > 1e-6
