"""Fills dense float32 matrices from a file's blocks, on a few threads, while the caller goes on to the next matrix.

A matrix takes its memory from mlx and is written in place, so that no value is moved twice and no page visited twice.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from engine.models.untouched import UntouchedMemory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import mlx.core as mx
    from numpy.typing import NDArray

    from engine.artifacts.gguf_blocks import BlockMatrix
    from engine.runtime.unpack_kernel import UnpackKernel

JOB_VALUES: Final = 1 << 19
MOST_THREADS: Final = 4
JOBS_AHEAD: Final = 2 * MOST_THREADS


class Unpacker:
    """Belongs to the engine thread. Its threads touch host memory alone and live until `close`."""

    def __init__(self, kernel: UnpackKernel) -> None:
        """Unpack with `kernel`."""
        self._kernel = kernel
        self._memory = UntouchedMemory()
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="mlx-stream-fill")
        self._jobs: deque[Future[None]] = deque()

    def handles(self, block_format: str | None) -> bool:
        """Whether matrices of this format can be unpacked here."""
        return block_format is not None and self._kernel.handles(block_format)

    def matrix(self, parts: Sequence[BlockMatrix]) -> mx.array:
        """`parts` joined along their rows: [rows of all, in] float32. Its values are there after `settle`.

        Raises:
            ArtifactError: an earlier matrix could not be read.
        """
        matrix = self._memory.matrix(sum(part.rows for part in parts), parts[0].columns)
        values = np.array(matrix, copy=False)
        start = 0
        for part in parts:
            self._start(part, values[start : start + part.rows])
            start += part.rows
        self._settle_but(JOBS_AHEAD)
        return matrix

    def settle(self) -> None:
        """Wait until every matrix is filled.

        Raises:
            ArtifactError: a file could not be read, or holds numbers beyond its format.
        """
        self._settle_but(0)

    def close(self) -> None:
        """Let go of the threads; what was not started is dropped."""
        self._pool.shutdown(cancel_futures=True)

    def _settle_but(self, ahead: int) -> None:
        """Wait for the oldest jobs until `ahead` are left."""
        while len(self._jobs) > ahead:
            self._jobs.popleft().result()

    def _start(self, part: BlockMatrix, values: NDArray[np.float32]) -> None:
        step = max(1, JOB_VALUES // part.columns)
        for first in range(0, part.rows, step):
            self._jobs.append(self._pool.submit(_fill, self._kernel, part, first, values[first : first + step]))


def _fill(kernel: UnpackKernel, part: BlockMatrix, first: int, values: NDArray[np.float32]) -> None:
    if not kernel.unpack(part.block_format, part.read(first, len(values)), values):
        raise part.beyond_float16()
