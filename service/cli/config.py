"""`mlx-stream config`: check what `serve` would be told, and show where each value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.cli.server_flags import given, server_flags

if TYPE_CHECKING:
    from service.configuration import Explained


@click.command()
@click.option("--show", is_flag=True, help="Print every setting as TOML, with its source.")
@server_flags
def config(show: bool, config_file: Path | None, **flags: Any) -> None:
    """Check the configuration of `serve`: its flags, variables and file, and the files that they name.

    Nothing is loaded or bound: whether the model and adapters can be used, and whether addresses are free, shows when
    `serve` starts. The exit code is 1 if anything else would make it refuse. What --show prints can be
    used as a file; secrets are in files of their own, and are not shown.
    """
    from service.configuration import SettingsError, explain_settings, load_settings  # slow to import
    from service.lifecycle import check_engine_files
    from service.listening import checked_access, checked_metrics_address, checked_tls, permitted_address
    from service.offer import when_unset
    from service.stopping import StartError
    from service.tracing import open_tracing

    try:
        settings = load_settings(given(flags), config_file)
        address = permitted_address(settings)
        checked_tls(settings)
        checked_access(settings)
        checked_metrics_address(settings)
        check_engine_files(settings)
        open_tracing(settings.otlp_endpoint).close()
        explained = explain_settings(given(flags), config_file, when_unset(settings, address))
    except (SettingsError, StartError) as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(_lines(explained)) if show else "the configuration can be used")


def _lines(explained: list[Explained]) -> list[str]:
    """One line each, the sources below each other. What is unset is a comment, with what holds then if known."""
    stated = [f"{'' if one.is_set else '# '}{one.name} = {one.toml or ''}".rstrip() for one in explained]
    width = min(60, max(len(text) for text in stated))
    return [f"{text:<{width}}  # {one.source}" for text, one in zip(stated, explained, strict=True)]
