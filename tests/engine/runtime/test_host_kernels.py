"""The compiled attention and gates against numpy in float64, and the promise that nobody's bits depend on company."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runtime import blas_shim
from engine.runtime.compiled import CannotCompileError, compile_library
from engine.runtime.host_kernels import LARGEST_HEAD, STRETCH, AttentionSizes, HostKernels

SOURCE = b"\n".join(Path(blas_shim.__file__).with_name(name).read_bytes() for name in blas_shim.SOURCES)
CAPACITY = 700

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("host") / "shim.so"
    try:
        compile_library(SOURCE, path)
    except CannotCompileError as error:
        pytest.skip(str(error))
    return ctypes.CDLL(str(path))


@pytest.fixture(params=[8, 16], ids=["AVX2", "AVX-512"])
def kernels(library: ctypes.CDLL, request: pytest.FixtureRequest) -> HostKernels:
    made = HostKernels.of(library, threads=1, most_lanes=request.param)
    if made is None or (request.param == 16 and made.can_attend(8)):
        pytest.skip("this processor has no such instructions")
    return made


def random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@dataclass
class Rows:
    """Rows with states of their own; `steps` are lists of (row, tokens)."""

    kernels: HostKernels
    sizes: AttentionSizes
    count: int

    def __post_init__(self) -> None:
        self.states = np.zeros((self.count, 2 * self.sizes.kv_heads, CAPACITY, self.sizes.size), np.float32)
        self.held = [0] * self.count

    def step(self, parts: list[tuple[int, Array, Array]]) -> list[Array]:
        """Each part is a row, its queries [L, H·D] and its keys and values [L, 2·Hkv·D]; the results of each."""
        lengths = [len(queries) for _, queries, _ in parts]
        starts = np.cumsum([0, *lengths])
        stretches = np.zeros(len(parts), STRETCH)
        for stretch, (row, queries, _), start in zip(stretches, parts, starts, strict=False):
            stretch["state"] = self.states[row].ctypes.data
            stretch["capacity"], stretch["start"] = CAPACITY, start
            stretch["length"], stretch["offset"] = len(queries), self.held[row]
            self.held[row] += len(queries)
        apart = np.concatenate([np.hstack([queries, joined]) for _, queries, joined in parts])
        width = self.sizes.heads * self.sizes.size
        mixed = self.kernels.attend(stretches, apart[:, :width], apart[:, width:], self.sizes)
        return [mixed[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def sizes_of(heads: int, kv_heads: int, size: int) -> AttentionSizes:
    return AttentionSizes(heads=heads, kv_heads=kv_heads, size=size, factor=float(np.log2(np.e) * size**-0.5))


def tokens(sizes: AttentionSizes, seed: int, count: int) -> tuple[Array, Array]:
    return random(seed, count, sizes.heads * sizes.size), random(seed + 1, count, 2 * sizes.kv_heads * sizes.size)


def naive(sizes: AttentionSizes, queries: Array, joined: Array) -> Array:
    """Attention of the last queries to all that was ever joined."""
    keys, values = (
        part.reshape(len(joined), sizes.kv_heads, sizes.size).astype(np.float64) for part in np.split(joined, 2, axis=1)
    )
    heads = queries.reshape(len(queries), sizes.heads, sizes.size).astype(np.float64)
    out = np.zeros_like(heads)
    for index, token in enumerate(heads):
        held = len(joined) - len(queries) + index + 1
        for head, query in enumerate(token):
            own = head * sizes.kv_heads // sizes.heads
            scores = keys[:held, own] @ query * sizes.size**-0.5
            weights = np.exp(scores - scores.max())
            out[index, head] = weights / weights.sum() @ values[:held, own]
    return out.reshape(queries.shape)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 16), (2, 1, 256), (6, 2, 80), (7, 1, 32)])
def test_attention_equals_the_naive_loop(kernels: HostKernels, heads: int, kv_heads: int, size: int) -> None:
    sizes = sizes_of(heads, kv_heads, size)
    rows = Rows(kernels, sizes, 3)
    past: list[list[tuple[Array, Array]]] = [[] for _ in range(rows.count)]
    for number, lengths in enumerate(((5, 1, 255), (1, 30, 1), (60, 1, 1), (1, 1, 300))):
        parts = []
        for row in (1, 2, 0):
            queries, joined = tokens(sizes, 100 * number + 10 * row, lengths[row])
            past[row].append((queries, joined))
            parts.append((row, queries, joined))
        for (row, queries, _), found in zip(parts, rows.step(parts), strict=True):
            wanted = naive(sizes, queries, np.concatenate([joined for _, joined in past[row]]))
            np.testing.assert_allclose(found, wanted, atol=3e-6)
    for row, state in enumerate(rows.states):
        joined = np.concatenate([joined for _, joined in past[row]]).reshape(-1, 2 * kv_heads, size)
        assert (state[:, : len(joined)] == joined.swapaxes(0, 1)).all()
        assert not state[:, len(joined) :].any(), "nothing is written past a row's tokens"


def test_a_row_has_the_same_bits_alone_and_in_company_and_however_its_prompt_is_cut(kernels: HostKernels) -> None:
    sizes = sizes_of(9, 3, 64)
    queries, joined = tokens(sizes, 1, 290)
    (at_once,) = Rows(kernels, sizes, 1).step([(0, queries, joined)])
    for cut in ((1, 17, 270), (250, 20, 19), (289, 1)):
        rows, found, start = Rows(kernels, sizes, 5), [], 0
        for length in (*cut, 290 - sum(cut)):
            company = [(row, *tokens(sizes, 7 * row, 1 + row)) for row in (1, 2, 3, 4)]
            own = (0, queries[start : start + length], joined[start : start + length])
            start += length
            if length:
                found.append(rows.step([*company[:2], own, *company[2:]])[2])
        assert np.concatenate(found).tobytes() == at_once.tobytes()


def test_bits_do_not_depend_on_the_number_of_threads(library: ctypes.CDLL) -> None:
    found = []
    for threads in (1, 3):
        kernels = HostKernels.of(library, threads=threads)
        if kernels is None:
            pytest.skip("this processor has no such instructions")
        sizes = sizes_of(9, 3, 64)
        parts = [(row, *tokens(sizes, row, length)) for row, length in enumerate((1, 90, 1, 33))]
        found.append(b"".join(mixed.tobytes() for mixed in Rows(kernels, sizes, 4).step(parts)))
        found[-1] += kernels.swiglu(random(1, 40, 1536), random(2, 40, 1536)).tobytes()
    assert found[0] == found[1]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_stays_within_its_row_and_is_seen_there(kernels: HostKernels, poison: float) -> None:
    sizes = sizes_of(4, 2, 32)
    sound, ill = tokens(sizes, 1, 20), tokens(sizes, 3, 20)
    (wanted,) = Rows(kernels, sizes, 1).step([(0, *sound)])
    for part, number in ((0, 3), (1, sizes.kv_heads * sizes.size + 3)):  # in a query, and in a value
        poisoned = [numbers.copy() for numbers in ill]
        poisoned[part][7, number] = poison
        found = Rows(kernels, sizes, 2).step([(0, *sound), (1, poisoned[0], poisoned[1])])
        assert found[0].tobytes() == wanted.tobytes()
        assert not np.isfinite(found[1][7]).all()


def test_keys_that_were_kept_before_are_attended_to_again(kernels: HostKernels) -> None:
    sizes = sizes_of(4, 2, 32)
    rows, (queries, joined) = Rows(kernels, sizes, 1), tokens(sizes, 1, 9)
    (first,) = rows.step([(0, queries, joined)])
    stretches = np.array([(rows.states.ctypes.data, CAPACITY, 0, 9, 0)], STRETCH)
    assert kernels.attend(stretches, queries, None, sizes).tobytes() == first.tobytes()


def test_heads_of_odd_sizes_are_declined(kernels: HostKernels) -> None:
    assert kernels.can_attend(64)
    assert not kernels.can_attend(20)
    assert not kernels.can_attend(2 * LARGEST_HEAD)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 7), (2, 16), (5, 1536), (300, 45)])
def test_gates_equal_numpy(kernels: HostKernels, count: int, size: int) -> None:
    both = random(5, count, 2 * size + 3) * 6
    gate, up = both[:, :size], both[:, size : 2 * size]
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(kernels.swiglu(gate, up), wide / (1 + np.exp(-wide)) * up, rtol=2e-6, atol=1e-30)


def test_gates_have_their_limits_and_keep_what_is_not_a_number(kernels: HostKernels) -> None:
    gate = np.array([[0.0, -0.0, 1e30, -1e30, 200.0, -200.0, 88.0, -88.0, np.nan, np.inf, 1.0]], np.float32)
    found = kernels.swiglu(gate, np.ones_like(gate))[0]
    np.testing.assert_allclose(found[:8], [0, 0, 1e30, 0, 200, 0, 88, 0], rtol=1e-6, atol=1e-30)
    assert np.isnan(found[8])
    assert found[9] == np.inf
    assert np.isnan(kernels.swiglu(np.ones((1, 3), np.float32), np.full((1, 3), np.nan, np.float32))).all()
