"""`mlx-stream`: the group of all commands. A command's module is imported when that command is called."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Final

import click

from service.libraries import silence_grpc_core

# Each module `service.cli.NAME` holds the command under the same name.
COMMANDS: Final = MappingProxyType(
    {
        "serve": "Serve a model over gRPC until it is told to stop.",
        "config": "Check the settings of a server, and show where each comes from.",
        "generate": "Stream one answer into the terminal.",
        "resume": "Go on with a durable generation.",
        "chat": "Talk with a model in the terminal.",
        "top": "Watch a server at work.",
        "models": "Fetch models, list what is there, and explain them.",
        "demo": "Start a server, ask it one question, show the answer, and stop.",
    }
)


class LazyGroup(click.Group):
    """Knows its commands by name and summary, so that `--help` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        silence_grpc_core()  # what it has to say, our own messages say
        command: click.Command = getattr(importlib.import_module(f"service.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list on the help page."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-stream")
def main() -> None:
    """Stream tokens from one shared MLX engine."""
