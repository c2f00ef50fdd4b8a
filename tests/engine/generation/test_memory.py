"""Predicted bytes against what real caches hold, and the budget's arithmetic."""

from dataclasses import replace

import mlx.core as mx
import pytest

from engine.contracts.composition import COMPOSITION_DEFAULTS, Composition
from engine.contracts.graph import GraphGeometry
from engine.contracts.kv_scheme import AffineKv, AffineLayer, AffineLayersKv, TurboKv
from engine.generation.memory import row_bytes, usable_bytes, workspace_bytes
from engine.ops.attention import causal_attention
from engine.sampling.sampler import sample
from engine.state.build import CacheBuilder
from tests.engine.sampling.resolved import draw


def geometry(head_dim=16, window=0):
    return GraphGeometry(
        vocab_size=10,
        hidden_size=8,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        context_length=4096,
        layer_types=("sliding_attention" if window else "full_attention",) * 3,
        sliding_window=window,
    )


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("window", [0, 8, 240])
def test_the_prediction_equals_what_the_caches_hold(tokens, dtype, window):
    caches = CacheBuilder(geometry(window=window), COMPOSITION_DEFAULTS).make_caches()
    for cache in caches:
        keys = mx.zeros((1, 2, tokens, 16), dtype=dtype)
        cache.attend(mx.zeros((1, 4, tokens, 16), dtype=dtype), keys, keys, scale=1.0)
    assert sum(cache.nbytes for cache in caches) == row_bytes(geometry(window=window), tokens, dtype.size)


@pytest.mark.parametrize("chunks", [[1], [200], [200, 400], [300, 1, 1], [64] * 12])
@pytest.mark.parametrize("window", [0, 240])
@pytest.mark.parametrize(
    "kv",
    [
        AffineKv(bits=4, group_size=32),
        AffineKv(bits=8, start=300),
        TurboKv(key_bits=4, value_bits=4),
        AffineLayersKv(layers=(AffineLayer(layer=1, bits=4, group_size=64),)),
    ],
)
def test_quantized_rows_never_hold_more_than_was_predicted(chunks, window, kv):
    sizes, tokens = geometry(head_dim=64, window=window), sum(chunks)
    caches = CacheBuilder(sizes, Composition(kv=kv)).make_caches()
    predicted = row_bytes(sizes, tokens, 4, kv=kv, chunk_tokens=max(chunks))
    for chunk in chunks:
        for cache in caches:
            cache.maintain()
            keys = mx.zeros((1, 2, chunk, 64))
            cache.attend(mx.zeros((1, 4, chunk, 64)), keys, keys, scale=1.0)
        assert sum(cache.nbytes for cache in caches) <= predicted
    for cache in caches:
        cache.maintain()
    held = sum(cache.nbytes for cache in caches)
    if tokens >= kv.start:
        assert held == row_bytes(sizes, tokens, 4, kv=replace(kv, start=0))
    assert predicted <= row_bytes(sizes, tokens, 4)


METAL = Composition(device="metal", compute_dtype="bfloat16")


LOGITS = 32 * 10 * 14 * 4  # rows, tokens of the vocabulary, arrays, bytes


def workspace(composition, *, context_tokens=4096, **sizes):
    return workspace_bytes(geometry(**sizes), composition, step_tokens=64, context_tokens=context_tokens)


def test_the_workspace_of_a_gpu_counts_scores_only_where_no_fused_kernel_serves():
    activations = 64 * 67 * 8 * 2 + LOGITS
    assert workspace(METAL, head_dim=64) == activations
    assert workspace(METAL, head_dim=256) == activations + 4 * 64 * 4096 * 2


def test_the_workspace_of_a_cpu_counts_the_scores_that_its_attention_writes_down():
    token, scores = 67 * 8 * 4, 4 * 64 * 4096 * 4
    assert workspace(Composition()) == 64 * token + 2 * scores + LOGITS
    assert workspace(Composition(library_arithmetic=True)) == 64 * token + scores + LOGITS
    assert workspace(Composition(), window=200) == 64 * token + 2 * 4 * 64 * 264 * 4 + LOGITS
    assert workspace(Composition(), context_tokens=10) == 64 * token + 2 * 4 * 64 * 10 * 4 + LOGITS


@pytest.mark.parametrize("composed", [True, False])
def test_attention_peaks_within_the_scores_that_are_counted(composed):
    composition = Composition(library_arithmetic=not composed)
    sizes = geometry(head_dim=64)
    queries, keys = mx.random.normal((1, 4, 256, 64)), mx.random.normal((1, 2, 4096, 64))
    mx.eval(queries, keys)
    counted = workspace_bytes(sizes, composition, step_tokens=256, context_tokens=4096)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(causal_attention(queries, keys, keys, scale=0.1, composed=composed))
    assert 0.8 * counted < mx.get_peak_memory() - before < 1.2 * counted


def test_a_quarter_of_the_memory_is_left_to_others():
    assert usable_bytes(10**9) == 750_000_000


def test_layers_of_unlike_sizes_count_each_for_itself():
    unlike = replace(geometry(), layer_key_values=(32, 0, 128))
    assert row_bytes(unlike, 256, 4) == 256 * 2 * (32 + 128) * 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 20},
        {"temperature": 0.8, "xtc_probability": 1.0},
        {"curve": ((0.0, 0.0), (100.0, 100.0))},
    ],
)
def test_choosing_tokens_peaks_within_the_logits_that_are_counted(options):
    rows, vocabulary = 4, 20_000
    logits = mx.random.normal((rows, vocabulary))
    draws = [draw(step, history=(1, 2), **options) for step in range(rows)]
    mx.eval(logits)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory() - logits.nbytes
    first = sample(logits, draws, composed=True)
    mx.eval(first.arrays())
    sample(logits, draws, composed=True).read()
    assert mx.get_peak_memory() - before <= rows * vocabulary * 14 * 4
    first.read()
