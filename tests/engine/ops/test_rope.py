"""The rotation that a step's layers share, against the library's own, in every layout."""

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
