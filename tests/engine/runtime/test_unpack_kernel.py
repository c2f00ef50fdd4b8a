"""The compiled reading of values against numpy, every float16 scale included."""

from __future__ import annotations

from collections.abc import Callable
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


Fill = Callable[..., tuple[np.ndarray[Any, Any], bool]]


@pytest.fixture
def fill(kernel: UnpackKernel, tmp_path: Path) -> Fill:
    def filled(form: str, stored: np.ndarray[Any, Any], count: int, before: bytes = b"") -> Any:
        """`count` values of the bytes of `stored`, which lie behind `before` in a file; and whether they are fine."""
        values = np.full(count, np.nan, dtype=np.float32)
        (tmp_path / "stored").write_bytes(before + stored.tobytes())
        with (tmp_path / "stored").open("rb") as file:
            fine = kernel.fill(form, file.fileno(), len(before), values)
            assert file.tell() == 0
        return values, fine

    return filled


def unpacked(fill: Fill, form: str, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values, fine = fill(form, blocks, 32 * len(blocks), before=b"a header")
    assert fine
    return values


def nibbles(levels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([levels & 15, levels >> 4], axis=1).astype(np.float32)


def test_q4_0_equals_numpy_for_every_scale(fill: Fill) -> None:
    scales = every_scale(65504 / 8)
    blocks, levels = blocks_of(scales, None, 16)
    wide = scales.astype(np.float32)[:, None]
    assert unpacked(fill, "Q4_0", blocks).tobytes() == (wide * nibbles(levels) + wide * np.float32(-8)).tobytes()


def test_q4_1_equals_numpy_for_every_scale(fill: Fill) -> None:
    scales = every_scale(65504)
    minimums = np.random.default_rng(5).permutation(scales)
    blocks, levels = blocks_of(scales, minimums, 16)
    scaled = scales.astype(np.float32)[:, None] * nibbles(levels)
    assert unpacked(fill, "Q4_1", blocks).tobytes() == (scaled + minimums.astype(np.float32)[:, None]).tobytes()


def test_q8_0_equals_numpy_for_every_scale(fill: Fill) -> None:
    scales = every_scale(65504 / 128)
    blocks, levels = blocks_of(scales, None, 32)
    wide = scales.astype(np.float32)[:, None]
    scaled = wide * (levels ^ 0x80).astype(np.float32)
    assert unpacked(fill, "Q8_0", blocks).tobytes() == (scaled + wide * np.float32(-128)).tobytes()


@pytest.mark.parametrize(("form", "level_bytes", "limit"), [("Q4_0", 16, 8188.0), ("Q8_0", 32, 511.75)])
@pytest.mark.parametrize("bad", ["next", np.inf, -np.inf, np.nan])
def test_scales_beyond_float16_are_noticed(fill: Fill, form: str, level_bytes: int, limit: float, bad: Any) -> None:
    scales = np.ones(9, dtype=np.float16)
    scales[4] = np.nextafter(np.float16(limit), np.float16(np.inf)) if bad == "next" else bad
    blocks, _ = blocks_of(scales, None, level_bytes)
    assert fill(form, blocks, 9 * 32)[1] is False


def test_minimums_beyond_float16_are_noticed(fill: Fill) -> None:
    minimums = np.array([0, np.inf], dtype=np.float16)
    blocks, _ = blocks_of(np.ones(2, dtype=np.float16), minimums, 16)
    assert fill("Q4_1", blocks, 2 * 32)[1] is False


def test_plain_numbers_are_read_bit_for_bit(fill: Fill) -> None:
    every = np.arange(65536, dtype=np.uint16)
    halves, fine = fill("F16", every, 65536, before=b"odd")
    assert fine
    numbers = ~np.isnan(every.view(np.float16))
    assert halves[numbers].tobytes() == every.view(np.float16)[numbers].astype(np.float32).tobytes()
    assert np.isnan(halves[~numbers]).all()
    assert fill("BF16", every, 65536)[0].tobytes() == (every.astype(np.uint32) << 16).tobytes()
    singles = np.random.default_rng(7).integers(0, 2**32, size=100_000, dtype=np.uint32)
    assert fill("F32", singles, 100_000)[0].tobytes() == singles.tobytes()


@pytest.mark.parametrize(("form", "nbytes"), [("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34), ("F32", 128), ("BF16", 64)])
def test_a_file_that_ends_before_is_noticed(fill: Fill, form: str, nbytes: int) -> None:
    stored = np.zeros(8192 * nbytes, dtype=np.uint8)
    assert fill(form, stored, 8192 * 32)[1] is True
    with pytest.raises(EOFError):
        fill(form, stored[:-1], 8192 * 32)
    with pytest.raises(EOFError):
        fill(form, stored[:0], 32)


def test_a_file_that_cannot_be_read_is_noticed(kernel: UnpackKernel, tmp_path: Path) -> None:
    with (tmp_path / "only written").open("wb") as file, pytest.raises(EOFError):
        kernel.fill("F32", file.fileno(), 0, np.empty(4, np.float32))


def test_values_that_are_no_whole_blocks_are_refused(kernel: UnpackKernel) -> None:
    with pytest.raises(ValueError, match="cannot be filled"):
        kernel.fill("Q4_0", 0, 0, np.empty(33, np.float32))
    with pytest.raises(ValueError, match="cannot be filled"):
        kernel.fill("F32", 0, 0, np.empty((4, 64), np.float32)[:, ::2])


def test_forms_without_a_function_are_known(kernel: UnpackKernel) -> None:
    assert all(map(kernel.handles, ("Q4_0", "Q4_1", "Q8_0", "F32", "F16", "BF16")))
    assert not any(map(kernel.handles, ("Q4_K", "U32", "F64", "")))


def test_without_a_compiler_there_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_unpack_kernel(tmp_path / "unpack") is None
