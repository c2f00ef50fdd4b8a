"""`python -m benchmarks.serving [--quick] [--only NAME] [--renew NAME]`: measure, show, and keep the results.

Results go to `results/NAME.json` here; a full run also renews the plot beside it and the page `docs/benchmarks.md`.
`--renew` measures anew what has changed since a full run, and keeps it with that run's other measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.arena import Arena
from benchmarks.serving.calibration import machine_facts
from benchmarks.serving.cancelling import measure_cancel, measure_leaving
from benchmarks.serving.delivery import measure_delivery
from benchmarks.serving.environments import MLX_LM, REPOSITORY, SMG_SERVICER, Workshop
from benchmarks.serving.gaps import measure_gaps
from benchmarks.serving.loads import (
    measure_decode,
    measure_lent,
    measure_load,
    measure_single,
    measure_stock,
    measure_transport,
)
from benchmarks.serving.plot import plot_of
from benchmarks.serving.prompts import Prompts
from benchmarks.serving.report import markdown, show
from benchmarks.serving.starting import measure_start

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.serving.goals import Results

    Measure = Callable[[Arena], Awaitable[list[dict[str, Any]]]]

RESULTS = Path(__file__).resolve().parent / "results"
FULL = RESULTS / "full.json"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
LIMIT_SECONDS = 60 * 60
MEASURES: dict[str, Measure] = {
    "load": measure_load,
    "gaps": measure_gaps,
    "single": measure_single,
    "transport": measure_transport,
    "cancel": measure_cancel,
    "start": measure_start,
    "delivery": measure_delivery,
    "leaving": measure_leaving,
    "decode": measure_decode,
    "lent": measure_lent,
    "stock": measure_stock,
}


def main() -> None:
    """Parse, prepare, measure, keep, show."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.renew and (arguments.quick or arguments.only or not FULL.exists()):
        parser.error("--renew adds to a kept full run: it needs one, and goes with neither --quick nor --only")
    if arguments.show:
        document = json.loads(arguments.show.read_text(encoding="utf-8"))
        _keep(document)
    else:
        workshop = Workshop(folder=arguments.folder.resolve())
        workshop.prepare(arguments.model)
        document = asyncio.run(_run(workshop, arguments))
    show(document)


def _keep(document: dict[str, Any]) -> None:
    """Write what is measured so far, so that a run which is cut off has not been for nothing."""
    name = "quick" if document["quick"] else FULL.stem
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if name == "full" and "load" in document["results"]:
        plot = RESULTS / "load.svg"
        plot.write_text(plot_of(document["results"]["load"]), encoding="utf-8")
        page = markdown(document, f"../{plot.relative_to(REPOSITORY).as_posix()}")
        PAGE.write_text(page, encoding="utf-8")


async def _run(workshop: Workshop, arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    prompts = Prompts(workshop.model, seed=arguments.seed)
    arena = Arena(workshop, arguments.model, prompts, quick=arguments.quick, say=_say)
    results: Results = {}
    failures: dict[str, str] = {}
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            for name in arguments.only or arguments.renew or MEASURES:
                _say(f"== {name}")
                try:
                    results[name] = await MEASURES[name](arena)
                except Exception as error:  # one measure that fails must not cost the others
                    _say(f"{name} failed: {error!r}")
                    failures[name] = repr(error)
                document = _document(arena, arguments, (time.monotonic() - began) / 60, results, failures)
                if arguments.renew:
                    document = _renewed(json.loads(FULL.read_text(encoding="utf-8")), document)
                if not arguments.only:
                    _keep(document)
    finally:
        arena.close()
    return document


def _renewed(kept: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """The kept run with what was measured since, and at which revision that was."""
    names = [*document["results"], *document["failures"]]
    since = {name: revision for name, revision in kept.get("renewed", {}).items() if name not in names}
    return kept | {
        "renewed": since | dict.fromkeys(names, document["machine"]["revision"]),
        "failures": {name: why for name, why in kept["failures"].items() if name not in names} | document["failures"],
        "results": kept["results"] | document["results"],
    }


def _document(
    arena: Arena, arguments: argparse.Namespace, minutes: float, results: Results, failures: dict[str, str]
) -> dict[str, Any]:
    """What is measured so far, and under which circumstances."""
    rates = [record["loop_rate"] for record in arena.circumstances] or [0.0]
    foreign = [record["foreign_cores"] or 0.0 for record in arena.circumstances] or [0.0]
    return {
        "quick": arguments.quick,
        "minutes": minutes,
        "seed": arguments.seed,
        "machine": machine_facts(REPOSITORY),
        "peers": [MLX_LM, SMG_SERVICER],
        "calibration": {"median": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)},
        "foreign_cores": {"median": statistics.median(foreign), "most": max(foreign)},
        "failures": failures,
        "results": results,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about 3 minutes instead of 20; rough")
    parser.add_argument(
        "--only", action="append", choices=list(MEASURES), help="one measure (may be repeated); keeps nothing"
    )
    parser.add_argument(
        "--renew",
        action="append",
        choices=list(MEASURES),
        help="one measure (may be repeated); kept with the last full run",
    )
    parser.add_argument("--model", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "build" / "benchmarks", help="where peers are installed"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="show kept results again, and renew what is made from them"
    )
    return parser


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


if __name__ == "__main__":
    main()
