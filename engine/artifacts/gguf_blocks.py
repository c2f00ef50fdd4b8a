"""GGUF tensor data as mlx arrays, one tensor at a time.

Blocks of Q4_0, Q4_1 and Q8_0 become affine groups without rounding: `d·(q-8)`, `d·q + m` and `d·q` are all
`scale · q + bias`, with the packed values re-ordered from halves (0 with 16, 1 with 17, …) to neighbours. Every other
quantized type is unpacked, a stretch of rows at a time, by the `gguf` package. Own code rather than `mx.load`, which
decodes a whole file at once, rounds BF16 to float16, and refuses a file with any other type. Source: the GGUF
specification (block layouts).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import numpy as np

from engine.artifacts.model_files import open_file
from engine.artifacts.quantization import QuantizationScheme
from engine.artifacts.tensors import DenseTensor, QuantizedTensor, StoredTensor
from engine.contracts.errors import CorruptArtifactError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from engine.artifacts.tensor_header import TensorHeader

_BLOCK_VALUES: Final = 32
_STRETCH_VALUES: Final = 2**20
_FOUR_BITS: Final = QuantizationScheme(bits=4, group_size=_BLOCK_VALUES)
_EIGHT_BITS: Final = QuantizationScheme(bits=8, group_size=_BLOCK_VALUES)


def load_tensor(stored: TensorHeader, unpacked_dtype: mx.Dtype) -> StoredTensor:
    """Read and decode one tensor.

    Args:
        stored: its header.
        unpacked_dtype: the dtype of a tensor whose blocks have no packed form here.

    Raises:
        MissingArtifactError, CorruptArtifactError: the file has changed since its header was validated, or the values
            are no numbers of that dtype.
    """
    decoder = _DECODERS.get(stored.dtype)
    if decoder is None:
        return _unpacked(stored, unpacked_dtype)
    return decoder(stored, _read(stored, 0, stored.nbytes))


def _read(stored: TensorHeader, start_bytes: int, length_bytes: int) -> NDArray[np.uint8]:
    """`length_bytes` of a tensor's data, from `start_bytes` of it."""
    with open_file(stored.file) as file:
        raw = np.fromfile(file, dtype=np.uint8, count=length_bytes, offset=stored.offset_bytes + start_bytes)
    if raw.size != length_bytes:
        raise cut_short(stored)
    return raw


def _unpacked(stored: TensorHeader, dtype: mx.Dtype) -> DenseTensor:
    """The values in `dtype`; beside them only one stretch of rows is held as float32."""
    columns = stored.shape[-1]
    rows = math.prod(stored.shape[:-1])
    row_bytes = stored.nbytes // rows
    stretch = max(1, _STRETCH_VALUES // columns)
    values = mx.zeros((rows, columns), dtype=dtype)
    for start in range(0, rows, stretch):
        raw = _read(stored, start * row_bytes, min(stretch, rows - start) * row_bytes)
        part = mx.array(_unpacked_rows(stored.dtype, raw.reshape(-1, row_bytes))).astype(dtype)
        if not mx.isfinite(part).all():
            raise CorruptArtifactError(stored.file.name, f"tensor {stored.name!r} holds values beyond {dtype}")
        values[start : start + stretch] = part
        mx.eval(values)  # now, so that the rows are written in place and the stretch is let go of
    return DenseTensor(weight=values.reshape(stored.shape))


def _unpacked_rows(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    import gguf  # a third of a second that most models need not wait for

    with np.errstate(all="ignore"):  # what is no number is refused by the caller
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def _float32(stored: TensorHeader, raw: NDArray[np.uint8]) -> DenseTensor:
    return DenseTensor(weight=mx.array(raw.view("<f4").reshape(stored.shape)))


def _float16(stored: TensorHeader, raw: NDArray[np.uint8]) -> DenseTensor:
    return DenseTensor(weight=mx.array(raw.view("<f2").reshape(stored.shape)))


def _bfloat16(stored: TensorHeader, raw: NDArray[np.uint8]) -> DenseTensor:
    return DenseTensor(weight=mx.array(raw.view("<u2").reshape(stored.shape)).view(mx.bfloat16))


def _q4_0(stored: TensorHeader, raw: NDArray[np.uint8]) -> QuantizedTensor:
    blocks = _blocks(stored, raw, [("d", "<f2"), ("q", "<u2", 8)])
    return _quantized(stored, _FOUR_BITS, _neighbours(blocks["q"]), blocks["d"], _zero_at(8, blocks["d"]))


def _q4_1(stored: TensorHeader, raw: NDArray[np.uint8]) -> QuantizedTensor:
    blocks = _blocks(stored, raw, [("d", "<f2"), ("m", "<f2"), ("q", "<u2", 8)])
    return _quantized(stored, _FOUR_BITS, _neighbours(blocks["q"]), blocks["d"], blocks["m"])


def _q8_0(stored: TensorHeader, raw: NDArray[np.uint8]) -> QuantizedTensor:
    blocks = _blocks(stored, raw, [("d", "<f2"), ("q", "u1", _BLOCK_VALUES)])
    unsigned = blocks["q"] ^ np.uint8(0x80)
    return _quantized(stored, _EIGHT_BITS, unsigned, blocks["d"], _zero_at(128, blocks["d"]))


_DECODERS: Final[Mapping[str, Callable[[TensorHeader, NDArray[np.uint8]], StoredTensor]]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}


def _blocks(
    stored: TensorHeader, raw: NDArray[np.uint8], layout: list[tuple[str, str] | tuple[str, str, int]]
) -> NDArray[np.void]:
    """The blocks of each row: [..., out, in/32] records."""
    return raw.view(np.dtype(layout)).reshape(*stored.shape[:-1], stored.shape[-1] // _BLOCK_VALUES)


def _zero_at(level: int, scales: NDArray[np.float16]) -> NDArray[np.float16]:
    """The bias that makes `level` mean 0; exact, or infinite beyond float16, which is refused later."""
    with np.errstate(over="ignore"):
        return scales * np.float16(-level)


def _neighbours(pairs: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Re-order nibbles: byte j of a block holds values j and j+16; packed are 2k and 2k+1."""
    pairs = np.ascontiguousarray(pairs)
    packed = np.empty((*pairs.shape[:-1], 16), dtype=np.uint8)
    packed[..., :8] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    packed[..., 8:] = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return packed


def _quantized(
    stored: TensorHeader,
    scheme: QuantizationScheme,
    packed: NDArray[np.uint8],
    scales: NDArray[np.float16],
    biases: NDArray[np.float16],
) -> QuantizedTensor:
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise beyond_float16(stored)
    words = packed.reshape(*stored.shape[:-1], -1).view("<u4")
    return QuantizedTensor.of(scheme, mx.array(words), mx.array(scales), mx.array(biases))


def beyond_float16(stored: TensorHeader) -> CorruptArtifactError:
    """The refusal of a tensor whose scales are no numbers."""
    return CorruptArtifactError(stored.file.name, f"tensor {stored.name!r} holds scales beyond float16")


def cut_short(stored: TensorHeader) -> CorruptArtifactError:
    """The refusal of a tensor that its file no longer holds whole."""
    return CorruptArtifactError(stored.file.name, f"ends inside tensor {stored.name!r}")
