"""The compiled functions that turn a file's bytes into float32 values, ten times as fast as array operations do.

They read files and write host memory, and need no interpreter: one call fills as much as the caller has.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any, Final

from engine.runtime.compiled import CannotCompileError, open_compiled

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_CUT_SHORT: Final = -1
_BLOCK_VALUES: Final = 32


class UnpackKernel:
    """Reads values by the name of the form that they are stored in, such as "Q4_1" or "BF16"."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Wrap `library`, compiled from `unpack.c`."""
        self._number = library.mlx_stream_format
        self._fill = library.mlx_stream_fill
        self._fill.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_long, ctypes.c_void_p)

    def handles(self, form: str) -> bool:
        """Whether `fill` knows the form."""
        return int(self._number(form.encode())) >= 0

    def fill(self, form: str, file: int, offset_bytes: int, values: NDArray[Any]) -> bool:
        """Read all of `values`.

        Args:
            form: one that `handles` accepts.
            file: a descriptor, which stays where it is.
            offset_bytes: where the first value, or its block, lies.
            values: float32, contiguous, whole blocks (of 32) where the form has them.

        Returns:
            Whether every scale and bias is a finite float16.

        Raises:
            EOFError: the file ends before, or cannot be read.
            ValueError: the values are not contiguous, or no whole blocks (an internal fault).
        """
        if not values.flags.c_contiguous or (form.startswith("Q") and values.size % _BLOCK_VALUES):
            raise ValueError(f"values of the shape {values.shape} cannot be filled from {form}")
        told = self._fill(self._number(form.encode()), file, offset_bytes, values.size, values.ctypes.data)
        if told == _CUT_SHORT:
            raise EOFError
        return bool(told)


def open_unpack_kernel(directory: Path) -> UnpackKernel | None:
    """The kernel, compiled into `directory` when it is not there yet; None without a C compiler."""
    try:
        return UnpackKernel(open_compiled("unpack.c", directory=directory))
    except (CannotCompileError, OSError) as error:
        logger.info("weights are unpacked without compiled code: %s", error)
        return None
