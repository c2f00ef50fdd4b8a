"""Chunk widths: fixed where nothing bounds them, halved by the attention workspace where the graph asks for it."""

import pytest

from engine.contracts.graph import GraphDeclaration, GraphGeometry, PrefillCapability
from engine.generation.bindings.prefill_policy import resolve_mlx_prefill_policy, sdpa_fallback_bytes


class FakeGraph:
    def __init__(self, *, bounded, head_dim=256, layer_types=("full_attention",), window=0):
        self.graph_capabilities = GraphDeclaration(prefill=PrefillCapability(bounded_workspace=bounded))
        self.geometry = GraphGeometry(
            vocab_size=10,
            hidden_size=8,
            layers=len(layer_types),
            heads=16,
            kv_heads=4,
            head_dim=head_dim,
            context_length=131072,
            layer_types=layer_types,
            sliding_window=window,
        )


def test_an_explicit_chunk_is_exact_and_at_least_one():
    for asked, used in [(1, 1), (37, 37), (100_000, 100_000), (0, 1), (-5, 1)]:
        assert resolve_mlx_prefill_policy(FakeGraph(bounded=True), asked).chunk_size(50_000) == used


def test_a_graph_without_a_bound_takes_the_default_chunk():
    assert resolve_mlx_prefill_policy(FakeGraph(bounded=False)).chunk_size(1_000_000) == 2048


@pytest.mark.parametrize(("prompt", "chunk"), [(100, 2048), (16_384, 2048), (16_385, 1024), (65_536, 512), (10**9, 8)])
def test_the_chunk_halves_until_the_score_workspace_fits(prompt, chunk):
    assert resolve_mlx_prefill_policy(FakeGraph(bounded=True)).chunk_size(prompt) == chunk


def test_fused_head_sizes_need_no_workspace():
    for head_dim in (64, 72, 80, 96, 128):
        assert sdpa_fallback_bytes(FakeGraph(bounded=True, head_dim=head_dim).geometry, 2048, 100_000) == 0


def test_sliding_layers_count_their_window_only_and_the_widest_layer_decides():
    sliding = FakeGraph(bounded=True, layer_types=("sliding_attention",), window=512).geometry
    mixed = FakeGraph(bounded=True, layer_types=("sliding_attention", "full_attention"), window=512).geometry
    assert sdpa_fallback_bytes(sliding, 1024, 50_000) == 16 * 1024 * 1536 * 2
    assert sdpa_fallback_bytes(mixed, 1024, 50_000) == 16 * 1024 * 50_000 * 2


def test_few_queries_need_no_workspace():
    assert sdpa_fallback_bytes(FakeGraph(bounded=True).geometry, 8, 100_000) == 0
    assert sdpa_fallback_bytes(FakeGraph(bounded=True).geometry, 100, 9) == 16 * 9 * 9 * 2
