"""How a decode step's time divides: products, attention, and the rest. `python -m benchmarks.step.shares MODEL`.

Parts are timed apart, each over all layers, interleaved with the whole step; milliseconds of processor time on one BLAS
thread, which a busy machine disturbs least.
"""

# ruff: noqa: SLF001, C901
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.step.compare import packed_step
from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import Composition
from engine.runtime.prepare import WeightsFacts, prepare_runtime
from engine.runtime.settings import RuntimeSettings


def median_ms(parts, rounds):
    times = {name: [] for name in parts}
    for turn in range(rounds + 1):
        for name, part in parts.items():
            began = time.process_time()
            part()
            if turn:
                times[name].append(1000 * (time.process_time() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def parts_of(graph, composition, rows, held):
    import mlx.core as mx

    from engine.contracts.graph import PackedSegment
    from engine.models.parts import Step
    from engine.sampling.recipe import Draw, Recipe
    from engine.sampling.sampler import sample
    from engine.state.build import CacheBuilder

    from .compare import greedy

    geometry, layers = graph.geometry, graph._layers
    heads, kv_heads, dim = geometry.heads, geometry.kv_heads, geometry.head_dim
    normal = mx.random.normal
    x, wide = normal((1, rows, geometry.hidden_size)), normal((1, rows, graph._config.intermediate_size))
    mixed, logits = normal((1, rows, heads * dim)), normal((rows, geometry.vocab_size))
    gates, up = normal(wide.shape), normal(wide.shape)
    qkv = normal((rows, heads + 2 * kv_heads, 1, dim))
    builder = CacheBuilder(geometry, composition)
    caches: Any = [builder.make_caches() for _ in range(rows)]
    for row in caches:
        for cache in row:
            keys = normal((1, kv_heads, held, dim))
            cache.attend(mx.zeros((1, heads, held, dim)), keys, keys, scale=1.0)
    mx.eval(x, wide, mixed, gates, up, logits, qkv, [cache.arrays() for row in caches for cache in row])

    def step_of_rows():
        return Step([PackedSegment(1, row) for row in caches], scale=0.125, softcap=0.0, kernels=graph._kernels)

    def products():
        for layer in layers:
            mixer, feed_forward = layer._mixer, layer._feed_forward
            mx.eval(mixer._query_key_value(x), mixer._output(mixed), feed_forward._gate_up(x), feed_forward._down(wide))
        mx.eval(graph.project(x))

    def attention():
        step = step_of_rows().attention
        parts = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        mx.eval([step(*parts, layer=layer) for layer in range(geometry.layers)])

    def gated():
        mx.eval([layer._feed_forward._gated(gates, up) for layer in layers])

    def rotations():
        step = step_of_rows()
        mx.eval([step.rotation(layer._mixer._rope)(qkv[:, : heads + kv_heads]) for layer in layers])

    def norms():
        mx.eval([norm(x) for layer in layers for norm in (layer._mixer_norms[0], layer._feed_forward_norms[0])])

    def sampling():
        sample(logits, [Draw(Recipe(greedy()), 1)] * rows, composed=True).read()

    return {
        "step": packed_step(graph, composition, [held] * rows, pooled=True),
        "products": products,
        "attention": attention,
        "gates": gated,
        "rope": rotations,
        "norms": norms,
        "sampling": sampling,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 1000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runtime = prepare_runtime(RuntimeSettings(cache_directory=Path(scratch), blas_threads=arguments.threads))
        from engine.artifacts.weights import WeightStore
        from engine.models.reading import WeightReader
        from engine.models.registry import build_graph

        artifact, composition = open_artifact(arguments.model), Composition(host_kernels=True)
        layout = runtime.layout(WeightsFacts(parameters=artifact.parameters, stored_dtype="float32", quantized=True))
        graph = build_graph(artifact.config, WeightReader(WeightStore(artifact), layout), composition)
        for held in arguments.context:
            for rows in arguments.rows:
                found = median_ms(parts_of(graph, composition, rows, held), arguments.rounds)
                outside = 1 - found["products"] / found["step"]
                cells = " | ".join(f"{value:.1f}" for value in found.values())
                print(f"| {held} | {rows} | {cells} | {outside:.0%} |", flush=True)


if __name__ == "__main__":
    main()
