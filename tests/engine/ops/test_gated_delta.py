"""The gated delta rule against its recurrence, token by token in float64 numpy."""

import mlx.core as mx
import numpy as np
import pytest

from engine.ops import gated_delta as rule
from engine.ops.gated_delta import DeltaInputs, gated_delta, unit_triangular_inverse

ROWS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 16, 8


def inputs_of(length, *, alike=0.0, decay=-2.0, seed=0):
    """Random tokens; `alike` makes the keys point one way, which is where an inverse could lose digits."""
    random = np.random.default_rng(seed).normal
    shape = (ROWS, length, HEADS)
    queries, keys = random(size=(*shape, KEY_DIM)), random(size=(*shape, KEY_DIM)) + alike
    unit = [part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (queries, keys)]
    values, strengths = random(size=(*shape, VALUE_DIM)), 1 / (1 + np.exp(-random(size=shape) - alike))
    parts = (*unit, values, -np.exp(random(size=shape) + decay), strengths)
    return DeltaInputs(*(mx.array(part.astype(np.float32)) for part in parts))


def state_of(seed=1):
    shape = (ROWS, HEADS, VALUE_DIM, KEY_DIM)
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def by_recurrence(inputs, state):
    queries, keys, values, log_decays, strengths = (
        np.array(getattr(inputs, name)).astype(np.float64) for name in DeltaInputs.__slots__
    )
    matrices, read = np.array(state).astype(np.float64), np.zeros(values.shape)
    for row, token, head in np.ndindex(*log_decays.shape):
        held = np.exp(log_decays[row, token, head]) * matrices[row, head]
        key = keys[row, token, head]
        correction = strengths[row, token, head] * (values[row, token, head] - held @ key)
        matrices[row, head] = held + np.outer(correction, key)
        read[row, token, head] = matrices[row, head] @ queries[row, token, head]
    return read, matrices


def assert_equal(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.array(mine), other, rtol=2e-6, atol=2e-6 * np.abs(other).max())


@pytest.mark.parametrize("decay", [-6.0, -1.0, 3.0], ids=["slow", "usual", "to nothing"])
@pytest.mark.parametrize("alike", [0.0, 3.0], ids=["scattered keys", "keys alike"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 130])
def test_stretches_equal_the_recurrence(length, alike, decay):
    inputs, state = inputs_of(length, alike=alike, decay=decay), state_of()
    assert_equal(gated_delta(inputs, state), by_recurrence(inputs, state))


def test_a_stretch_equals_single_steps():
    inputs, state = inputs_of(70), state_of()
    together, after = gated_delta(inputs, state)
    alone = []
    for token in range(70):
        read, state = gated_delta(inputs.part(token, token + 1), state)
        alone.append(read)
    assert_equal((mx.concatenate(alone, axis=1), state), (np.array(together), np.array(after)))


def test_long_stretches_take_chunks_and_short_ones_do_not(monkeypatch):
    """So that the two tests above compare two ways indeed."""
    chunks = []
    whole = rule._chunk
    monkeypatch.setattr(rule, "_chunk", lambda inputs, state: (chunks.append(inputs.length), whole(inputs, state))[1])
    for length in (1, 3, 4, 130):
        gated_delta(inputs_of(length), state_of())
    assert chunks == [4, 64, 64, 2]


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_triangular_inverses_keep_their_digits_when_all_keys_are_one(size):
    lower = np.tril(np.ones((3, size, size), dtype=np.float32), -1)
    wanted = np.linalg.inv(np.eye(size) + lower)
    np.testing.assert_allclose(np.array(unit_triangular_inverse(mx.array(lower))), wanted, atol=1e-6)
