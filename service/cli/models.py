"""`mlx-stream models`: fetch models, list what there is, and explain one or predict its memory without loading it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.table import Table

from engine.contracts.errors import EngineError
from engine.contracts.memory import MemoryLoad
from engine.execution import catalogue
from service.cli.inspecting import report_as_json, show_report, show_unreadable, size_text
from service.cli.progress import ProgressLine
from service.cli.terminal import print_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.execution.catalogue import CatalogueEntry, ModelLocation, PullProgress, Stage

DEFAULT_CONTEXT_TOKENS: Final = 4096
_STAGES: Final[Mapping[Stage, str]] = {
    "waiting": "waiting for another pull",
    "downloading": "downloading",
    "unpacking": "unpacking and checking",
}


@click.group()
def models() -> None:
    """Fetch models, list what is there, explain them, predict their memory."""


@models.command(short_help="Fetch a model.")
@click.argument("name")
def pull(name: str) -> None:
    """Fetch NAME: an alias from `models list`, or org/name[@revision] of Hugging Face."""
    try:
        location = pull_with_bar(name)
    except EngineError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{location.name} is in {location.path}")


@models.command(name="list", short_help="List models that can be served.")
def list_() -> None:
    """List aliases, and models from Hugging Face that are on this machine and can be served."""
    table = Table("NAME", "SIZE", "HERE", "LICENSE", "WHAT IT IS", box=None, pad_edge=False, header_style="bold")
    for entry in catalogue.list_models():
        table.add_row(*_row(entry))
    print_whole(table, Console())


@models.command(name="inspect", short_help="Explain a model without loading it.")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def inspect_(name: str, as_json: bool) -> None:
    """Explain NAME without loading it: an alias, a folder, a GGUF file, or a repository that is on this machine.

    The exit code is 1 when it cannot be served, and the page then says why.
    """
    from engine.execution import inspection  # slow to import, and no other command needs it

    report = inspection.explain_model(name)
    if as_json:
        report_as_json(report, sys.stdout)
    elif isinstance(report, inspection.UnreadableModel):
        show_unreadable(report, Console())
    else:
        show_report(report, Console())
    if report.problems:
        raise click.exceptions.Exit(1)


@models.command(short_help="Predict the memory that a model takes here.")
@click.argument("name")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of each generation, prompt and answer together. "
              "Default 4096, or as many as the model can hold.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), default=1, show_default=True, help="Generations at the same time.")
@click.option("--device", help="auto, cpu, metal or cuda. Default auto.")
@click.option("--dtype", help="Type of activations: auto, float32, float16 or bfloat16. Default auto.")
@click.option("--kv-storage", help="How keys and values are stored, as `serve` takes it. Default plain.")
def estimate(name: str, context: int | None, rows: int, **flags: str | None) -> None:
    """Predict the memory that NAME takes on this machine; nothing is loaded."""
    from engine.execution import estimating, state_room  # with the settings, more than the other verbs need
    from service.configuration import SettingsError, load_settings

    try:
        given = {key: value for key, value in flags.items() if value is not None}
        settings = load_settings({"model": name} | given, None)
        memory = estimating.memory_here(settings.engine_settings().device)
        facts = estimating.unloaded_facts(settings.engine_settings(), memory)
        tokens = _context_within(facts.geometry.context_length, context)
        found = state_room.estimate(facts, MemoryLoad(prompt_tokens=tokens - 1, max_tokens=1, rows=rows))
    except (EngineError, SettingsError) as error:
        raise click.ClickException(str(error)) from error
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("asked for", f"{rows} generation{'s' if rows > 1 else ''} of {tokens} tokens")
    table.add_row("weights", size_text(found.weights_bytes))
    table.add_row("keys and values", size_text(found.kv_bytes))
    table.add_row("workspace", size_text(found.workspace_bytes))
    table.add_row("together", f"{size_text(found.total_bytes)} of {size_text(found.budget_bytes)} that may be used")
    table.add_row("free", size_text(memory.available_bytes()))
    table.add_row("fits", "yes" if found.fits else "no")
    table.add_row("longest context", f"{found.max_context_tokens} tokens")
    print_whole(table, Console())


def _context_within(longest: int, wish: int | None) -> int:
    """The tokens of each generation: `wish`, or what is usual as far as a model's `longest` context holds it."""
    if wish is not None and wish > longest:
        raise click.ClickException(f"--context: at most {longest}, as much as the model holds")
    return wish or min(DEFAULT_CONTEXT_TOKENS, longest)


def pull_with_bar(reference: str) -> ModelLocation:
    """Fetch `reference` unless it is here, with its progress on standard error while bytes move.

    Raises:
        EngineError: it cannot be fetched; the message is one clear line.
    """
    console = Console(stderr=True)
    with ProgressLine(console) as line:
        return catalogue.pull(reference, _shown_on(line, console, reference))


def _shown_on(line: ProgressLine, console: Console, reference: str) -> Callable[[PullProgress], None]:
    """Renews the line at each report; where nobody looks on, one sentence tells each stage."""
    began: dict[Stage, float] = {}

    def show(progress: PullProgress) -> None:
        if progress.stage not in began:
            began[progress.stage] = time.monotonic()
            if not console.is_terminal:
                size = f" ({_megabytes(progress.total_bytes)})" if progress.stage == "downloading" else ""
                console.print(f"{reference}: {_STAGES[progress.stage]}{size}", markup=False, highlight=False)
        share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
        seconds = time.monotonic() - began[progress.stage]
        line.show(f"{reference}: {_STAGES[progress.stage]}", share, _amount(progress, seconds))

    return show


def _amount(progress: PullProgress, seconds: float) -> str:
    if not progress.total_bytes:
        return ""
    amount = f"{progress.done_bytes / 1e6:.0f}/{_megabytes(progress.total_bytes)}"
    speed = f", {_megabytes(progress.done_bytes / seconds)}/s"
    return amount + (speed if progress.stage == "downloading" and seconds > 1 else "")


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def _row(entry: CatalogueEntry) -> tuple[str, str, str, str, str]:
    here = "yes" if entry.path is not None else "no"
    return entry.name, _megabytes(entry.size_bytes), here, entry.license, entry.summary
