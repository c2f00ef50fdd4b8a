"""Work that two streams share: the same bits as in one, in the same order, on whichever thread computes."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from engine.ops.activations import gated
from engine.ops.exponential import swiglu
from engine.ops.streams import SHARED_TOKENS, in_turns


def test_parts_come_back_in_order_and_every_second_one_is_computed_in_another_stream():
    used = []

    def part(number):
        used.append(mx.default_stream(mx.default_device()))
        return mx.full((3,), number)

    results = in_turns([lambda number=number: part(number) for number in range(5)])
    assert [result.tolist() for result in results] == [[number] * 3 for number in range(5)]
    assert used[0] == used[2] == used[4] != used[1]
    assert used[1] == used[3]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, SHARED_TOKENS - 1, SHARED_TOKENS, SHARED_TOKENS + 1, 3 * SHARED_TOKENS])
def test_a_gate_in_two_halves_has_the_bits_of_each_token_by_itself(name, tokens):
    random = np.random.default_rng(tokens)
    gate, up = (mx.array(random.standard_normal((1, tokens, 24)), dtype=mx.float32) for _ in range(2))
    function = gated(name, composed=True)
    alone = [function(gate[:, token : token + 1], up[:, token : token + 1]) for token in range(tokens)]
    assert mx.array_equal(function(gate, up), mx.concatenate(alone, axis=1)).item()


def test_every_thread_that_computes_has_a_second_stream():
    """An engine is opened on a new thread while another may run, and a stream belongs to one thread."""
    gate = mx.random.normal((1, SHARED_TOKENS, 8))
    mx.eval(gate)
    wanted, found = np.array(swiglu(gate, gate, composed=True)), []

    def compute():
        found.append(np.array(gated("silu", composed=True)(gate, gate)))

    for _ in range(3):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert len(found) == 3
    assert all((one == wanted).all() for one in found)
