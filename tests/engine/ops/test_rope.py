"""The rotation that a step's layers share, against the library's own; and YaRN as Hugging Face states it."""

import math

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.rope import RopeConfig
from engine.ops.rope import Rope

DIM = 16


def configuration(**changes):
    return RopeConfig(**({"dims": DIM, "context_length": 4096} | changes))


@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dims", [DIM, 8], ids=["all of a head", "half of a head"])
@pytest.mark.parametrize("scaling", [{}, {"kind": "linear", "factor": 4.0}], ids=["default", "linear"])
def test_the_shared_rotation_equals_the_library_s(traditional, dims, scaling):
    config = configuration(traditional=traditional, dims=dims, **scaling)
    x = mx.array(np.random.default_rng(1).normal(size=(6, 3, 1, DIM)).astype(np.float32))
    positions = mx.array([0, 1, 7, 100, 2047, 3000], dtype=mx.int32)
    shared, library = (Rope(config, composed=composed).at(positions)(x) for composed in (True, False))
    assert shared.shape == x.shape
    assert mx.abs(library - x).max().item() > 0.1
    # Angles of thousands of radians carry their own rounding, about 1e-4 at position 2000.
    np.testing.assert_allclose(np.array(shared[:4]), np.array(library[:4]), atol=2e-5)
    np.testing.assert_allclose(np.array(shared), np.array(library), atol=2e-3)


YARN = {"kind": "yarn", "factor": 4.0, "original_context_length": 2048}


def yarn_oracle(truncate):
    """Angles per position [D/2], by the formula of the paper in plain numpy."""
    lengths = 1e4 ** (np.arange(0, DIM, 2) / DIM)
    low, high = (DIM * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    share = np.clip((np.arange(DIM // 2) - max(low, 0)) / (min(high, DIM - 1) - max(low, 0)), 0, 1)
    return share / (4 * lengths) + (1 - share) / lengths


def rotated_ones(position, **changes):
    """A head of ones rotated to `position`, by both ways of rotating: pairs (cos - sin, cos + sin)."""
    config, ones = configuration(**YARN | changes), mx.ones((1, 1, 1, DIM))
    return [np.array(Rope(config, composed=way).at(mx.array([position]))(ones)).ravel() for way in (True, False)]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("attention_factor", [None, 1.0, 0.5])
def test_yarn_honours_its_correction_range_and_attention_factor(truncate, attention_factor):
    angles = 30 * yarn_oracle(truncate)
    scale = 0.1 * math.log(4) + 1 if attention_factor is None else attention_factor
    expected = scale * np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)])
    for found in rotated_ones(30, truncate=truncate, attention_factor=attention_factor):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(yarn_oracle(True) - yarn_oracle(False)).max() > 1e-3
