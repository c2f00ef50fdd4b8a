"""What choosing tokens costs, as a share of a decode step. `python -m benchmarks.sampling MODEL [--out FOLDER]`.

Parts are timed apart and interleaved, in ms of processor time with one BLAS thread, which a busy machine disturbs
least. The share is that of the sampler in body + head + sampler. A vocabulary that the model does not have gets a head
of its size with random weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.sampling.measure import parts, timed
from benchmarks.sampling.plot import plot_of
from benchmarks.sampling.requests import SETS
from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import Composition
from engine.contracts.graph import PackedSegment
from engine.runtime.prepare import WeightsFacts, prepare_runtime
from engine.runtime.settings import RuntimeSettings

GOALS = {"all greedy": 0.05, "mixed": 0.15}
LARGE_VOCABULARY = 151_936
TEXT_TOKENS = 96


def measured(model: Path, rows: list[int], rounds: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as scratch:
        runtime = prepare_runtime(RuntimeSettings(cache_directory=Path(scratch), blas_threads=1))
        import mlx.core as mx

        from engine.artifacts.weights import WeightStore
        from engine.models.reading import WeightReader
        from engine.models.registry import build_graph
        from engine.state.build import CacheBuilder

        artifact, composition = open_artifact(model), Composition()
        layout = runtime.layout(WeightsFacts(parameters=artifact.parameters, stored_dtype="float32", quantized=True))
        graph = build_graph(artifact.config, WeightReader(WeightStore(artifact), layout), composition)
        width = graph.geometry.hidden_size
        large = mx.random.normal((LARGE_VOCABULARY, width)) * width**-0.5
        heads = {graph.geometry.vocab_size: graph.project, LARGE_VOCABULARY: lambda hidden: hidden @ large.T}
        text = mx.random.randint(0, graph.geometry.vocab_size, (1, TEXT_TOKENS), key=mx.random.key(3))
        caches = CacheBuilder(graph.geometry, composition).make_caches()
        logits = graph.project(graph.hidden(text.astype(mx.uint32), [PackedSegment(TEXT_TOKENS, caches)]))[0]
        logits = logits[-max(rows) :]
        mx.eval(logits, large)
        records = []
        for count in rows:
            found = timed(parts(graph, composition, heads, logits, count), rounds)
            for vocabulary in heads:
                rest = found["body"] + found[f"head {vocabulary}"]
                for name in SETS:
                    chosen = found[f"{name} {vocabulary}"]
                    records.append(
                        {
                            "vocabulary": vocabulary,
                            "rows": count,
                            "options": name,
                            "sampling_ms": round(chosen, 2),
                            "rest_ms": round(rest, 1),
                            "share": round(chosen / (chosen + rest), 4),
                        }
                    )
        return records


def table(records: list[dict]) -> str:
    head = ["| vocabulary | rows | options | sampling ms | rest of the step ms | share |", "|---|---|---|---|---|---|"]
    return "\n".join(
        head
        + [
            f"| {one['vocabulary']} | {one['rows']} | {one['options']} | {one['sampling_ms']} | {one['rest_ms']} "
            f"| {one['share']:.1%} |"
            for one in records
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to keep sampling.json and sampling.svg")
    arguments = parser.parse_args()
    records = measured(arguments.model, arguments.rows, arguments.rounds)
    print(table(records))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "sampling.json").write_text(json.dumps(records, indent=1) + "\n")
        (arguments.out / "sampling.svg").write_text(plot_of(records, GOALS))


if __name__ == "__main__":
    main()
