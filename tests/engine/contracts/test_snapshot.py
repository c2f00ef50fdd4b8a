"""What of a snapshot can be used, and that nobody can change one."""

import numpy as np
import pytest

from engine.contracts.snapshot import LayerSnapshot, usable_tokens


def layer(tokens, least=0):
    return LayerSnapshot(kind="plain", tokens=tokens, least_tokens=least, arrays={"keys": np.zeros((1, tokens))})


@pytest.mark.parametrize(
    ("layers", "wanted", "usable"),
    [
        ([layer(10), layer(10)], 7, 7),
        ([layer(10), layer(10)], 30, 10),
        ([layer(10), layer(10, least=10)], 9, 0),
        ([layer(10), layer(10, least=10)], 10, 10),
        ([layer(10), layer(10, least=4)], 4, 4),
        ([layer(10), layer(10, least=4)], 3, 0),
        ([layer(10)], 0, 0),
        ([], 5, 0),
    ],
)
def test_a_prefix_is_usable_as_far_as_every_layer_can_be_cut(layers, wanted, usable):
    assert usable_tokens(layers, wanted) == usable


def test_a_snapshot_is_sealed_and_counts_its_bytes():
    arrays, facts = {"keys": np.zeros((2, 3), np.float32)}, {"bits": 4}
    snapshot = LayerSnapshot(kind="plain", tokens=3, facts=facts, arrays=arrays)
    arrays["more"], facts["bits"] = np.zeros(1), 8
    assert (snapshot.nbytes, list(snapshot.arrays), dict(snapshot.facts)) == (24, ["keys"], {"bits": 4})
    with pytest.raises(TypeError):
        snapshot.facts["bits"] = 8
