"""Dense float32 values of packed matrices, on the host: twice as fast as the library's kernel on each CPU core.

Numpy works through a matrix in stretches that stay in the processor's cache, on a few threads; mlx arrays are read
before and made after, on the calling thread. Values are scale · q + bias, rounded after each step.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRETCH_VALUES = 1 << 17
MOST_THREADS = 4


class Dequantizer:
    """Unpacks affine matrices of 4 or 8 bits. Its buffer and threads live until `close`."""

    def __init__(self) -> None:
        """Start without a buffer."""
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="mlx-stream-unpack")
        self._buffer = np.empty(0, dtype=np.float32)

    @staticmethod
    def handles(bits: int, mode: str) -> bool:
        """Whether `dense` can unpack such matrices."""
        return mode == "affine" and bits in _UNPACKERS

    def dense(self, weight: mx.array, scales: mx.array, biases: mx.array, *, bits: int) -> mx.array:
        """The values [..., out, in] float32 of `weight` [..., out, in·bits/32] uint32 with float groups along `in`."""
        shape = (*weight.shape[:-1], weight.shape[-1] * 32 // bits)
        groups = (-1, scales.shape[-1], 1)
        packed = np.array(weight, copy=False).view(np.uint8).reshape(-1, shape[-1] * bits // 8)
        factors, offsets = (np.array(part.astype(mx.float32), copy=False).reshape(groups) for part in (scales, biases))
        values = self._room(packed.shape[0] * shape[-1]).reshape(packed.shape[0], shape[-1])
        rows = max(1, STRETCH_VALUES // shape[-1])

        def unpack(start: int) -> None:
            stretch = slice(start, start + rows)
            _UNPACKERS[bits](packed[stretch], values[stretch])
            grouped = values[stretch].reshape(-1, *factors.shape[1:2], shape[-1] // factors.shape[1])
            grouped *= factors[stretch]
            grouped += offsets[stretch]

        list(self._pool.map(unpack, range(0, packed.shape[0], rows)))
        return mx.array(values).reshape(shape)

    def close(self) -> None:
        """Let go of the buffer and the threads."""
        self._pool.shutdown()
        self._buffer = np.empty(0, dtype=np.float32)

    def _room(self, count: int) -> NDArray[np.float32]:
        """Space for `count` values, used again from matrix to matrix: fresh pages cost more than the arithmetic."""
        if self._buffer.size < count:
            self._buffer = np.empty(count, dtype=np.float32)
        return self._buffer[:count]


def _unpack_nibbles(packed: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
    # Each byte looks up the two float32 that it stands for, moved as one number of 8 bytes.
    np.take(_NIBBLE_PAIRS, packed, out=values.view(np.float64), mode="clip")


def _unpack_bytes(packed: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
    values[...] = packed


_NIBBLE_PAIRS = np.array([[byte & 15, byte >> 4] for byte in range(256)], dtype=np.float32).view(np.float64).ravel()
_UNPACKERS = {4: _unpack_nibbles, 8: _unpack_bytes}
