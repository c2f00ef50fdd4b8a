"""What the commands that ask a server share: their flags, the connection, and one clear line for every failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from mlxstream import Client, MlxStreamError, UnavailableError
from mlxstream.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS

EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])

# Ranges are the server's to check: it knows the model, and names the field.
_CONNECTION_FLAGS = (
    click.option("--target", default=DEFAULT_TARGET, show_default=True, help="HOST:PORT or unix:PATH of the server."),
    click.option("--model", default="", help="Name of the model. Default: the served one."),
    click.option("--timeout", "timeout_seconds", type=float, default=DEFAULT_TIMEOUT_SECONDS, show_default=True,
                 metavar="SECONDS", help="Longest time for one answer."),
)  # fmt: skip
_OPTION_FLAGS = (
    click.option("--max-tokens", type=int, help="Most tokens to generate. Default 512."),
    click.option("--temperature", type=float, help="0 always takes the likeliest token. Default: the model's, else 0."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability mass."),
    click.option("--top-k", type=int, help="Keep this many of the likeliest tokens."),
    click.option("--min-p", type=float, help="Keep tokens at least this probable relative to the likeliest."),
    click.option("--seed", type=int, help="Makes sampling repeatable."),
    click.option("--stop", "stop_sequences", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
)


def connection_flags(command: Command) -> Command:
    """Add the flags that say whom to ask, and for how long."""
    return _with_flags(command, _CONNECTION_FLAGS)


def option_flags(command: Command) -> Command:
    """Add the flags that become options of the generation."""
    return _with_flags(command, _OPTION_FLAGS)


def _with_flags(command: Command, flags: tuple[Callable[[Command], Command], ...]) -> Command:
    for flag in reversed(flags):
        command = flag(command)
    return command


def set_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in values.items() if value not in (None, ())}


class Failure(click.ClickException):
    """Ends a command with one line on standard error, and status 1."""


class Unreachable(Failure):
    """Nobody answers at the target; scripts can tell it by its status."""

    exit_code = 69


@contextmanager
def connected(target: str, timeout_seconds: float) -> Iterator[Client]:
    """A client whose failures end the command in one line.

    Raises:
        Failure: A call failed, or a value does not fit its option.
    """
    try:
        with Client(target, timeout_seconds=timeout_seconds) as client:
            yield client
    except MlxStreamError as error:
        raise (Unreachable if is_unreachable(error) else Failure)(explained(error, target)) from error
    except UnicodeError:
        raise Failure("the text is not valid UTF-8") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def is_unreachable(error: MlxStreamError) -> bool:
    """Whether nobody answered; a server that refuses work gives a reason."""
    return isinstance(error, UnavailableError) and not error.reason


def explained(error: MlxStreamError, target: str) -> str:
    """One line that says what went wrong, and what helps."""
    if is_unreachable(error):
        return f"no server answers at {target}; start one with `mlx-stream serve --model smollm2-135m`"
    if error.retry_after_seconds is not None:
        return f"{error.message} (try again in {error.retry_after_seconds:g} s)"
    return error.message
