"""What each form of keys and values costs: a decode step relative to plain rows, and the bytes that rows hold.

`python -m benchmarks.state.schemes MODEL [--threads 1] [--rows 1,4,16] [--context 100,1000] [--out FILE]`

All forms take turns in one process over the same weights; ratios are medians of processor time, which hold on a busy
machine with one BLAS thread. `sharing` is what 16 rows hold that begin with the same 2,000 tokens and have generated 32
of their own, relative to one such row, as the allocator counts it.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.step.compare import SharedReader, greedy, lengths, measure
from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import Composition
from engine.contracts.graph import PackedSegment
from engine.generation.bindings.kv_storage import resolve_kv_storage
from engine.runtime.prepare import WeightsFacts, prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMS = ("plain", "paged", "affine8", "affine4", "turbo-k8v4", "turbo-k4v4")
SHARED_TOKENS, SHARING_ROWS, OWN_TOKENS = 2000, 16, 32


def composition(form: str) -> Composition:
    kv, paged_kv = resolve_kv_storage(form, lambda: None)
    return Composition(kv=kv, paged_kv=paged_kv)


def fill(caches, geometry, held: int) -> None:
    """Append `held` random tokens, in chunks as wide as a prompt's."""
    import mlx.core as mx

    for start in range(0, held, 64):
        width = min(64, held - start)
        for cache in caches:
            cache.maintain()
            keys = mx.random.normal((1, geometry.kv_heads, width, geometry.head_dim))
            mx.eval(cache.attend(mx.zeros((1, geometry.heads, width, geometry.head_dim)), keys, keys, scale=1.0))
            mx.eval(cache.arrays())
    for cache in caches:
        cache.maintain()


def decode_step(graph, form: str, contexts: Sequence[int]):
    """One decode step of rows that hold `contexts` tokens, and the bytes that those rows hold."""
    import mlx.core as mx

    from engine.sampling.recipe import Draw, Recipe
    from engine.sampling.sampler import sample
    from engine.state.build import CacheBuilder

    builder = CacheBuilder(graph.geometry, composition(form))
    rows = [builder.make_caches() for _ in contexts]
    for caches, held in zip(rows, contexts, strict=True):
        fill(caches, graph.geometry, held)
    tokens = mx.array([[5] * len(rows)], dtype=mx.uint32)
    draws = [Draw(Recipe(greedy()), 1)] * len(rows)

    def step() -> None:
        segments = [PackedSegment(1, caches) for caches in rows]
        sampled = sample(graph.project(graph.hidden(tokens, segments))[0], draws, composed=True)
        mx.eval(sampled.arrays(), [cache.arrays() for caches in rows for cache in caches])
        sampled.read()
        for caches in rows:
            for cache in caches:
                cache.trim(1)

    return step, sum(cache.nbytes for caches in rows for cache in caches)


def sharing(graph) -> float:
    """Bytes of rows that share a prefix, relative to one of them."""
    import mlx.core as mx

    from engine.state.build import CacheBuilder

    gc.collect()
    before = mx.get_active_memory()
    builder = CacheBuilder(graph.geometry, composition("paged"))
    donor = builder.make_caches()
    fill(donor, graph.geometry, SHARED_TOKENS)
    snapshots = [cache.snapshot() for cache in donor]
    fill(donor, graph.geometry, OWN_TOKENS)
    one_row = mx.get_active_memory() - before
    rows = [donor]
    for _ in range(SHARING_ROWS - 1):
        rows.append(builder.restore(snapshots, SHARED_TOKENS))
        fill(rows[-1], graph.geometry, OWN_TOKENS)
    return (mx.get_active_memory() - before) / one_row


def run(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        runtime = prepare_runtime(RuntimeSettings(cache_directory=Path(scratch), blas_threads=arguments.threads))

        from engine.artifacts.weights import WeightStore
        from engine.models.decoder import DecoderGraph
        from engine.models.reading import WeightReader

        artifact = open_artifact(arguments.model)
        layout = runtime.layout(WeightsFacts(parameters=artifact.parameters, stored_dtype="float32", quantized=True))
        reader = SharedReader(WeightReader(WeightStore(artifact), layout))
        graph = DecoderGraph(artifact.config, reader, Composition())
        cases = []
        for context in arguments.context:
            for rows in arguments.rows:
                made = {form: decode_step(graph, form, lengths(context, rows)) for form in arguments.forms}
                times = measure({form: step for form, (step, _) in made.items()}, arguments.rounds)
                cases.append(
                    {
                        "rows": rows,
                        "context": context,
                        "plain_ms": times["plain"]["processor_ms_median"],
                        "time": {form: ratio(times, form) for form in arguments.forms},
                        "bytes": {form: round(held / made["plain"][1], 3) for form, (_, held) in made.items()},
                    }
                )
                print(line(cases[-1], "time"), flush=True)
        shared = round(sharing(graph), 3)
        print(f"{SHARING_ROWS} rows with {SHARED_TOKENS} tokens in common hold {shared} of one row's bytes")
        return {"blas": runtime.info.blas, "threads": arguments.threads, "cases": cases, "sharing": shared}


def ratio(times: dict[str, dict[str, float]], form: str) -> float:
    return round(times[form]["processor_ms_median"] / times["plain"]["processor_ms_median"], 2)


def line(case, kind: str) -> str:
    cells = " | ".join(f"{ratio:.2f}" for ratio in case[kind].values())
    return f"| {case['context']} | {case['rows']} | {case['plain_ms']:.0f} | {cells} |"


def table(result, kind: str) -> str:
    forms = result["cases"][0][kind]
    head = f"| context | rows | plain ms | {' | '.join(forms)} |\n|" + "---|" * (len(forms) + 3)
    return "\n".join([head, *(line(case, kind) for case in result["cases"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--context", type=lambda text: text.split(","), default=["100", "1000"])
    parser.add_argument("--forms", type=lambda text: text.split(","), default=list(FORMS), help="plain is among them")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run(arguments)
    for kind in ("time", "bytes"):
        print(f"\n{kind} relative to plain\n\n{table(result, kind)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
