"""Predicts from headers how many bytes a model's weights take once they are resident. Reads no tensor."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.artifacts.artifact import PACKED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.artifact import Artifact

BLOCK_VALUES: Final = 32
_ALWAYS_UNPACKED: Final = frozenset({"F8_E4M3"})
"""What mlx-lm unpacks while it reads, but for one layout."""
PACKED_BLOCK_BYTES: Final[Mapping[str, int]] = MappingProxyType({"Q4_0": 16, "Q4_1": 16, "Q8_0": 32})
"""GGUF blocks that stay packed, and the bytes of their integers; a scale and a bias are added to each."""


def resident_bytes(artifact: Artifact, *, element_bytes: int, dequantize: bool, pretranspose: bool) -> int:
    """Bytes of all weights.

    Args:
        artifact: the opened model.
        element_bytes: bytes of a dense value, and of a scale.
        dequantize: quantized matrices become dense.
        pretranspose: products read a transposed matrix, so that a shared token table needs a second one.
    """
    held = sum(_tensor_bytes(artifact, name, element_bytes, dequantize=dequantize) for name in artifact.tensors)
    config = artifact.config
    shares_table = config.tie_word_embeddings and "lm_head.weight" not in artifact.tensors
    if shares_table and pretranspose and (dequantize or not artifact.stored_quantization):
        held += config.vocab_size * config.hidden_size * element_bytes
    if config.denoising is not None and not dequantize and _has_packed_table(artifact):
        held += config.vocab_size * config.hidden_size * element_bytes  # feedback needs plain numbers
    return held


def _has_packed_table(artifact: Artifact) -> bool:
    tables = (header for name, header in artifact.tensors.items() if name.endswith("embed_tokens.weight"))
    return any(header.dtype in PACKED_DTYPES for header in tables)


def _tensor_bytes(artifact: Artifact, name: str, element_bytes: int, *, dequantize: bool) -> int:
    header = artifact.tensors[name]
    if dequantize and artifact.stored_quantization and artifact.is_scale(name):
        return 0
    if not dequantize and header.dtype in PACKED_BLOCK_BYTES:
        blocks = math.prod(header.shape) // BLOCK_VALUES
        return blocks * (PACKED_BLOCK_BYTES[header.dtype] + 2 * element_bytes)
    if not dequantize and header.dtype in PACKED_DTYPES - _ALWAYS_UNPACKED:
        return header.nbytes
    return artifact.values(name) * element_bytes
