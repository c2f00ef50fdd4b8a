"""`mlx-stream models`: fetch models by name, and list what there is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.table import Table

from engine.contracts.errors import EngineError
from engine.execution import catalogue
from service.cli.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.execution.catalogue import CatalogueEntry, ModelLocation, PullProgress, Stage

_STAGES: Final[Mapping[Stage, str]] = {
    "waiting": "waiting for another pull",
    "downloading": "downloading",
    "unpacking": "unpacking and checking",
}


@click.group()
def models() -> None:
    """Fetch models and list what is there."""


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch NAME: an alias from `models list`, or org/name[@revision] of Hugging Face."""
    try:
        location = pull_with_bar(name)
    except EngineError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{location.name} is in {location.path}")


@models.command(name="list")
def list_() -> None:
    """List aliases, and models from Hugging Face that are on this machine and can be served."""
    table = Table("NAME", "SIZE", "HERE", "LICENSE", "WHAT IT IS", box=None, pad_edge=False, header_style="bold")
    for entry in catalogue.list_models():
        table.add_row(*_row(entry))
    Console(soft_wrap=True).print(table)


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
