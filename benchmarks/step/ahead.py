"""Whether dispatching a step before the last is read pays: `python -m benchmarks.step.ahead MODEL [--threads 1]`.

The same rows take `STRIDE` steps that wait, then `STRIDE` that run ahead, in turns; the ratio of each pair of turns is
taken, so that drift of the machine cancels. Prints the median ratio (above 1: running ahead is faster) and quartiles.
"""

# ruff: noqa: C901
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.step.compare import greedy
from engine.artifacts.artifact import open_artifact
from engine.contracts.cancellation import AbortSignal
from engine.contracts.composition import Composition
from engine.runtime.prepare import WeightsFacts, prepare_runtime
from engine.runtime.settings import RuntimeSettings

STRIDE = 4


class Quiet:
    """Stands in for text, which costs the host a little in the product."""

    token_bytes, text, matched_stop = b"", "", None

    def push(self, _token):
        return self

    def finish(self):
        return ""


def rows_of(binding, count, prompt_tokens):
    import dataclasses

    from engine.generation.row import Row

    rows = []
    for index in range(count):
        row = Row(
            prompt=[(7 * index + 13 * place) % 40000 for place in range(prompt_tokens)],
            options=dataclasses.replace(greedy(), max_tokens=10_000),
            signal=AbortSignal(),
            text=Quiet(),
            tail_split=True,
            submitted_at=0.0,
            clock=time.perf_counter,
        )
        row.admit(binding.make_cache())
        rows.append(row)
    return rows


def commit(rows, drawn):
    for row, token in zip(rows, drawn, strict=True):
        if token is not None:
            row.commit(token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runtime = prepare_runtime(RuntimeSettings(cache_directory=Path(scratch), blas_threads=arguments.threads))
        from engine.artifacts.weights import WeightStore
        from engine.generation.autoregressive import dispatch_packed_step
        from engine.generation.bindings.autoregressive import bind_mlx_autoregressive_graph
        from engine.models.reading import WeightReader
        from engine.models.registry import build_graph

        artifact = open_artifact(arguments.model)
        layout = runtime.layout(WeightsFacts(parameters=artifact.parameters, stored_dtype="float32", quantized=True))
        reader = WeightReader(WeightStore(artifact), layout)
        binding = bind_mlx_autoregressive_graph(build_graph(artifact.config, reader, Composition()))

        def waiting(rows):
            for _ in range(STRIDE):
                commit(rows, dispatch_packed_step(binding, rows).read())

        def ahead(rows):
            pending = dispatch_packed_step(binding, rows)
            for _ in range(STRIDE - 1):
                following = dispatch_packed_step(binding, rows, pending)
                commit(rows, pending.read())
                pending = following
            commit(rows, pending.read())

        for count in arguments.rows:
            rows, ratios = rows_of(binding, count, 20), []
            while rows[0].is_prefilling or not rows[0].next_index:
                commit(rows, dispatch_packed_step(binding, rows).read())
            for turn in range(arguments.turns + 1):
                seconds = {}
                for kind in (waiting, ahead) if turn % 2 else (ahead, waiting):
                    began = time.perf_counter()
                    kind(rows)
                    seconds[kind] = time.perf_counter() - began
                if turn:
                    ratios.append(seconds[waiting] / seconds[ahead])
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"T={arguments.threads} rows={count}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
            for row in rows:
                row.close()


if __name__ == "__main__":
    main()
