"""The account of one stored tensor, as a file's header gives it, before any of its bytes are read.

`shape` is row-major and logical (a quantized GGUF matrix counts its values, not its bytes); `offset_bytes` counts
from the start of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor in one file. `dtype` is spelled as its format spells it: "BF16", "U32", "Q4_1"."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int
