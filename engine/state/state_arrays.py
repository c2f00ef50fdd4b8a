"""Snapshots to bytes and back, bit for bit, in every dtype. Runs on the engine thread."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx
import numpy as np

from engine.contracts.snapshot import LayerSnapshot
from engine.state.state_file import HostTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DTYPES: Final[Mapping[str, mx.Dtype]] = MappingProxyType(
    {
        "F32": mx.float32,
        "F16": mx.float16,
        "BF16": mx.bfloat16,
        "U32": mx.uint32,
        "I32": mx.int32,
        "U16": mx.uint16,
        "I16": mx.int16,
        "U8": mx.uint8,
        "I8": mx.int8,
    }
)


def to_host(snapshots: Sequence[LayerSnapshot]) -> list[dict[str, HostTensor]]:
    """The arrays of `snapshots` as bytes that any thread may read; they share the arrays' memory."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    raw = [{name: mx.contiguous(array).view(mx.uint8) for name, array in layer.arrays.items()} for layer in snapshots]
    mx.eval(raw)
    return [
        {
            name: HostTensor(dtype=names[array.dtype], shape=tuple(array.shape), data=_bytes(held[name]))
            for name, array in layer.arrays.items()
        }
        for layer, held in zip(snapshots, raw, strict=True)
    ]


def to_device(layers: Sequence[LayerSnapshot], tensors: Sequence[Mapping[str, HostTensor]]) -> list[LayerSnapshot]:
    """`layers`, which hold no arrays, with copies of `tensors`."""
    filled = [
        LayerSnapshot(
            kind=layer.kind,
            tokens=layer.tokens,
            least_tokens=layer.least_tokens,
            start=layer.start,
            facts=layer.facts,
            arrays={name: _array(tensor) for name, tensor in held.items()},
        )
        for layer, held in zip(layers, tensors, strict=True)
    ]
    mx.eval([list(layer.arrays.values()) for layer in filled])
    return filled


def _bytes(array: mx.array) -> memoryview:
    return memoryview(cast("Any", array)).cast("B")  # an array is a buffer, which its annotations do not say


def _array(tensor: HostTensor) -> mx.array:
    dtype = DTYPES[tensor.dtype]
    *outer, inner = tensor.shape
    return mx.array(np.frombuffer(tensor.data, dtype=np.uint8).reshape(*outer, inner * dtype.size)).view(dtype)
