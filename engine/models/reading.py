"""Reads a family's weights by their published names into operations, under one layout policy.

Graph constructors say which tensors form which product; how they are held (dense in float32, transposed,
quantized) is the policy's business alone. Shapes were checked when the artifact was opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts.weights import DenseTensor, dense
from engine.contracts.adapters import AdapterTarget
from engine.contracts.errors import UnsupportedArtifactError
from engine.models.unpacking import Unpacker
from engine.ops.dequantization import Dequantizer
from engine.ops.embedding import Embedding
from engine.ops.experts import build_experts, stack_experts
from engine.ops.linear import (
    DenseLinear,
    DenseWeight,
    Product,
    QuantizedLinear,
    QuantizedWeight,
    StackedLinear,
    TiledLinear,
    build_linear,
    join_biases,
    multiplies_packed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.artifacts.tensors import QuantizedTensor, StoredTensor
    from engine.artifacts.weights import WeightStore
    from engine.ops.adapted import AdaptedLinear, AdapterSites
    from engine.ops.experts import ExpertProduct
    from engine.ops.linear import Weight
    from engine.runtime.policy import LayoutPolicy
    from engine.runtime.unpack_kernel import UnpackKernel


def _nothing() -> None:
    """What happens between products, unless a load has more to do."""


class WeightReader:
    """Takes tensors from a store and settles each one before the next, so that loading peaks low.

    Matrices may be filled behind the caller's back: what they hold counts once `finish` has returned.
    """

    def __init__(
        self,
        store: WeightStore,
        layout: LayoutPolicy,
        before_each: Callable[[], None] = _nothing,
        before_waiting: Callable[[], None] = _nothing,
        unpack_kernel: UnpackKernel | None = None,
    ) -> None:
        """Read from `store` and hold weights as `layout` says.

        `before_each` may raise to end a load between products, or while values are waited for. `before_waiting` is
        called once, when the interpreter begins to be little needed: matrices are read by compiled code from then on.
        `unpack_kernel` speeds up the forms that it knows.
        """
        self._store = store
        self._layout = layout
        self._before_each = before_each
        self._before_waiting: Callable[[], None] | None = before_waiting
        self._dtype = getattr(mx, layout.compute_dtype)
        self._row_tile_tokens: int | None = None
        self.adapter_sites: AdapterSites | None = None
        self._tried_forms: set[tuple[int, int, str]] = set()
        self._dequantizer = Dequantizer()
        fills = unpack_kernel is not None and layout.dequantize and layout.compute_dtype == "float32"
        self._unpacker = (
            Unpacker(unpack_kernel, values=store.values, matrices=store.tensors)
            if unpack_kernel is not None and fills
            else None
        )
        self.resident_bytes = 0

    @property
    def read_bytes(self) -> int:
        """Stored bytes of the values that are there."""
        waiting_bytes = 0 if self._unpacker is None else self._unpacker.waiting_bytes
        return self._store.taken_bytes - waiting_bytes

    def tile_rows(self, tokens: int | None) -> None:
        """Make the products read from now on take exactly `tokens` at once; None takes what there is."""
        self._row_tile_tokens = tokens

    def linear(self, *modules: str) -> Product:
        """One product over `modules`, joined in order; additive biases come along where stored."""
        names = [f"{module}.weight" for module in modules]
        biases = [self._optional_vector(f"{module}.bias") for module in modules]
        product = self._unpacked_product(names, biases) or build_linear(
            [self._weight(self._store.take(name)) for name in names],
            biases,
            pretranspose=self._layout.pretranspose_linear,
        )
        self._settle(product.arrays())
        return self._tiled(product)

    def projection(self, *modules: str) -> Product | AdaptedLinear:
        """`linear` over projections that adapters may change, when `adapter_sites` collects them."""
        sites = self.adapter_sites
        if sites is None:
            return self.linear(*modules)
        shapes = [self._store.shape(f"{module}.weight") for module in modules]
        return sites.place(
            self.linear(*modules),
            [
                AdapterTarget(module=module, in_features=shape[1], out_features=shape[0])
                for module, shape in zip(modules, shapes, strict=True)
            ],
        )

    def embedding(self, module: str) -> Embedding:
        """A token table."""
        name = f"{module}.weight"
        filled = self._filled([name])
        table = Embedding(self._weight(self._store.take(name)) if filled is None else DenseWeight(filled[0]))
        self._settle(table.arrays())
        return table

    def tied_head(self, table: Embedding) -> Product:
        """The output head of a model that shares its token table."""
        head = table.as_head(pretranspose=self._layout.pretranspose_linear)
        shared = {id(array) for array in table.arrays()}
        self._settle([array for array in head.arrays() if id(array) not in shared])
        return self._tiled(head)

    def __contains__(self, name: object) -> bool:
        """Whether a tensor is stored under `name`."""
        return isinstance(name, str) and self._store.has(name)

    def holds_dense(self, name: str) -> bool:
        """Whether matrix `name` will be dense in the compute dtype."""
        return self._layout.dequantize or f"{name.removesuffix('.weight')}.scales" not in self

    def experts(self, *stacks: Sequence[str]) -> ExpertProduct:
        """One product over matrices of experts, joined in order.

        Each stack names one tensor [E, out, in], or one tensor [out, in] for every expert.

        Raises:
            ArtifactError: what the store says, or experts of one stack are not stored alike.
        """
        product = build_experts([self._stack(names) for names in stacks], pretranspose=self._layout.pretranspose_linear)
        self._settle(product.arrays())
        return product

    def vector(self, name: str) -> mx.array:
        """A weight that no product takes, such as a norm's gain."""
        array = dense(self._store.take(name), self._dtype)
        self._settle([array])
        return array

    def precise_vector(self, name: str) -> mx.array:
        """A one-dimensional weight in float32, whatever the compute dtype."""
        array = dense(self._store.take(name), mx.float32)
        self._settle([array])
        return array

    def depthwise_kernel(self, name: str) -> mx.array:
        """The weights [K, C] of a convolution of each channel by itself, stored as [C, 1, K] or [C, K, 1]."""
        stored = dense(self._store.take(name), self._dtype)
        array = mx.contiguous(stored.reshape(stored.shape[0], -1).T)
        self._settle([array])
        return array

    def finish(self, unused: Sequence[str] = ()) -> None:
        """Wait for all values, check that every stored tensor was used, and let go of the files.

        Full matches of the patterns in `unused` need not be.

        Raises:
            ArtifactError: what the store says.
        """
        self._wait()
        self.close()
        self._store.audit(unused)

    def close(self) -> None:
        """Let go of threads, buffers and callbacks, whether or not all was read; again is harmless."""
        self._before_each, self._before_waiting = _nothing, None  # they may hold this very reader
        self._dequantizer.close()
        if self._unpacker is not None:
            self._unpacker.close()

    def _unpacked_product(self, names: Sequence[str], biases: Sequence[mx.array | None]) -> DenseLinear | None:
        """One product whose matrix is unpacked in place; None if that is not the way to read these."""
        filled = self._filled(names)
        if filled is None:
            return None
        matrix, rows = filled
        return DenseLinear(matrix, join_biases(rows, biases), transposed=self._layout.pretranspose_linear)

    def _filled(self, names: Sequence[str]) -> tuple[mx.array, list[int]] | None:
        """The matrices `names` as one, and the rows of each; its values are there by `finish`."""
        unpacker = self._unpacker
        if unpacker is None or not all(unpacker.handles(self._store.matrix_form(name)) for name in names):
            return None
        parts = [self._store.take_stored(name) for name in names]
        matrix = unpacker.matrix(parts)
        if self._layout.pretranspose_linear:
            self._wait()  # a transposed copy is made of it next
        return matrix, [part.shape[0] for part in parts]

    def _wait(self) -> None:
        """Wait for all that is being filled."""
        self._let_others_work()
        if self._unpacker is not None:
            self._unpacker.settle(self._before_each)

    def _let_others_work(self) -> None:
        before_waiting, self._before_waiting = self._before_waiting, None
        if before_waiting is not None:
            before_waiting()

    def _tiled(self, product: DenseLinear | QuantizedLinear | StackedLinear) -> Product:
        return product if self._row_tile_tokens is None else TiledLinear(product, self._row_tile_tokens)

    def _optional_vector(self, name: str) -> mx.array | None:
        tensor = self._store.take_optional(name)
        return None if tensor is None else dense(tensor, self._dtype)

    def _weight(self, tensor: StoredTensor) -> Weight:
        self._let_others_work()
        if isinstance(tensor, DenseTensor):
            return DenseWeight(dense(tensor, self._dtype))
        if self._layout.dequantize:
            return DenseWeight(self._unpacked(tensor))
        self._require_product(tensor)
        affine = tensor.mode == "affine"  # other modes keep their own kind of scales
        return QuantizedWeight(
            weight=tensor.weight,
            scales=tensor.scales.astype(self._dtype) if affine else tensor.scales,
            biases=None if tensor.biases is None else tensor.biases.astype(self._dtype),
            bits=tensor.bits,
            group_size=tensor.group_size,
            mode=tensor.mode,
        )

    def _require_product(self, tensor: QuantizedTensor) -> None:
        """Try each form out once, so that one without a kernel is refused by name before anything is served."""
        form = (tensor.bits, tensor.group_size, tensor.mode)
        if form not in self._tried_forms and not multiplies_packed(*form):
            raise UnsupportedArtifactError(
                self._store.name,
                f"its weights of {tensor.mode} {tensor.bits}-bit, groups of {tensor.group_size}, "
                "are of a form that the installed mlx cannot multiply on this device",
            )
        self._tried_forms.add(form)

    def _stack(self, names: Sequence[str]) -> Weight:
        parts = [self._weight(self._store.take(name)) for name in names]
        if parts[0].weight.ndim == 3:
            return parts[0]
        try:
            return stack_experts(parts)
        except ValueError:
            raise UnsupportedArtifactError(
                self._store.name, f"{names[0]} and the same matrix of other experts are not stored in one form"
            ) from None

    def _unpacked(self, tensor: QuantizedTensor) -> mx.array:
        biases = tensor.biases
        if self._dtype != mx.float32 or biases is None or not Dequantizer.handles(tensor.bits, tensor.mode):
            return dense(tensor, self._dtype)
        return self._dequantizer.dense(tensor.weight, tensor.scales, biases, bits=tensor.bits)

    def _settle(self, arrays: list[mx.array]) -> None:
        self._before_each()
        mx.eval(arrays)
        self.resident_bytes += sum(array.nbytes for array in arrays)
