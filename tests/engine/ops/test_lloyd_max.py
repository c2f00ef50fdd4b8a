"""The levels against numerical integration and published tables."""

import numpy as np
import pytest

from engine.ops.lloyd_max import normal_levels


@pytest.mark.parametrize(
    ("bits", "known"),
    [(2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152]), (4, [0.1284, 0.3881, 0.6568, 0.9424])],
)
def test_the_levels_are_those_of_the_published_tables(bits, known):
    levels, _ = normal_levels(bits)
    np.testing.assert_allclose(levels[len(levels) // 2 :][: len(known)], known, atol=6e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_every_level_is_the_mean_of_its_cell(bits):
    levels, boundaries = (np.array(values) for values in normal_levels(bits))
    assert len(levels) == 2**bits
    assert (np.diff(levels) > 0).all()
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-15)
    np.testing.assert_allclose(boundaries, (levels[1:] + levels[:-1]) / 2)
    for low, level, high in zip([-12, *boundaries], levels, [*boundaries, 12], strict=True):
        x = np.linspace(low, high, 20001)
        density = np.exp(-x * x / 2)
        assert np.trapezoid(x * density, x) / np.trapezoid(density, x) == pytest.approx(level, abs=1e-6)
