"""Fills dense float32 matrices from a file's bytes, on a few threads, while the caller goes on to the next matrix.

A matrix takes its memory from mlx and is written in place, so that no value is moved twice and no page visited twice.
The threads run compiled code and hardly need the interpreter, which is free for others meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import numpy as np

from engine.artifacts.gguf_blocks import beyond_float16, cut_short
from engine.artifacts.model_files import open_file
from engine.models.untouched import ALIGNMENT_VALUES, STRETCH_VALUES, UntouchedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from typing import BinaryIO

    import mlx.core as mx
    from numpy.typing import NDArray

    from engine.artifacts.tensor_header import TensorHeader
    from engine.runtime.unpack_kernel import UnpackKernel

JOB_VALUES: Final = 1 << 21
"""Others may have their turn, and a load may end, between any two jobs."""
MOST_THREADS: Final = 4


class Unpacker:
    """Belongs to the engine thread. Its threads touch host memory alone and live until `close`."""

    def __init__(self, kernel: UnpackKernel, *, values: int, matrices: int) -> None:
        """Unpack with `kernel` up to so many `values` of so many `matrices`."""
        self.waiting_bytes = 0
        """Stored bytes of what is not known to be filled."""
        self._kernel = kernel
        self._memory = UntouchedMemory(min(STRETCH_VALUES, values + matrices * ALIGNMENT_VALUES))
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="mlx-stream-fill")
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._files: dict[Path, BinaryIO] = {}
        self._open = ExitStack()

    def handles(self, form: str | None) -> bool:
        """Whether matrices of this form can be filled here."""
        return form is not None and self._kernel.handles(form)

    def matrix(self, parts: Sequence[TensorHeader]) -> mx.array:
        """`parts` [rows, in] joined along their rows: [rows of all, in] float32. Its values are there after `settle`.

        Raises:
            MissingArtifactError, CorruptArtifactError: a file is no longer there, or no longer a regular file.
        """
        matrix = self._memory.matrix(sum(part.shape[0] for part in parts), parts[0].shape[1])
        values = np.array(matrix, copy=False)
        start = 0
        for part in parts:
            self._start(part, values[start : start + part.shape[0]])
            start += part.shape[0]
        return matrix

    def settle(self, before_each: Callable[[], None]) -> None:
        """Wait until every matrix is filled; `before_each` job that is waited for may raise to end the load.

        Raises:
            ArtifactError: a file could not be read, or holds numbers beyond its format.
        """
        while self._jobs:
            job, nbytes = self._jobs.popleft()
            if not job.done():
                before_each()  # a turn of others may take longer than many jobs
            job.result()
            self.waiting_bytes -= nbytes

    def close(self) -> None:
        """Let go of the threads and files; what was not started is dropped."""
        self._pool.shutdown(cancel_futures=True)
        self._memory = UntouchedMemory()
        self._files.clear()
        self._open.close()

    def _start(self, part: TensorHeader, values: NDArray[np.float32]) -> None:
        rows, columns = part.shape
        row_bytes = part.nbytes // rows
        file = self._opened(part.file).fileno()
        step = max(1, JOB_VALUES // columns)
        for first in range(0, rows, step):
            some = values[first : first + step]
            job = self._pool.submit(_fill, self._kernel, part, file, first * row_bytes, some)
            self._jobs.append((job, len(some) * row_bytes))
        self.waiting_bytes += part.nbytes

    def _opened(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = self._open.enter_context(open_file(path))
        return self._files[path]


def _fill(kernel: UnpackKernel, part: TensorHeader, file: int, start_bytes: int, values: NDArray[np.float32]) -> None:
    """Fill `values` from the bytes of `part` that begin `start_bytes` into it."""
    try:
        fine = kernel.fill(part.dtype, file, part.offset_bytes + start_bytes, values)
    except EOFError:
        raise cut_short(part) from None
    if not fine:
        raise beyond_float16(part)
