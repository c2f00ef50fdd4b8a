"""A row's logits are the same bits whoever shares its steps: up to 32 rows, prompts too, with fixed row tiles; without
them as far as products keep their rounding, where compiled code attends.
"""

import mlx.core as mx
import numpy as np
import pytest

from engine.contracts.graph import PackedSegment
from engine.runtime.blas_shim import LoadedShim
from engine.runtime.host_kernels import HostKernels
from tests.engine.models import tiny_llama

WIDE = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 600}
LENGTHS = (1, 5, 1, 9, 1, 3)


class Company:
    """Rows that step together; the first one is watched."""

    def __init__(self, binding, rows):
        self.binding = binding
        self.caches = [binding.make_cache() for _ in range(rows)]
        self.random = np.random.default_rng(rows)

    def step(self, watched, place):
        """One step with the watched row at `place`; returns the logits of its tokens."""
        others = [
            [int(token) for token in self.random.integers(0, 97, size=self.random.choice([1, 1, 2, 7]))]
            for _ in self.caches[1:]
        ]
        parts = [*others[:place], watched, *others[place:]]
        caches = [*self.caches[1 : place + 1], self.caches[0], *self.caches[place + 1 :]]
        segments = [PackedSegment(len(part), cache) for part, cache in zip(parts, caches, strict=True)]
        hidden = self.binding.hidden(mx.array([[token for part in parts for token in part]], dtype=mx.uint32), segments)
        start = sum(len(part) for part in parts[:place])
        return self.binding.project(hidden)[0, start : start + len(watched)]


def watched_logits(binding, rows):
    company, tokens = Company(binding, rows), tiny_llama.random_prompt(9, sum(LENGTHS))
    found, start = [], 0
    for length in LENGTHS:
        found.append(company.step(tokens[start : start + length], place=(start * 7) % rows))
        start += length
    return mx.concatenate(found, axis=0)


@pytest.mark.parametrize("tile", [1, 4, 8, 16])
def test_logits_are_the_same_bits_in_any_company(tmp_path, tile):
    tiny_llama.write(tmp_path, **WIDE)
    binding = tiny_llama.bind(tmp_path, row_tile_tokens=tile)
    alone = watched_logits(binding, 1)
    for rows in (2, 3, 4, 5, 8, 13, 16, 17, 32):
        assert mx.array_equal(watched_logits(binding, rows), alone).item(), rows


def test_tiles_change_the_rounding_alone(tmp_path):
    oracle = tiny_llama.write(tmp_path)
    binding = tiny_llama.bind(tmp_path, row_tile_tokens=8)
    prompt = tiny_llama.random_prompt(9, sum(LENGTHS))
    caches = binding.make_cache()
    tokens = mx.array([prompt], dtype=mx.uint32)
    found = binding.project(binding.hidden(tokens, [PackedSegment(len(prompt), caches)]))[0]
    assert found.shape == (len(prompt), tiny_llama.VOCAB)
    assert mx.abs(found - oracle.logits(prompt)).max().item() < 5e-6


def decoded_logits(binding, rows):
    """Logits of the first of `rows` rows of unlike lengths over a few steps of single tokens."""
    caches = [binding.make_cache() for _ in range(rows)]
    tokens = tiny_llama.random_prompt(9, 6)
    for number, row in enumerate(caches):  # each reads its prompt alone
        prompt = tiny_llama.random_prompt(number, 4 + 3 * number % 11)
        mx.eval(binding.hidden(mx.array([prompt], dtype=mx.uint32), [PackedSegment(len(prompt), row)]))
    found = []
    for token in tokens:
        step = mx.array([[token, *range(rows - 1)]], dtype=mx.uint32)
        hidden = binding.hidden(step, [PackedSegment(1, row) for row in caches])
        found.append(binding.project(hidden[:, :1])[0])
    return mx.concatenate(found, axis=0)


def test_decoding_rows_have_the_same_bits_in_any_company_where_compiled_code_attends(tmp_path):
    """Their keys and values lie in slabs of four, in which rows are of unlike lengths."""
    shim = LoadedShim.of_this_process()
    if shim is None or HostKernels.of_this_process() is None:
        pytest.skip("there are no compiled kernels for this processor, or no C compiler")
    tiny_llama.write(tmp_path, **WIDE)
    binding = tiny_llama.bind(tmp_path, host_kernels=True)
    alone = decoded_logits(binding, 1)
    for rows in range(2, shim.few_rows + 1):
        assert mx.array_equal(decoded_logits(binding, rows), alone).item(), rows
