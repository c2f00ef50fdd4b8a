"""Passes and tokens a second of block diffusion, against mlx-vlm. `python -m benchmarks.denoising [--out FOLDER]`.

Both compute the same random model and the same requests in one process, with the same BLAS, in turns: the order changes
with every round. Products of few rows and exponentials are ours where we are timed, and move scores by a bit: how many
answers are the same is told, and that all are without them is proven by the tests. Ratios are of processor time a pass
within a round, which a busy machine disturbs least; rates are of wall time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.denoising.contestants import Answer, Request, mlx_vlm, ours
from benchmarks.denoising.models import build
from benchmarks.denoising.plot import plot_of
from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import Composition
from engine.runtime.prepare import WeightsFacts, prepare_runtime
from engine.runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT_TOKENS, MAX_TOKENS, PASSES = 48, 120, 16
SAMPLERS = ("confidence-threshold", "entropy-bound")
STREAMS = (1, 4)


def requests_of(sampler: str, streams: int, turn: int) -> list[Request]:
    """The requests of one turn; every turn has others."""
    import mlx.core as mx

    made = []
    for index in range(streams):
        seed = 100 * turn + index
        prompt = mx.random.randint(2, 2048, (PROMPT_TOKENS,), key=mx.random.key(seed)).tolist()
        made.append(Request(tuple(prompt), seed, MAX_TOKENS, PASSES, sampler))  # type: ignore[arg-type]
    return made


def opened(folder: Path, runtime: Any) -> Any:
    """Our stepper over the files in `folder`."""
    from engine.artifacts.weights import WeightStore
    from engine.execution.checkpoints import CheckpointKeeper
    from engine.execution.denoising_method import DenoisingMethod
    from engine.execution.prefixes import PrefixKeeper
    from engine.execution.scheduler import Limits
    from engine.execution.stepper import MethodStepper
    from engine.generation.bindings.denoising import bind_denoising_model
    from engine.generation.scopes import WiredScope
    from engine.models.reading import WeightReader
    from engine.models.registry import build_denoising_graph
    from engine.state.prefix_store import PrefixStore

    artifact = open_artifact(folder)
    layout = runtime.layout(WeightsFacts(parameters=artifact.parameters, stored_dtype="float32", quantized=False))
    graph = build_denoising_graph(artifact.config, WeightReader(WeightStore(artifact), layout), Composition())
    limits = Limits(
        max_rows=8, prefill_step_tokens=2048, prefill_chunk_tokens=2048, mixed_prefill_tokens=2048,
        state_bytes=2**40, rows_per_step=1,
    )  # fmt: skip
    wired = WiredScope(limit_bytes=0, set_limit=lambda limit: limit, synchronize=lambda: None)
    nothing_kept: Any = None
    prefixes = PrefixKeeper(PrefixStore(0), nothing_kept)
    method = DenoisingMethod(bind_denoising_model(graph))
    return MethodStepper(method, wired, limits, prefixes, CheckpointKeeper(nothing_kept))


def timed(run: Callable[[], list[Answer]]) -> tuple[list[Answer], float, float]:
    """The answers, wall seconds and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    answers = run()
    return answers, time.perf_counter() - wall, time.process_time() - cpu


def measured(rounds: int) -> list[dict[str, Any]]:
    """One record for each sampler, number of streams and side."""
    with tempfile.TemporaryDirectory() as scratch:
        runtime = prepare_runtime(RuntimeSettings(cache_directory=Path(scratch) / "cache"))
        model = build(Path(scratch) / "model")
        stepper = opened(Path(scratch) / "model", runtime)
        records = []
        for sampler in SAMPLERS:
            for streams in STREAMS:
                records += compare(model, stepper, sampler, streams, rounds)
        return records


def compare(model: Any, stepper: Any, sampler: str, streams: int, rounds: int) -> list[dict[str, Any]]:
    """Both sides in turns; the first round does not count."""
    runs: dict[str, list[tuple[int, int, float, float]]] = {"mlx-stream": [], "mlx-vlm": []}
    equal: list[bool] = []
    for turn in range(rounds + 1):
        requests = requests_of(sampler, streams, turn)
        sides: Sequence[tuple[str, Callable[[], list[Answer]]]] = (
            ("mlx-stream", lambda: ours(stepper, requests)),  # noqa: B023 - called in this round
            ("mlx-vlm", lambda: mlx_vlm(model, requests)),  # noqa: B023
        )
        said = {}
        for name, run in sides if turn % 2 else reversed(sides):
            said[name], wall, cpu = timed(run)
            if turn:
                tokens = sum(len(answer.tokens) for answer in said[name])
                passes = sum(answer.passes for answer in said[name])
                runs[name].append((tokens, passes, wall, cpu))
        if turn:
            equal += [own == theirs for own, theirs in zip(said["mlx-stream"], said["mlx-vlm"], strict=True)]
    ratios = [
        (theirs[3] / theirs[1]) / (own[3] / own[1])
        for own, theirs in zip(runs["mlx-stream"], runs["mlx-vlm"], strict=True)
    ]
    return [
        {
            "sampler": sampler,
            "streams": streams,
            "side": name,
            "passes_per_second": round(statistics.median(passes / wall for _, passes, wall, _ in side), 1),
            "tokens_per_second": round(statistics.median(tokens / wall for tokens, _, wall, _ in side), 1),
            "passes_per_cpu_second": round(statistics.median(passes / cpu for _, passes, _, cpu in side), 1),
            "equal_answers": f"{sum(equal)} of {len(equal)}",
            "ratio": round(statistics.median(ratios), 3) if name == "mlx-stream" else 1.0,
        }
        for name, side in runs.items()
    ]


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records in Markdown."""
    head = "| sampler | streams |  | passes/s | tokens/s | passes per CPU s | ratio | equal answers |"
    head += "\n|---|---|---|---|---|---|---|---|"
    rows = [
        f"| {one['sampler']} | {one['streams']} | {one['side']} | {one['passes_per_second']} "
        f"| {one['tokens_per_second']} | {one['passes_per_cpu_second']} | {one['ratio']:.2f} | {one['equal_answers']} |"
        for one in records
    ]
    return "\n".join([head, *rows])


def main() -> None:
    """Measure, print the table, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to keep denoising.json, denoising.md and denoising.svg")
    arguments = parser.parse_args()
    records = measured(arguments.rounds)
    print(table(records))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        document = {"machine": platform.machine(), "rounds": arguments.rounds, "records": records}
        (arguments.out / "denoising.json").write_text(json.dumps(document, indent=1) + "\n")
        (arguments.out / "denoising.md").write_text(table(records) + "\n")
        (arguments.out / "denoising.svg").write_text(plot_of(records))


if __name__ == "__main__":
    main()
