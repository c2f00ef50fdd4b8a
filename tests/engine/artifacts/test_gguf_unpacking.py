"""GGUF types that only the host can unpack: values, dtype, the bound on memory, and damage."""

import gguf
import mlx.core as mx
import numpy as np
import pytest

from engine.artifacts import gguf_blocks
from engine.artifacts.gguf import read_header
from engine.artifacts.gguf_types import TENSOR_TYPES, UNREAD_TYPES
from engine.artifacts.tensors import DenseTensor
from engine.contracts.errors import CorruptArtifactError

PACKED_OR_DENSE = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"}
UNPACKED = sorted({block.name for block in TENSOR_TYPES.values()} - PACKED_OR_DENSE)
BLOCKS = {block.name: block for block in TENSOR_TYPES.values()}
# Where a block keeps the high bytes of its float16 factors.
FACTORS = {"Q2_K": (81, 83), "Q3_K": (109,), "Q4_K": (1, 3), "Q5_1": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}
FACTORS |= {"TQ1_0": (53,), "TQ2_0": (65,), "IQ1_M": (49, 51, 53, 55), "MXFP4": (0,)}


def random_blocks(kind, rows, blocks, seed=3):
    """Bytes [rows, blocks · size] of any values, with factors of a sober size."""
    block = BLOCKS[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks, block.nbytes), dtype=np.uint8)
    for at in FACTORS.get(kind, (1,)):
        raw[..., at] &= 0x3F
    return raw.reshape(rows, -1)


def write(path, kind, raw, shape):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path).tensors["x"]


@pytest.mark.parametrize("kind", UNPACKED)
def test_a_type_without_a_packed_form_is_unpacked_row_by_row(tmp_path, kind, monkeypatch):
    shape = (2, 7, BLOCKS[kind].values * 2)
    raw = random_blocks(kind, 14, 2)
    header = write(tmp_path / "x.gguf", kind, raw, shape)
    monkeypatch.setattr(gguf_blocks, "_STRETCH_VALUES", 3 * shape[-1])  # 14 rows: four stretches and a rest
    found = gguf_blocks.load_tensor(header, mx.float32)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(shape)
    assert isinstance(found, DenseTensor)
    assert header.shape == shape
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 2
    assert np.array_equal(np.array(found.weight), expected)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_unpacked_values_are_rounded_once_to_the_dtype_that_was_asked_for(tmp_path, dtype):
    raw = random_blocks("Q6_K", 8, 1)
    found = gguf_blocks.load_tensor(write(tmp_path / "x.gguf", "Q6_K", raw, (8, 256)), dtype).weight
    assert found.dtype == dtype
    assert mx.array_equal(found, mx.array(naive_q6_k(raw)).astype(dtype))


def naive_q4_k(raw):
    """d·s·q - dmin·m for eight groups of 32. Source: the GGUF specification, block_q4_K."""
    rows = []
    for block in raw.reshape(-1, 144):
        d, smallest = block[:4].view(np.float16).astype(np.float32)
        packed, nibbles = block[4:16].astype(int), block[16:].reshape(4, 32)
        for group in range(8):
            if group < 4:
                scale, minimum = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
                minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
            levels = nibbles[group // 2] >> 4 if group % 2 else nibbles[group // 2] & 15
            rows.append(d * np.float32(scale) * levels.astype(np.float32) - smallest * np.float32(minimum))
    return np.concatenate(rows).reshape(raw.shape[0], -1)


def naive_q6_k(raw):
    """d·s·(q-32) for sixteen groups of 16. Source: the GGUF specification, block_q6_K."""
    rows = []
    for block in raw.reshape(-1, 210):
        low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
        d = block[208:].view(np.float16).astype(np.float32)[0]
        for position in range(256):
            half, inner = divmod(position, 128)
            quarter, lane = divmod(inner, 32)
            nibble = low[half * 64 + lane + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
            level = int(nibble | (high[half * 32 + lane] >> (2 * quarter) & 3) << 4) - 32
            rows.append(d * np.float32(scales[position // 16]) * np.float32(level))
    return np.array(rows, dtype=np.float32).reshape(raw.shape[0], -1)


@pytest.mark.parametrize(("kind", "naive"), [("Q4_K", naive_q4_k), ("Q6_K", naive_q6_k)])
def test_k_quants_follow_their_written_formula(tmp_path, kind, naive):
    raw = random_blocks(kind, 3, 2)
    found = gguf_blocks.load_tensor(write(tmp_path / "x.gguf", kind, raw, (3, 512)), mx.float32).weight
    assert np.allclose(np.array(found), naive(raw), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "step"), [("Q5_0", 32), ("Q5_1", 32)])
def test_five_bit_blocks_stay_within_a_step_of_what_was_stored(tmp_path, kind, step):
    values = np.random.default_rng(0).standard_normal((6, 96), dtype=np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    found = np.array(gguf_blocks.load_tensor(write(tmp_path / "x.gguf", kind, raw, (6, 96)), mx.float32).weight)
    widest = np.ptp(values.reshape(-1, 32), axis=1).max()
    assert 0 < np.abs(found - values).max() <= 2 * widest / step


def test_only_a_stretch_of_rows_is_held_beside_the_result(tmp_path):
    rows, columns = 4096, 2048
    raw = random_blocks("Q4_K", rows, columns // 256)
    header = write(tmp_path / "x.gguf", "Q4_K", raw, (rows, columns))
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    found = gguf_blocks.load_tensor(header, mx.float16).weight
    mx.eval(found)
    peak = mx.get_peak_memory() - held
    assert found.nbytes <= peak < found.nbytes + 6 * 4 * gguf_blocks._STRETCH_VALUES


def test_values_beyond_the_dtype_are_refused_with_the_tensor(tmp_path):
    raw = random_blocks("Q4_K", 2, 1)
    raw[:, 1] = 0x7B  # d near 60000
    header = write(tmp_path / "x.gguf", "Q4_K", raw, (2, 256))
    assert isinstance(gguf_blocks.load_tensor(header, mx.float32), DenseTensor)
    with pytest.raises(CorruptArtifactError, match=r"x.gguf: tensor 'x' holds values beyond"):
        gguf_blocks.load_tensor(header, mx.float16)


def test_a_file_that_ends_early_is_refused_while_its_rows_are_read(tmp_path):
    header = write(tmp_path / "x.gguf", "Q4_K", random_blocks("Q4_K", 4, 1), (4, 256))
    header.file.write_bytes(header.file.read_bytes()[:-40])
    with pytest.raises(CorruptArtifactError, match=r"^x.gguf: ends inside tensor 'x'$"):
        gguf_blocks.load_tensor(header, mx.float32)


def test_the_table_of_types_is_that_of_the_reference_package():
    package = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (b.name, b.values, b.nbytes) for number, b in TENSOR_TYPES.items()}.items() <= package.items()
    assert {number: name for number, (name, *_) in package.items() if number not in TENSOR_TYPES} == UNREAD_TYPES
