"""Routed experts: which experts a token goes to, and the products of each token with its own experts' matrices.

Tokens are packed, [T, ..]; E counts a layer's experts, k those that a token uses. Every product is a gather by expert:
the host never waits to learn who was chosen, and on a CPU each token's product stands alone, so that its neighbours
cannot change a bit of it. Source: Shazeer et al. 2017 (sparsely gated experts); decision 0005.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from engine.ops.linear import DenseWeight, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.ops.linear import Weight

FEWEST_SORTED_CHOICES = 64
"""From so many choices on (T·k) it pays to bring tokens of one expert together first."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, [T, k] uint32, and their weights in its sum, [T, k]."""

    experts: mx.array
    weights: mx.array


def route_by_shares(scores: mx.array, count: int, *, normalised: bool) -> Routing:
    """Softmax over all experts, then the `count` largest shares; `normalised` makes those add up to one.

    Args:
        scores: [T, E].
        count: k, from 1 to E.
        normalised: whether a token's weights are divided by their sum.
    """
    shares = mx.softmax(scores, axis=-1, precise=True)
    experts = mx.argpartition(shares, kth=-count, axis=-1)[..., -count:]
    weights = mx.take_along_axis(shares, experts, axis=-1)
    return Routing(experts, weights / mx.sum(weights, axis=-1, keepdims=True) if normalised else weights)


def route_by_scores(scores: mx.array, count: int, *, from_the_end: bool = False) -> Routing:
    """The `count` largest of `scores` [T, E], weighted by a softmax over those alone.

    `from_the_end` looks for them as `route_by_shares` does: the order of a sum decides its last bit, and mlx-lm and
    mlx-vlm have it each in its own way.
    """
    if from_the_end:
        experts = mx.argpartition(scores, kth=-count, axis=-1)[..., -count:]
    else:
        experts = mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]
    return Routing(experts, mx.softmax(mx.take_along_axis(scores, experts, axis=-1), axis=-1, precise=True))


class ExpertProduct(Protocol):
    """The matrices [out, in] of all experts of one layer."""

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """Multiply row vectors by their expert's matrix.

        Args:
            x: [.., 1, in], whose leading axes broadcast against those of `experts`.
            experts: whose matrix each vector meets, uint32.
            ordered: `experts` never descends.

        Returns:
            [.., 1, out], with the leading axes of `experts`.
        """


class DenseExperts:
    """Dense matrices, stored [E, out, in], or [E, in, out] when `transposed`."""

    __slots__ = ("_transposed", "_weight")

    def __init__(self, weight: mx.array, *, transposed: bool = False) -> None:
        """Take `weight` [E, out, in]; `transposed` keeps a contiguous [E, in, out] copy instead."""
        self._weight = mx.contiguous(weight.swapaxes(-1, -2)) if transposed else weight
        self._transposed = transposed

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        return [self._weight]

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """See `ExpertProduct`."""
        matrices = self._weight if self._transposed else self._weight.swapaxes(-1, -2)
        return mx.gather_mm(x, matrices, rhs_indices=experts, sorted_indices=ordered)


class QuantizedExperts:
    """Quantized matrices, read in their stored form; each array of `packed` has a leading axis E."""

    __slots__ = ("_packed",)

    def __init__(self, packed: QuantizedWeight) -> None:
        self._packed = packed

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        packed = self._packed
        return [array for array in (packed.weight, packed.scales, packed.biases) if array is not None]

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """See `ExpertProduct`."""
        packed = self._packed
        return mx.gather_qmm(
            x,
            packed.weight,
            packed.scales,
            packed.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=packed.group_size,
            bits=packed.bits,
            mode=packed.mode,
            sorted_indices=ordered,
        )


class StackedExperts:
    """Several products of one input, joined along `out`: for matrices that are stored in different forms."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[ExpertProduct]) -> None:
        """Take the products in the order of their results."""
        self._parts = tuple(parts)

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        return [array for part in self._parts for array in part.arrays()]

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        """See `ExpertProduct`."""
        return mx.concatenate([part(x, experts, ordered=ordered) for part in self._parts], axis=-1)


def build_experts(weights: Sequence[Weight], *, pretranspose: bool) -> ExpertProduct:
    """Join stacks of matrices [E, out, in] along `out` into one product where their forms allow it.

    Args:
        weights: one or more stacks with the same E and `in`.
        pretranspose: keep dense matrices as [in, out].
    """
    if all(isinstance(weight, DenseWeight) for weight in weights):
        return DenseExperts(_joined([weight.weight for weight in weights]), transposed=pretranspose)
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(packed) == len(weights) and len({(p.bits, p.group_size, p.mode, p.biases is None) for p in packed}) == 1:
        biases = [p.biases for p in packed if p.biases is not None]
        return QuantizedExperts(
            replace(
                packed[0],
                weight=_joined([p.weight for p in packed]),
                scales=_joined([p.scales for p in packed]),
                biases=_joined(biases) if biases else None,
            )
        )
    return StackedExperts([build_experts([weight], pretranspose=pretranspose) for weight in weights])


def stack_experts(matrices: Sequence[Weight]) -> Weight:
    """Matrices [out, in], one for each expert, as a stack [E, out, in]; raises `ValueError` when their forms differ."""
    if all(isinstance(matrix, DenseWeight) for matrix in matrices):
        return DenseWeight(mx.stack([matrix.weight for matrix in matrices]))
    packed = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
    if len(packed) != len(matrices) or len({(p.bits, p.group_size, p.mode, p.biases is None) for p in packed}) != 1:
        raise ValueError("matrices of different forms cannot be stacked")
    biases = [p.biases for p in packed if p.biases is not None]
    return replace(
        packed[0],
        weight=mx.stack([p.weight for p in packed]),
        scales=mx.stack([p.scales for p in packed]),
        biases=mx.stack(biases) if biases else None,
    )


def _joined(stacks: list[mx.array]) -> mx.array:
    return stacks[0] if len(stacks) == 1 else mx.concatenate(stacks, axis=1)


class GatedExperts:
    """For each token the weighted sum over its experts of `down(activation(gate, up))`."""

    __slots__ = ("_activation", "_down", "_gate_up", "_sorts")

    def __init__(
        self,
        gate_up: ExpertProduct,
        down: ExpertProduct,
        activation: Callable[[mx.array, mx.array], mx.array],
        *,
        sorts: bool = True,
    ) -> None:
        """Take the products.

        Args:
            gate_up: [H] → [2·inner], gate first.
            down: [inner] → [H].
            activation: of gate and up, elementwise.
            sorts: whether many choices may be brought into the experts' order, for which devices have kernels that
                compute tokens together; without it a token's bits do not depend on its neighbours anywhere.
        """
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._sorts = sorts

    def __call__(self, x: mx.array, routing: Routing) -> mx.array:
        """Mix the experts of `x` [T, H] as `routing` says; returns [T, H]."""
        each = self._sorted(x, routing.experts) if self._pays(routing) else self._as_it_is(x, routing.experts)
        return mx.sum(each * routing.weights[..., None], axis=-2).astype(x.dtype)

    def _pays(self, routing: Routing) -> bool:
        return self._sorts and routing.experts.size >= FEWEST_SORTED_CHOICES

    def _as_it_is(self, x: mx.array, experts: mx.array) -> mx.array:
        """[T, k, H]."""
        return self._through(x[:, None, None, :], experts, ordered=False).squeeze(-2)

    def _sorted(self, x: mx.array, experts: mx.array) -> mx.array:
        """[T, k, H], computed in the order of experts."""
        flat = experts.flatten()
        order = mx.argsort(flat)
        mixed = self._through(x[order // experts.shape[-1]][:, None, :], flat[order], ordered=True).squeeze(-2)
        return mixed[mx.argsort(order)].reshape(*experts.shape, -1)

    def _through(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        gate, up = mx.split(self._gate_up(x, experts, ordered=ordered), 2, axis=-1)
        return self._down(self._activation(gate, up), experts, ordered=ordered)
