"""The compiled functions that turn GGUF blocks into float32, ten times as fast as array operations do.

They read and write host memory alone, and run without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any

from engine.runtime.compiled import CannotCompileError, open_compiled

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class UnpackKernel:
    """Unpacks blocks by the name of their format, such as "Q4_1"."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap `library`, compiled from `unpack.c`."""
        self._library = library

    def handles(self, block_format: str) -> bool:
        """Whether `unpack` knows the format."""
        return self._function(block_format) is not None

    def unpack(self, block_format: str, blocks: NDArray[Any], values: NDArray[Any]) -> bool:
        """Write the values of all `blocks` into `values`.

        Args:
            block_format: one that `handles` accepts.
            blocks: [.., bytes of a block] uint8, contiguous.
            values: float32, contiguous, 32 for each block.

        Returns:
            Whether every scale and bias is a finite float16.

        Raises:
            ValueError: the sizes do not agree (an internal fault).
        """
        count = values.size // 32
        if not (blocks.flags.c_contiguous and values.flags.c_contiguous) or count * blocks.shape[-1] != blocks.nbytes:
            raise ValueError(f"blocks of {blocks.shape} bytes do not fill {values.size} values")
        function = self._function(block_format)
        return bool(
            function(ctypes.c_void_p(blocks.ctypes.data), ctypes.c_long(count), ctypes.c_void_p(values.ctypes.data))
        )

    def _function(self, block_format: str) -> Any:
        return getattr(self._library, f"mlx_stream_unpack_{block_format.lower()}", None)


def open_unpack_kernel(directory: Path) -> UnpackKernel | None:
    """The kernel, compiled into `directory` when it is not there yet; None without a C compiler."""
    try:
        return UnpackKernel(open_compiled("unpack.c", directory=directory))
    except (CannotCompileError, OSError) as error:
        logger.info("weights are unpacked without compiled code: %s", error)
        return None
