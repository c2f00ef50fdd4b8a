"""What the commands that ask a server share: their flags, the connection, and one clear line for every failure."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from mlxstream import Client, InvalidRequestError, LocalReason, MlxStreamError
from mlxstream.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS
from service.cli.terminal import tokens

EXIT_INTERRUPTED: Final = 130
COMMAND_NAME: Final = "mlx-stream"

Command = TypeVar("Command", bound=Callable[..., Any])

_CONNECTION_FLAGS = (
    click.option("--target", default=DEFAULT_TARGET, show_default=True, help="HOST:PORT or unix:PATH of the server."),
    click.option("--model", default="", help="Name of the model. Default: the served one."),
    click.option("--timeout", "timeout_seconds", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
                 default=DEFAULT_TIMEOUT_SECONDS, show_default=True, help="Longest time for one answer."),
)  # fmt: skip


def connection_flags(command: Command) -> Command:
    """Add the flags that say whom to ask, and for how long."""
    for flag in reversed(_CONNECTION_FLAGS):
        command = flag(command)
    return command


class Failure(click.ClickException):
    """Ends a command with one line on standard error, and status 1."""


class Refused(Failure):
    """The request can never succeed as it stands: wrong usage, found by the server."""

    exit_code = 2


class Unreachable(Failure):
    """No server is there to answer; scripts can tell it by its status."""

    exit_code = 69


_AWAY: Final = (LocalReason.UNREACHABLE, LocalReason.UNRESOLVABLE_TARGET, LocalReason.CONNECTION_LOST)


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
        raise _failure_of(error)(explained(error)) from error
    except UnicodeError:
        raise Failure("the text is not valid UTF-8") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _failure_of(error: MlxStreamError) -> type[Failure]:
    if is_away(error):
        return Unreachable
    return Refused if isinstance(error, InvalidRequestError) else Failure


def is_away(error: MlxStreamError) -> bool:
    """Whether no server is there, or no longer."""
    return error.reason in _AWAY


def explained(error: MlxStreamError) -> str:
    """One line that says what went wrong, and what helps."""
    if error.reason == LocalReason.UNREACHABLE:
        return f"{error.message}; start one with `{command_as_invoked()} serve --model smollm2-135m`"
    if error.reason == LocalReason.UNRESOLVABLE_TARGET:
        return f"{error.message}; --target takes HOST:PORT or unix:PATH"
    if error.reason == LocalReason.CONNECTION_LOST:
        generated_tokens = int(error.metadata["generated_tokens"])
        when = f"after {tokens(generated_tokens)}" if generated_tokens else "before it answered"
        return f"the server at {error.metadata['target']} went away {when}"
    if error.reason == LocalReason.DEADLINE:
        generated_tokens = int(error.metadata["generated_tokens"])
        return f"stopped after {error.metadata['timeout_seconds']} s (--timeout), {tokens(generated_tokens)}"
    if error.retry_after_seconds is not None:
        return f"{error.message} (try again in {error.retry_after_seconds:g} s)"
    return error.message


def command_as_invoked() -> str:
    """What the user typed to reach us, so that a hint can be copied."""
    invoked = Path(sys.argv[0])
    if invoked.name != COMMAND_NAME:
        return f"{sys.executable} -m service.cli" if invoked.name == "__main__.py" else COMMAND_NAME
    return COMMAND_NAME if shutil.which(COMMAND_NAME) == str(invoked) else str(invoked)
