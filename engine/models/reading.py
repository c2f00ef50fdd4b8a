"""Reads a family's weights by their published names into operations, under one layout policy.

Graph constructors say which tensors form which product; how they are held (dense in float32, transposed,
quantized) is the policy's business alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts.weights import DenseTensor, dense
from engine.ops.embedding import Embedding
from engine.ops.linear import DenseLinear, DenseWeight, QuantizedLinear, QuantizedWeight, StackedLinear, build_linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.weights import Tensor, WeightStore
    from engine.ops.linear import Weight
    from engine.runtime.prepare import LayoutPolicy

Product = DenseLinear | QuantizedLinear | StackedLinear


class WeightReader:
    """Takes tensors from a store and settles each one before the next, so that loading peaks low."""

    def __init__(self, store: WeightStore, layout: LayoutPolicy) -> None:
        """Read from `store`; hold weights as `layout` says."""
        self._store = store
        self._layout = layout
        self._dtype = getattr(mx, layout.compute_dtype)
        self.resident_bytes = 0

    def linear(self, modules: Mapping[str, int], *, inputs: int) -> Product:
        """One product over `modules` (name → outputs), joined in order; additive biases come along where stored."""
        weights = [
            self._weight(self._store.take(f"{name}.weight", (outputs, inputs))) for name, outputs in modules.items()
        ]
        biases = [self._optional_vector(f"{name}.bias", outputs) for name, outputs in modules.items()]
        product = build_linear(weights, biases, pretranspose=self._layout.pretranspose_linear)
        self._settle(product.arrays())
        return product

    def embedding(self, name: str, *, rows: int, width: int) -> Embedding:
        """A token table [rows, width]."""
        table = Embedding(self._weight(self._store.take(f"{name}.weight", (rows, width))))
        self._settle(table.arrays())
        return table

    def tied_head(self, table: Embedding) -> Product:
        """The output head of a model that shares its token table."""
        head = table.as_head(pretranspose=self._layout.pretranspose_linear)
        if self._layout.pretranspose_linear:
            self._settle(head.arrays())
        return head

    def vector(self, name: str, size: int) -> mx.array:
        """A one-dimensional weight, such as a norm's gain."""
        array = dense(self._store.take(name, (size,)), self._dtype)
        self._settle([array])
        return array

    def _optional_vector(self, name: str, size: int) -> mx.array | None:
        tensor = self._store.take_optional(name, (size,))
        return None if tensor is None else dense(tensor, self._dtype)

    def _weight(self, tensor: Tensor) -> Weight:
        if self._layout.dequantize or isinstance(tensor, DenseTensor):
            return DenseWeight(dense(tensor, self._dtype))
        return QuantizedWeight(
            weight=tensor.weight,
            scales=tensor.scales,
            biases=tensor.biases,
            bits=tensor.bits,
            group_size=tensor.group_size,
            mode=tensor.mode,
        )

    def _settle(self, arrays: list[mx.array]) -> None:
        mx.eval(arrays)
        self.resident_bytes += sum(array.nbytes for array in arrays)
