"""TurboQuant against a second implementation in numpy, written from the formulas of the reference."""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.kv_scheme import TurboKv
from engine.ops.attention import causal_attention
from engine.ops.lloyd_max import normal_levels
from engine.state.turbo_codec import TurboCodec

HEADS, KV_HEADS = 4, 2
BITS = [(2, 2), (4, 3), (4, 4), (5, 5), (8, 8)]


def dense(seed, count, dim, heads=KV_HEADS):
    return np.random.default_rng(seed).normal(size=(1, heads, count, dim)).astype(np.float32)


def oracle_keys(keys, bits):
    groups = keys.reshape(*keys.shape[:-1], -1, 32).astype(np.float64)
    least, most = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    if bits == 8:
        scale = (most - least) / 254
        zero = np.round((most + least) / (2 * (scale + 1e-8)))
        number = np.clip(np.round(groups / (scale + 1e-8) - zero), -127, 127)
    else:
        scale = (most - least) / (2**bits - 1)
        zero = np.round(least / (scale + 1e-8))
        number = np.clip(np.round(groups / (scale + 1e-8) - zero), 0, 2**bits - 1)
    return ((number + zero) * scale.astype(np.float16)).reshape(keys.shape)


def oracle_values(values, bits):
    dim = values.shape[-1]
    hadamard = np.array([[1.0]])
    while len(hadamard) < dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard /= np.sqrt(dim)
    signs = np.array(mx.random.randint(0, 2, (dim,), key=mx.random.key(42))) * 2.0 - 1
    groups = ((values * signs) @ hadamard).reshape(*values.shape[:-1], -1, 32)
    spread = np.sqrt((groups**2).mean(-1, keepdims=True))
    levels, boundaries = (np.array(numbers) for numbers in normal_levels(bits))
    numbers = (groups[..., None] / (spread[..., None] + 1e-8) > boundaries).sum(-1)
    return ((levels[numbers] * spread.astype(np.float16)).reshape(values.shape) @ hadamard) * signs


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_the_codec_equals_the_oracle(dim, key_bits, value_bits):
    keys, values = dense(1, 9, dim), dense(2, 9, dim)
    codec = TurboCodec(key_bits=key_bits, value_bits=value_bits)
    found_keys, found_values = codec.decode(codec.encode(mx.array(keys), mx.array(values)))
    # A number that lies on the border of two steps may be rounded to either; there are few, and none is further off.
    for found, wanted, step in (
        (found_keys, oracle_keys(keys, key_bits), 8 / 2**key_bits),
        (found_values, oracle_values(values, value_bits), 1.0),
    ):
        off = np.abs(np.array(found) - wanted)
        assert np.quantile(off, 0.98) < 2e-3
        assert off.max() < step


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_more_bits_are_nearer_to_what_was_given(key_bits, value_bits):
    keys, values = mx.array(dense(1, 50, 64)), mx.array(dense(2, 50, 64))
    codec = TurboCodec(key_bits=key_bits, value_bits=value_bits)
    found_keys, found_values = codec.decode(codec.encode(keys, values))
    assert mx.mean(mx.square(found_keys - keys)).item() < 3.0 / 4**key_bits
    assert mx.mean(mx.square(found_values - values)).item() < 2.8 / 4**value_bits


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_keys_that_hardly_vary_stay_finite_and_near(bits):
    keys = np.concatenate(
        [np.full((1, 1, 1, 64), value, np.float32) for value in (0.0, 7.5, -300.0, 1e-3, 1.0)], axis=2
    )
    keys[0, 0, 4] += np.linspace(0, 1e-4, 64)
    codec = TurboCodec(key_bits=bits, value_bits=4)
    found = np.array(codec.decode(codec.encode(mx.array(keys), mx.array(keys)))[0])
    np.testing.assert_allclose(found, keys, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("composed", [False, True])
def test_attention_in_the_rotated_space_equals_attention_over_what_is_decoded(length, softcap, composed):
    queries = mx.array(dense(3, length, 64, HEADS))
    codec = TurboCodec(key_bits=4, value_bits=4, composed=composed)
    parts = codec.encode(mx.array(dense(1, 40, 64)), mx.array(dense(2, 40, 64)))
    found = codec.attend(queries, parts, scale=0.125, softcap=softcap, window=0)
    wanted = causal_attention(queries, *codec.decode(parts), scale=0.125, softcap=softcap)
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=2e-6)


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_a_token_takes_the_bytes_that_the_scheme_states(dim, key_bits, value_bits):
    held = mx.array(dense(1, 10, dim))
    parts = TurboCodec(key_bits=key_bits, value_bits=value_bits).encode(held, held)
    stated = TurboKv(key_bits=key_bits, value_bits=value_bits).token_bytes(KV_HEADS * dim, 4)
    assert sum(part.nbytes for part in parts) == 10 * stated
    assert stated == KV_HEADS * (dim * key_bits / 8 + dim / 8 + dim * value_bits / 8 + dim / 16)
