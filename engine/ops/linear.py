"""Linear products over weights in the layout that the device prefers: dense, pre-transposed or quantized.

A product maps [..., in] to [..., out]. Stacking several weights along `out` gives one wide product whose result
the caller splits; that is how fused query/key/value and gate/up projections are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A dense matrix [out, in] in the compute dtype."""

    weight: mx.array


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix: packed `weight` [out, in·bits/32] uint32, `scales` and `biases` [out, in/group_size]."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str = "affine"


Weight = DenseWeight | QuantizedWeight


class DenseLinear:
    """Product with a dense matrix, stored [out, in], or [in, out] when `transposed`."""

    __slots__ = ("_bias", "_transposed", "_weight")

    def __init__(self, weight: mx.array, bias: mx.array | None = None, *, transposed: bool = False) -> None:
        """Take `weight` [out, in]; `transposed` keeps a contiguous [in, out] copy instead."""
        self._weight = mx.contiguous(weight.T) if transposed else weight
        self._transposed = transposed
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold."""
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T (+ bias)`."""
        matrix = self._weight if self._transposed else self._weight.T
        return x @ matrix if self._bias is None else mx.addmm(self._bias, x, matrix)


class QuantizedLinear:
    """Product with a quantized matrix, read in its stored form."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, packed: QuantizedWeight, bias: mx.array | None = None) -> None:
        """Take the packed matrix and an additive `bias` [out]."""
        self._packed = packed
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        packed = self._packed
        return [a for a in (packed.weight, packed.scales, packed.biases, self._bias) if a is not None]

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ W.T (+ bias)`."""
        packed = self._packed
        y = mx.quantized_matmul(
            x,
            packed.weight,
            packed.scales,
            packed.biases,
            transpose=True,
            group_size=packed.group_size,
            bits=packed.bits,
            mode=packed.mode,
        )
        return y if self._bias is None else y + self._bias


class StackedLinear:
    """Several products of one input whose results are joined along `out`: for weights that cannot be one matrix."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[DenseLinear | QuantizedLinear]) -> None:
        """Take the products in the order of their results."""
        self._parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold."""
        return sum(part.nbytes for part in self._parts)

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        return [array for part in self._parts for array in part.arrays()]

    def __call__(self, x: mx.array) -> mx.array:
        """Return the results side by side."""
        return mx.concatenate([part(x) for part in self._parts], axis=-1)


class TiledLinear:
    """A product that always takes `tile_tokens` tokens at once, so that its rounding does not depend on their number.

    Libraries choose another order of sums by the number of rows; with one number there is one order.
    """

    __slots__ = ("_product", "_tile_tokens")

    def __init__(self, product: DenseLinear | QuantizedLinear | StackedLinear, tile_tokens: int) -> None:
        """Cut the inputs of `product`."""
        self._product = product
        self._tile_tokens = tile_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold."""
        return self._product.nbytes

    def arrays(self) -> list[mx.array]:
        """The resident arrays."""
        return self._product.arrays()

    def __call__(self, x: mx.array) -> mx.array:
        """Return the product of `x` [1, T, in]: [1, T, out]."""
        return multiply_by_tiles(self._product, x, self._tile_tokens)


Product = DenseLinear | QuantizedLinear | StackedLinear | TiledLinear
"""A product of any layout."""


def multiply_by_tiles(product: Callable[[mx.array], mx.array], x: mx.array, tile_tokens: int | None) -> mx.array:
    """`product` of `x` [1, T, in], by exactly `tile_tokens` tokens at once; None takes what there is."""
    if tile_tokens is None:
        return product(x)
    tokens, tile = x.shape[1], tile_tokens
    filled = mx.pad(x, [(0, 0), (0, -tokens % tile), (0, 0)]) if tokens % tile else x
    # One product for each tile: mlx would fold tiles along another axis back into one tall product.
    parts = [product(filled[:, start : start + tile]) for start in range(0, tokens, tile)]
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    return joined[:, :tokens]


def multiplies_packed(bits: int, group_size: int, mode: str) -> bool:
    """Whether the library has a product with matrices of this form on the device; tried on one group of each row."""
    try:
        weight, scales, biases = (*mx.quantize(mx.ones((32, 128)), group_size=group_size, bits=bits, mode=mode), None)[
            :3
        ]
        mx.eval(
            mx.quantized_matmul(
                mx.ones((1, 128)), weight, scales, biases, transpose=True, group_size=group_size, bits=bits, mode=mode
            )
        )
    except (ValueError, RuntimeError):
        return False
    return True


def build_linear(
    weights: Sequence[Weight], biases: Sequence[mx.array | None], *, pretranspose: bool
) -> DenseLinear | QuantizedLinear | StackedLinear:
    """Join `weights` along `out` into one product where their forms allow it.

    Args:
        weights: one or more matrices with the same `in`.
        biases: an additive bias [out] or None for each weight.
        pretranspose: keep dense matrices as [in, out].
    """
    bias = join_biases([_rows(weight) for weight in weights], biases)
    if all(isinstance(weight, DenseWeight) for weight in weights):
        matrices = [weight.weight for weight in weights]
        joined = matrices[0] if len(matrices) == 1 else mx.concatenate(matrices, axis=0)
        return DenseLinear(joined, bias, transposed=pretranspose)
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(packed) == len(weights) and len({(p.bits, p.group_size, p.mode, p.biases is None) for p in packed}) == 1:
        return QuantizedLinear(_joined_packed(packed), bias)
    return StackedLinear(
        [
            DenseLinear(weight.weight, own, transposed=pretranspose)
            if isinstance(weight, DenseWeight)
            else QuantizedLinear(weight, own)
            for weight, own in zip(weights, biases, strict=True)
        ]
    )


def _rows(weight: Weight) -> int:
    return weight.weight.shape[0]


def join_biases(rows: Sequence[int], biases: Sequence[mx.array | None]) -> mx.array | None:
    """The biases of matrices with `rows` results each, side by side: zeros where one has none, None if all have."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    filled = [
        bias if bias is not None else mx.zeros((count,), dtype=present[0].dtype)
        for count, bias in zip(rows, biases, strict=True)
    ]
    return filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)


def _joined_packed(packed: Sequence[QuantizedWeight]) -> QuantizedWeight:
    first = packed[0]
    if len(packed) == 1:
        return first
    biases = [p.biases for p in packed if p.biases is not None]
    return QuantizedWeight(
        weight=mx.concatenate([p.weight for p in packed], axis=0),
        scales=mx.concatenate([p.scales for p in packed], axis=0),
        biases=mx.concatenate(biases, axis=0) if biases else None,
        bits=first.bits,
        group_size=first.group_size,
        mode=first.mode,
    )
