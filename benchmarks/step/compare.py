"""Compares layouts of one decode step on the same weights, interleaved in one process: ms per step, and tokens/s.

`python -m benchmarks.step.compare MODEL [--threads 1] [--rows 1,4,8,16,32] [--context 100,1000,mixed] [--out FOLDER]`

Layouts: `on host` is what the engine does on a CPU with compiled code between products, `pooled` without that;
`row by row` packs products but attends each row alone; `library` also uses the library's own softmax, sigmoid and rope;
`padded` is mlx-lm's model over left-padded batch caches, with the normalisation and argmax of its BatchGenerator;
`tiles 8` and `tiles 16` are `pooled` with exact rows.
Wall time is what a quiet machine should report; the processor time of one BLAS thread holds on a busy one too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import Composition
from engine.contracts.graph import PackedSegment
from engine.contracts.options import ResolvedOptions
from engine.runtime.prepare import WeightsFacts, prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LAYOUTS = ("on host", "pooled", "row by row", "library", "padded", "tiles 8", "tiles 16")
COLOURS = ("#0b3d6e", "#1f5fa8", "#6da7de", "#9a9a9a", "#c8553d", "#3f8f5f", "#8fc6a3")
Step = "Callable[[], None]"


class SharedReader:
    """Reads each product once and hands it to every graph."""

    def __init__(self, reader) -> None:
        self._reader = reader
        self._made: dict[tuple, object] = {}
        self.tile: int | None = None

    resident_bytes = 0
    adapter_sites = None

    def _once(self, *call):
        if call not in self._made:
            self._made[call] = getattr(self._reader, call[0])(*call[1:])
        return self._made[call]

    def _tiled(self, product):
        from engine.ops.linear import TiledLinear

        return product if self.tile is None else TiledLinear(product, self.tile)

    def linear(self, *modules):
        return self._tiled(self._once("linear", *modules))

    def projection(self, *modules):
        return self.linear(*modules)

    def tied_head(self, table):
        return self._tiled(self._once("tied_head", table))

    def embedding(self, module):
        return self._once("embedding", module)

    def vector(self, name):
        return self._once("vector", name)


def greedy() -> ResolvedOptions:
    return ResolvedOptions(
        max_tokens=100,
        eos_token_ids=(),
        stop_sequences=(),
        prefill_chunk_size=64,
        temperature=0.0,
        top_p=0.0,
        top_k=0,
        min_p=0.0,
        min_tokens_to_keep=1,
        seed=0,
        seed_was_explicit=True,
    )


def packed_step(graph, composition: Composition, contexts: Sequence[int], *, pooled: bool):
    """A step of our graph over rows that hold `contexts` tokens of random keys and values."""
    import mlx.core as mx

    from engine.sampling.recipe import Draw, Recipe
    from engine.sampling.sampler import sample
    from engine.state.build import CacheBuilder
    from engine.state.kv_cache import KvCache
    from engine.state.plain_codec import PlainCodec

    geometry, builder = graph.geometry, CacheBuilder(graph.geometry, composition)
    composed = composition.composes_exponentials
    rows = []
    for held in contexts:
        caches = (
            builder.make_caches()
            if pooled
            else [KvCache(PlainCodec(composed=composed)) for _ in range(geometry.layers)]
        )
        cache: Any
        for cache in caches:
            keys = mx.random.normal((1, geometry.kv_heads, held, geometry.head_dim))
            cache.attend(mx.zeros((1, geometry.heads, held, geometry.head_dim)), keys, keys, scale=1.0)
            mx.eval(cache.arrays())
        rows.append(caches)
    tokens = mx.array([[5] * len(rows)], dtype=mx.uint32)
    draws = [Draw(Recipe(greedy()), 1)] * len(rows)

    def step() -> None:
        segments = [PackedSegment(1, caches) for caches in rows]
        sampled = sample(graph.project(graph.hidden(tokens, segments))[0], draws, composed=composed)
        mx.eval(sampled.arrays(), [cache.arrays() for caches in rows for cache in caches])
        sampled.read()  # rows grow by a token each time: taking it back would be part of the next step

    return step


def padded_model(artifact):
    """mlx-lm's model with the same float32 weights."""
    import mlx.core as mx
    from mlx_lm.models import llama

    from engine.artifacts.weights import WeightStore, dense

    config = artifact.config
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            vocab_size=config.vocab_size,
            rope_theta=config.layer_ropes[0].theta,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    store = WeightStore(artifact)
    model.load_weights([(name, dense(store.take(name))) for name in artifact.tensors])
    mx.eval(model.parameters())
    return model


def padded_step(model, contexts: Sequence[int]):
    """A step of mlx-lm's model over one left-padded batch."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache

    longest, arguments = max(contexts), model.args
    caches = [BatchKVCache([longest - held for held in contexts]) for _ in model.layers]
    for cache in caches:
        keys = mx.random.normal((len(contexts), arguments.num_key_value_heads, longest, arguments.head_dim))
        cache.update_and_fetch(keys, keys)
        mx.eval(cache.keys, cache.values)
    tokens = mx.full((len(contexts), 1), 5, dtype=mx.uint32)

    def step() -> None:
        logits = model(tokens, cache=caches)[:, -1]
        mx.eval(mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1))
        for cache in caches:
            cache.trim(1)

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    """Take each layout in turn, `rounds` times after one for warmth."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            began, busy = time.perf_counter(), time.process_time()
            step()
            if turn:
                wall[name].append(1000 * (time.perf_counter() - began))
                processor[name].append(1000 * (time.process_time() - busy))
    return {
        name: {
            "wall_ms_least": round(min(wall[name]), 1),
            "wall_ms_median": round(statistics.median(wall[name]), 1),
            "processor_ms_median": round(statistics.median(processor[name]), 1),
        }
        for name in steps
    }


def run(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        runtime = prepare_runtime(RuntimeSettings(cache_directory=Path(scratch), blas_threads=arguments.threads))

        from engine.artifacts.weights import WeightStore
        from engine.models.decoder import DecoderGraph
        from engine.models.reading import WeightReader

        artifact = open_artifact(arguments.model)
        layout = runtime.layout(WeightsFacts(parameters=artifact.parameters, stored_dtype="float32", quantized=True))
        reader = SharedReader(WeightReader(WeightStore(artifact), layout))
        compositions = {
            "on host": Composition(host_kernels=True),
            "pooled": Composition(),
            "row by row": Composition(),
            "library": Composition(library_arithmetic=True),
            "tiles 8": Composition(row_tile_tokens=8),
            "tiles 16": Composition(row_tile_tokens=16),
        }
        graphs = {}
        for name, composition in compositions.items():
            reader.tile = composition.row_tile_tokens
            graphs[name] = DecoderGraph(artifact.config, reader, composition)
        peer = padded_model(artifact)
        cases = []
        for context in arguments.context:
            for rows in arguments.rows:
                contexts = lengths(context, rows)
                steps = {
                    name: packed_step(graphs[name], compositions[name], contexts, pooled=name != "row by row")
                    for name in compositions
                }
                steps["padded"] = padded_step(peer, contexts)
                layouts = measure({name: steps[name] for name in LAYOUTS}, arguments.rounds)
                cases.append({"rows": rows, "context": context, "layouts": layouts})
                print(line(cases[-1]), flush=True)
        return {"blas": runtime.info.blas, "threads": arguments.threads, "rounds": arguments.rounds, "cases": cases}


def lengths(context: str, rows: int) -> list[int]:
    """Tokens that each row holds; "mixed" makes every fourth one long."""
    if context == "mixed":
        return [900 if row % 4 == 0 else 100 for row in range(rows)]
    return [int(context)] * rows


def line(case) -> str:
    median = {name: case["layouts"][name]["processor_ms_median"] for name in LAYOUTS}
    cells = " | ".join(f"{median[name]:.0f} ({median['padded'] / median[name]:.2f})" for name in LAYOUTS)
    return f"| {case['context']} | {case['rows']} | {cells} |"


def table(result) -> str:
    head = "| context | rows | " + " | ".join(LAYOUTS) + " |\n|" + "---|" * (len(LAYOUTS) + 2)
    return "\n".join([head, *map(line, result["cases"])])


def speeds(case) -> list[float]:
    """Of each layout, relative to `padded`."""
    median = {name: case["layouts"][name]["processor_ms_median"] for name in LAYOUTS}
    return [median["padded"] / median[name] for name in LAYOUTS]


def chart(result) -> str:
    """Bars of speed relative to `padded`, one group for each case."""
    bar, height, top, left = 12, 200, 40, 40
    group = bar * len(LAYOUTS) + 16
    rows = [speeds(case) for case in result["cases"]]
    scale, width = height / max(map(max, rows)), left + group * len(rows)
    floor = top + height
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{floor + 40}"'
            ' font-family="sans-serif" font-size="10">'
        )
    ]
    for index, name in enumerate(LAYOUTS):
        x = left + index * 90
        parts.append(rectangle(x, 8, 10, 10, COLOURS[index]) + label(x + 14, 17, name))
    for place, (case, row) in enumerate(zip(result["cases"], rows, strict=True)):
        x = left + place * group
        for index, speed in enumerate(row):
            tall = speed * scale
            parts.append(rectangle(x + index * bar, floor - tall, bar - 1, tall, COLOURS[index]))
        parts.append(label(x, floor + 14, f"{case['rows']} rows") + label(x, floor + 27, case["context"]))
    even = floor - scale
    parts.append(f'<line x1="36" x2="{width}" y1="{even:.1f}" y2="{even:.1f}" stroke="#444" stroke-dasharray="3"/>')
    return "\n".join([*parts, label(4, even, "1 x"), "</svg>"])


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y:.1f}" width="{width}" height="{height:.1f}" fill="{fill}"/>'


def label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:.1f}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 16, 32])
    parser.add_argument("--context", type=lambda text: text.split(","), default=["100", "1000", "mixed"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="for step.json, step.svg")
    arguments = parser.parse_args()
    result = run(arguments)
    print("\n" + table(result))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "step.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "step.svg").write_text(chart(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
