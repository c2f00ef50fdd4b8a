"""The compiled unpacking against numpy, every float16 scale included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runtime.unpack_kernel import UnpackKernel, open_unpack_kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> UnpackKernel:
    made = open_unpack_kernel(tmp_path_factory.mktemp("compiled"))
    if made is None:
        pytest.skip("there is no C compiler")
    return made


def blocks_of(scales: np.ndarray[Any, Any], minimums: np.ndarray[Any, Any] | None, level_bytes: int) -> Any:
    """Random levels behind `scales` (and `minimums`), both float16."""
    levels = np.random.default_rng(3).integers(0, 256, size=(len(scales), level_bytes), dtype=np.uint8)
    heads = [scales] if minimums is None else [scales, minimums]
    return np.concatenate([*(head.view(np.uint8).reshape(-1, 2) for head in heads), levels], axis=1), levels


def every_scale(limit: float) -> np.ndarray[Any, Any]:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        return every[np.abs(every.astype(np.float32)) <= limit]


def unpacked(kernel: UnpackKernel, block_format: str, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = np.full((len(blocks), 32), np.nan, dtype=np.float32)
    assert kernel.unpack(block_format, blocks, values)
    return values


def nibbles(levels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([levels & 15, levels >> 4], axis=1).astype(np.float32)


def test_q4_0_equals_numpy_for_every_scale(kernel: UnpackKernel) -> None:
    scales = every_scale(65504 / 8)
    blocks, levels = blocks_of(scales, None, 16)
    wide = scales.astype(np.float32)[:, None]
    assert unpacked(kernel, "Q4_0", blocks).tobytes() == (wide * nibbles(levels) + wide * np.float32(-8)).tobytes()


def test_q4_1_equals_numpy_for_every_scale(kernel: UnpackKernel) -> None:
    scales = every_scale(65504)
    minimums = np.random.default_rng(5).permutation(scales)
    blocks, levels = blocks_of(scales, minimums, 16)
    scaled = scales.astype(np.float32)[:, None] * nibbles(levels)
    assert unpacked(kernel, "Q4_1", blocks).tobytes() == (scaled + minimums.astype(np.float32)[:, None]).tobytes()


def test_q8_0_equals_numpy_for_every_scale(kernel: UnpackKernel) -> None:
    scales = every_scale(65504 / 128)
    blocks, levels = blocks_of(scales, None, 32)
    wide = scales.astype(np.float32)[:, None]
    scaled = wide * (levels ^ 0x80).astype(np.float32)
    assert unpacked(kernel, "Q8_0", blocks).tobytes() == (scaled + wide * np.float32(-128)).tobytes()


@pytest.mark.parametrize(("block_format", "level_bytes", "limit"), [("Q4_0", 16, 8188.0), ("Q8_0", 32, 511.75)])
@pytest.mark.parametrize("bad", ["next", np.inf, -np.inf, np.nan])
def test_scales_beyond_float16_are_noticed(
    kernel: UnpackKernel, block_format: str, level_bytes: int, limit: float, bad: Any
) -> None:
    scales = np.ones(9, dtype=np.float16)
    scales[4] = np.nextafter(np.float16(limit), np.float16(np.inf)) if bad == "next" else bad
    blocks, _ = blocks_of(scales, None, level_bytes)
    assert not kernel.unpack(block_format, blocks, np.empty((9, 32), np.float32))


def test_minimums_beyond_float16_are_noticed(kernel: UnpackKernel) -> None:
    minimums = np.array([0, np.inf], dtype=np.float16)
    blocks, _ = blocks_of(np.ones(2, dtype=np.float16), minimums, 16)
    assert not kernel.unpack("Q4_1", blocks, np.empty((2, 32), np.float32))


def test_sizes_that_do_not_agree_are_refused(kernel: UnpackKernel) -> None:
    blocks, _ = blocks_of(np.ones(4, dtype=np.float16), None, 16)
    with pytest.raises(ValueError, match="do not fill"):
        kernel.unpack("Q4_0", blocks, np.empty((5, 32), np.float32))
    with pytest.raises(ValueError, match="do not fill"):
        kernel.unpack("Q4_0", blocks, np.empty((4, 64), np.float32)[:, ::2])


def test_formats_without_a_function_are_known(kernel: UnpackKernel) -> None:
    assert kernel.handles("Q4_1")
    assert not kernel.handles("F32")


def test_without_a_compiler_there_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_unpack_kernel(tmp_path / "unpack") is None
