"""The compiled functions that compute what stands between a step's products: attention of rows, and gates.

They are part of the shim in front of mlx and share its threads; they read and write host memory alone, and run without
the interpreter's lock. Results are float32, and a token's do not depend on what else is in the step. Source: decision
0027.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engine.runtime.blas_shim import LoadedShim

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_LANES: Final = 16
LARGEST_HEAD: Final = 256
"""The largest size of heads for which the kernel has room."""

STRETCH: Final = np.dtype(
    {
        "names": ["state", "capacity", "start", "length", "offset"],
        "formats": [np.uintp, np.intc, np.intc, np.intc, np.intc],
    },
    align=True,
)
"""Some packed tokens of one row: where its keys and values of a layer lie, with room for so many tokens; the first of
them in the step, how many they are, and how many the row has already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Heads of queries and of keys, the size of each, and the factor on scores, which become exponents of two."""

    heads: int
    kv_heads: int
    size: int
    factor: float


class HostKernels:
    """The kernels for this processor."""

    def __init__(self, library: ctypes.CDLL, *, lanes: int, threads: int) -> None:
        """Wrap `library`, which has been asked for its `lanes`; work is shared among `threads`."""
        self._library = library
        self._lanes = lanes
        self._threads = ctypes.c_int(threads)

    @classmethod
    def of(cls, library: ctypes.CDLL, *, threads: int, most_lanes: int = MOST_LANES) -> HostKernels | None:
        """The kernels in `library`, no wider than `most_lanes`; None if it has none for this processor."""
        lanes = int(library.mlx_stream_host_lanes(ctypes.c_int(most_lanes)))
        return cls(library, lanes=lanes, threads=threads) if lanes else None

    @classmethod
    def of_this_process(cls) -> HostKernels | None:
        """Those of the shim in front of mlx, if there is one and it knows this processor."""
        shim = LoadedShim.of_this_process()
        return None if shim is None else cls.of(ctypes.CDLL(None), threads=max(1, shim.threads))

    def can_attend(self, size: int) -> bool:
        """Whether `attend` takes heads of `size` numbers."""
        return size <= LARGEST_HEAD and size % self._lanes == 0

    def attend(
        self, stretches: NDArray[Any], queries: NDArray[Any], joined: NDArray[Any] | None, sizes: AttentionSizes
    ) -> NDArray[Any]:
        """Keep a step's keys and values, then attend causally.

        Args:
            stretches: [S] of `STRETCH`; together they hold every token of the step once.
            queries: [T, heads·size], each token's contiguous.
            joined: keys, then values [T, 2·kv_heads·size] in the same way; None when they were kept before.
            sizes: what the numbers are.

        Returns:
            [T, heads·size].
        """
        mixed = np.empty(queries.shape, np.float32)
        self._library.mlx_stream_attend(
            _address(stretches),
            ctypes.c_int(len(stretches)),
            _address(queries),
            _stride(queries),
            None if joined is None else _address(joined),
            ctypes.c_long(0) if joined is None else _stride(joined),
            _address(mixed),
            ctypes.c_int(sizes.heads),
            ctypes.c_int(sizes.kv_heads),
            ctypes.c_int(sizes.size),
            ctypes.c_float(sizes.factor),
            self._threads,
        )
        return mixed

    def swiglu(self, gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
        """`silu(gate) · up` of arrays [T, size], each token's contiguous and as far apart in one as in the other."""
        gated = np.empty(gate.shape, np.float32)
        tokens, size = gate.shape
        self._library.mlx_stream_swiglu(
            _address(gate),
            _address(up),
            _stride(gate),
            _address(gated),
            ctypes.c_int(tokens),
            ctypes.c_int(size),
            self._threads,
        )
        return gated


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _stride(array: NDArray[Any]) -> ctypes.c_long:
    """Numbers from one line of `array` to the next."""
    return ctypes.c_long(array.strides[0] // array.itemsize)
