"""`mlx-stream models`: fetch models by name, and list what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from engine.contracts.errors import EngineError
from engine.execution import catalogue

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
    """Fetch `reference` unless it is here, with a progress bar on standard error while bytes move.

    Raises:
        EngineError: it cannot be fetched; the message is one clear line.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn(reference, markup=False),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        return catalogue.pull(reference, _shown_on(bar))


def _shown_on(bar: Progress) -> Callable[[PullProgress], None]:
    """A task for each stage, begun when the stage first reports."""
    tasks = {stage: bar.add_task(label, start=False, visible=False, total=None) for stage, label in _STAGES.items()}

    def show(progress: PullProgress) -> None:
        task = tasks[progress.stage]
        bar.start_task(task)
        bar.update(task, completed=progress.done_bytes, total=progress.total_bytes or None, visible=True)

    return show


def _row(entry: CatalogueEntry) -> tuple[str, str, str, str, str]:
    here = "yes" if entry.path is not None else "no"
    return entry.name, f"{entry.size_bytes / 1e6:.0f} MB", here, entry.license, entry.summary
