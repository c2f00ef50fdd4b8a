"""GGUF tensor types: what we read, and the names of what we refuse.

A quantized type stores blocks of consecutive values of one row. Source: the GGUF specification (ggml_type).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: its name, and the bytes that one block of so many values takes."""

    name: str
    values: int
    nbytes: int


TENSOR_TYPES: Final[Mapping[int, BlockType]] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    8: BlockType("Q8_0", 32, 34),
    30: BlockType("BF16", 1, 2),
}
# Known by name only, so that a refusal can say what was met.
UNREAD_TYPES: Final[Mapping[int, str]] = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
