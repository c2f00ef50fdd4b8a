"""One packed step's attention by compiled code of the host: every row of every table in one call, while it is built.

Operations between products cost more to start than to compute where rows are short, and exponentials one at a time are
slow. A row's bits depend on its own tokens alone: not on its neighbours, its table, or how its prompt was cut.
Source: decision 0027.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from engine.runtime.host_kernels import STRETCH, AttentionSizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.contracts.cache import TableStep
    from engine.runtime.host_kernels import HostKernels


class HostAttention:
    """The rows of one step that sit in tables, the same in every layer."""

    __slots__ = ("_kernels", "_slots", "_steps", "_stretches", "_tables")

    def __init__(self, kernels: HostKernels, steps: Sequence[TableStep]) -> None:
        """Plan the call for the members of `steps`, who are the whole packed step."""
        members = [(table, member) for table, step in enumerate(steps) for member in step.members]
        self._kernels = kernels
        self._steps = steps
        self._tables = np.array([table for table, _ in members], np.intp)
        self._slots = np.array([member.slot for _, member in members], np.uintp)
        self._stretches = np.zeros(len(members), STRETCH)
        self._stretches["start"] = [member.start for _, member in members]
        self._stretches["length"] = [member.length for _, member in members]
        self._stretches["offset"] = [member.offset for _, member in members]

    def can_attend(self, size: int) -> bool:
        """Whether heads may have `size` numbers."""
        return self._kernels.can_attend(size)

    def __call__(self, queries: mx.array, joined: mx.array | None, *, layer: int, factor: float) -> mx.array:
        """Append, then attend causally.

        Args:
            queries: [T, H, 1, D].
            joined: keys, then values [T, 2·Hkv, 1, D]; None when they were appended before.
            layer: index into the rows' caches.
            factor: on the scores, which become exponents of two.

        Returns:
            [T, H·D], in packed order.
        """
        storages = [step.storage(layer, joined) for step in self._steps]
        mx.eval(queries, storages if joined is None else [joined, *storages])
        held = [np.asarray(storage) for storage in storages]
        self._point_at(held)
        sizes = AttentionSizes(
            heads=queries.shape[1], kv_heads=held[0].shape[1] // 2, size=queries.shape[3], factor=factor
        )
        appended = None if joined is None else _lines(np.asarray(joined))
        return mx.array(self._kernels.attend(self._stretches, _lines(np.asarray(queries)), appended, sizes))

    def _point_at(self, held: Sequence[NDArray[Any]]) -> None:
        """Let every stretch begin at its row's place in the storage of its table, which is written in place."""
        bases = np.array([storage.ctypes.data for storage in held], np.uintp)
        row_bytes = np.array([storage[0].nbytes for storage in held], np.uintp)
        self._stretches["state"] = bases[self._tables] + self._slots * row_bytes[self._tables]
        self._stretches["capacity"] = np.array([storage.shape[2] for storage in held], np.intc)[self._tables]


def swiglu_on_host(kernels: HostKernels, gate: mx.array, up: mx.array) -> mx.array:
    """`silu(gate) · up` of arrays [1, T, size], computed now. See `engine.ops.exponential.swiglu`."""
    mx.eval(gate, up)
    return mx.array(kernels.swiglu(*(_lines(np.asarray(part)[0]) for part in (gate, up))))[None]


def _lines(array: NDArray[Any]) -> NDArray[Any]:
    """`array` [T, ..] as [T, numbers], each token's side by side: a view where they are."""
    lines = array.reshape(array.shape[0], -1)
    return lines if lines.strides[1] == lines.itemsize else np.ascontiguousarray(lines)
