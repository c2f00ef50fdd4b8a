"""Routed experts against a loop over tokens in float64 numpy."""

import mlx.core as mx
import numpy as np
import pytest

from engine.ops.experts import GatedExperts, Routing, build_experts, route_by_scores, route_by_shares
from engine.ops.exponential import swiglu
from engine.ops.linear import DenseWeight, QuantizedWeight

EXPERTS, HIDDEN, INNER = 6, 64, 32


def activation(gate, up):
    return swiglu(gate, up, composed=True)


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def stacks():
    """Gate, up and down of every expert."""
    return random(1, EXPERTS, INNER, HIDDEN), random(2, EXPERTS, INNER, HIDDEN), random(3, EXPERTS, HIDDEN, INNER)


def mixed_by_loop(x, routing, gate, up, down):
    rows, chosen = [], (np.array(routing.experts), np.array(routing.weights))
    for token, experts, weights in zip(x.astype(np.float64), *chosen, strict=True):
        opened = [gate[expert] @ token for expert in experts]
        inner = [g / (1 + np.exp(-g)) * (up[expert] @ token) for g, expert in zip(opened, experts, strict=True)]
        rows.append(sum(w * (down[e] @ i) for w, e, i in zip(weights, experts, inner, strict=True)))
    return np.stack(rows)


def dense_layer(*, pretranspose=False, sorts=True):
    gate, up, down = (DenseWeight(mx.array(stack)) for stack in stacks())
    joined = build_experts([gate, up], pretranspose=pretranspose)
    return GatedExperts(joined, build_experts([down], pretranspose=pretranspose), activation, sorts=sorts)


def quantized(stack, bits):
    weight, scales, biases = mx.quantize(mx.array(stack), group_size=32, bits=bits)
    values = np.array(mx.dequantize(weight, scales, biases, group_size=32, bits=bits))
    return QuantizedWeight(weight=weight, scales=scales, biases=biases, bits=bits, group_size=32), values


def random_routing(tokens, count, seed=5):
    return route_by_scores(mx.array(random(seed, tokens, EXPERTS)), count)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("count", [1, 3, EXPERTS])
def test_shares_are_a_softmax_over_all_experts_of_which_the_largest_count(count, normalised):
    scores = random(4, 9, EXPERTS)
    routing = route_by_shares(mx.array(scores), count, normalised=normalised)
    for token, experts, weights in zip(scores, routing.experts.tolist(), routing.weights.tolist(), strict=True):
        shares = softmax(token.astype(np.float64))
        best = sorted(np.argsort(shares)[-count:])
        assert sorted(experts) == best
        total = shares[best].sum() if normalised else 1.0
        np.testing.assert_allclose(weights, shares[experts] / total, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, EXPERTS])
def test_scores_are_weighed_among_the_chosen_alone(count):
    scores = random(4, 9, EXPERTS)
    routing = route_by_scores(mx.array(scores), count)
    for token, experts, weights in zip(scores, routing.experts.tolist(), routing.weights.tolist(), strict=True):
        assert sorted(experts) == sorted(np.argsort(token)[-count:])
        np.testing.assert_allclose(weights, softmax(token[experts].astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("pretranspose", [False, True], ids=["stored layout", "transposed layout"])
@pytest.mark.parametrize(("tokens", "count"), [(1, 2), (5, 1), (7, EXPERTS), (40, 2)])
def test_each_token_is_the_weighted_sum_of_its_experts(tokens, count, pretranspose):
    x, routing = random(6, tokens, HIDDEN), random_routing(tokens, count)
    found = dense_layer(pretranspose=pretranspose)(mx.array(x), routing)
    np.testing.assert_allclose(np.array(found), mixed_by_loop(x, routing, *stacks()), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("bits", [(4, 4, 4), (4, 8, 4), (8, 8, 3)], ids=["one form", "gate unlike up", "down apart"])
def test_quantized_experts_equal_their_values(bits, tokens):
    parts, values = zip(*(quantized(stack, width) for stack, width in zip(stacks(), bits, strict=True)), strict=True)
    joined = build_experts(parts[:2], pretranspose=False)
    layer = GatedExperts(joined, build_experts(parts[2:], pretranspose=False), activation)
    x, routing = random(6, tokens, HIDDEN), random_routing(tokens, 2)
    found = layer(mx.array(x), routing)
    np.testing.assert_allclose(np.array(found), mixed_by_loop(x, routing, *values), rtol=1e-4, atol=2e-3)


def test_dense_and_quantized_stacks_of_one_layer_work_side_by_side():
    gate, up, down = stacks()
    packed, values = quantized(up, 4)
    joined = build_experts([DenseWeight(mx.array(gate)), packed], pretranspose=True)
    layer = GatedExperts(joined, build_experts([DenseWeight(mx.array(down))], pretranspose=True), activation)
    x, routing = random(6, 4, HIDDEN), random_routing(4, 2)
    wanted = mixed_by_loop(x, routing, gate, values, down)
    np.testing.assert_allclose(np.array(layer(mx.array(x), routing)), wanted, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("sorts", [False, True], ids=["as it is", "sorted"])
def test_a_token_is_the_same_bits_in_any_company(sorts):
    """On a CPU; sorted and unsorted products agree too, so that a wide step changes nothing."""
    x, routing = mx.array(random(6, 70, HIDDEN)), random_routing(70, 2)
    alone = mx.concatenate(
        [
            dense_layer(sorts=False)(x[t : t + 1], Routing(routing.experts[t : t + 1], routing.weights[t : t + 1]))
            for t in range(70)
        ]
    )
    assert mx.array_equal(dense_layer(sorts=sorts)(x, routing), alone).item()


def test_arrays_are_what_is_held():
    held = dense_layer(pretranspose=True)._gate_up.arrays()
    assert [array.shape for array in held] == [(EXPERTS, HIDDEN, 2 * INNER)]
    assert sum(array.nbytes for array in held) == EXPERTS * HIDDEN * 2 * INNER * 4
