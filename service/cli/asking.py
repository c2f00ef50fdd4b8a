"""What the commands that ask a server share: their flags, the connection, and one clear line for every failure."""

from __future__ import annotations

import functools
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click
import grpc
from rich.console import Console

from mlxstream import (
    AlreadyExistsError,
    AuthenticationError,
    Client,
    FailedPreconditionError,
    InvalidRequestError,
    LocalReason,
    MlxStreamError,
    NotFoundError,
    OutOfRangeError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from mlxstream.client import DEFAULT_TARGET, DEFAULT_TIMEOUT_SECONDS
from service.cli.canvas import CanvasView
from service.cli.credentials import Credentials, chosen_tls, presented_token
from service.cli.terminal import harmless, tokens

EXIT_INTERRUPTED: Final = 130
COMMAND_NAME: Final = "mlx-stream"

_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)

_MODEL_FLAG: Final = click.option("--model", default="", help="Name of the model. Default: the served one.")
_TIMEOUT_FLAG: Final = click.option(
    "--timeout",
    "timeout_seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=DEFAULT_TIMEOUT_SECONDS,
    show_default=True,
    help="Longest time for one answer.",
)
_SERVER_FLAGS = (
    click.option("--target", default=DEFAULT_TARGET, show_default=True, help="HOST:PORT or unix:PATH of the server."),
    click.option("--tls", "encrypted", is_flag=True, help="Encrypt the connection; trust the system's authorities."),
    click.option("--ca", "ca_file", type=_FILE, help="Certificates to trust in their place; implies --tls."),
    click.option("--cert", "cert_file", type=_FILE, help="Certificate to present; needs --key, and --ca or --tls."),
    click.option("--key", "key_file", type=_FILE, help="Its key."),
    click.option("--token-file", type=_FILE, help="File that holds a bearer token."),
)  # fmt: skip


def connection_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that say whom to ask, as whom, for which model, and for how long."""
    flagged: Callable[..., None] = _MODEL_FLAG(answer_flags(command))
    return flagged


def answer_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that say whom to ask, as whom, and for how long."""
    flagged: Callable[..., None] = _TIMEOUT_FLAG(server_flags(command))
    return flagged


def server_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that say whom to ask, and as whom; files become `credentials`."""

    @functools.wraps(command)
    def asking(
        *,
        encrypted: bool,
        ca_file: Path | None,
        cert_file: Path | None,
        key_file: Path | None,
        token_file: Path | None,
        **others: Any,
    ) -> None:
        tls = chosen_tls(ca_file, cert_file, key_file, encrypted=encrypted)
        command(credentials=Credentials(tls=tls, token=presented_token(token_file)), **others)

    flagged: Callable[..., None] = asking
    for flag in reversed(_SERVER_FLAGS):
        flagged = flag(flagged)
    return flagged


def flags_as_given() -> str:
    """What the user typed to say whom to ask, and as whom, for a further command; each flag begins with a blank."""
    context = click.get_current_context(silent=True)
    if context is None:
        return ""
    names = ("target", "encrypted", "ca_file", "cert_file", "key_file", "token_file")
    return "".join(
        f" {parameter.opts[0]}" + ("" if name == "encrypted" else f" {shlex.quote(str(context.params[name]))}")
        for parameter in context.command.params
        if (name := parameter.name) in names
        and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    )


class Failure(click.ClickException):
    """Ends a command with one line on standard error, and status 1."""


class Refused(Failure):
    """The request can never succeed as it stands: wrong usage, found by the server."""

    exit_code = 2


class Unreachable(Failure):
    """No server is there to answer, or none that takes the call now; scripts that try again can tell it."""

    exit_code = 69


# A server that encrypts, or that wants a certificate, ends the connection without a word of why.
_SECURED: Final = "what listens there may want TLS (--tls, --ca) or a certificate (--cert, --key)"
_TLS_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "WRONG_VERSION_NUMBER": "leave out --tls, --ca, --cert and --key",
        "Hostname Verification": "--target must use a name that it is for",
        "CERTIFICATE_VERIFY_FAILED": "--ca names a file of the certificates to trust",
    }
)
# The same request would fail the same way, however often it is made.
_NEVER: Final = (
    AlreadyExistsError,
    AuthenticationError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OutOfRangeError,
    UnsupportedError,
)
_AWAY: Final = (LocalReason.UNREACHABLE, LocalReason.UNRESOLVABLE_TARGET, LocalReason.CONNECTION_LOST)


@contextmanager
def connected(target: str, timeout_seconds: float, credentials: Credentials | None = None) -> Iterator[Client]:
    """A client whose failures end the command in one line.

    Raises:
        Failure: A call failed, or a value does not fit its option.
    """
    try:
        who = credentials or Credentials()
        with Client(target, timeout_seconds=timeout_seconds, tls=who.tls, token=who.token) as client:
            yield client
    except MlxStreamError as error:
        raise _failure_of(error)(explained(error)) from error
    except UnicodeError:
        raise Failure("the text is not valid UTF-8") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _failure_of(error: MlxStreamError) -> type[Failure]:
    if error.reason == LocalReason.TLS_FAILED:
        return Refused
    if isinstance(error, OverloadedError):  # what is too large for the server at any time comes without a pause
        return Refused if error.retry_after_seconds is None else Unreachable
    if isinstance(error, UnavailableError):
        return Unreachable
    return Refused if isinstance(error, _NEVER) else Failure


def is_away(error: MlxStreamError) -> bool:
    """Whether no server is there, or no longer."""
    return error.reason in _AWAY


def explained(error: MlxStreamError) -> str:
    """One line that says what went wrong, and what helps."""
    if error.reason == LocalReason.UNREACHABLE:
        return f"{error.message}; {_way_to(error.metadata['target'], error.metadata.get('cause', ''))}"
    if error.reason == LocalReason.TLS_FAILED and (advice := _TLS_ADVICE.get(error.metadata.get("cause", ""))):
        return f"{error.message}; {advice}"
    if error.reason == LocalReason.UNRESOLVABLE_TARGET:
        return f"{error.message}; --target takes HOST:PORT or unix:PATH"
    if error.reason == LocalReason.CONNECTION_LOST:
        generated_tokens = int(error.metadata["generated_tokens"])
        when = f"after {tokens(generated_tokens)}" if generated_tokens else "before it answered"
        return f"the server at {error.metadata['target']} went away {when}"
    if error.reason == LocalReason.DEADLINE:
        generated_tokens = int(error.metadata["generated_tokens"])
        return f"stopped after {error.metadata['timeout_seconds']} s (--timeout), {tokens(generated_tokens)}"
    if error.code is grpc.StatusCode.UNAUTHENTICATED and "--token-file" not in flags_as_given():
        return f"{error.message}; give --token-file FILE"
    if error.retry_after_seconds is not None and "retry after" not in error.message:
        return f"{error.message} (try again in {error.retry_after_seconds:g} s)"
    return error.message


def _way_to(target: str, cause: str) -> str:
    """What helps where no connection to `target` came about: somebody listens and hangs up, or nobody is there."""
    if cause in {"Socket closed", "Connection reset by peer"}:
        return _SECURED
    listen = "" if target == DEFAULT_TARGET else f" --listen {shlex.quote(target)}"
    start = f"start one with `{command_as_invoked()} serve --model smollm2-135m{listen}`"
    return start if _is_one_address(target) else f"{start}, or if one runs: {_SECURED}"


def _is_one_address(target: str) -> bool:
    """Whether nothing is to be looked up. A name can have several addresses, and gRPC tells of the last one alone."""
    try:
        ip_address(target.rpartition(":")[0].strip("[]"))
    except ValueError:
        return target.startswith("unix:")
    return True


def command_as_invoked() -> str:
    """What the user typed to reach us, so that a hint can be copied."""
    invoked = Path(sys.argv[0])
    if invoked.name != COMMAND_NAME:
        return f"{sys.executable} -m service.cli" if invoked.name == "__main__.py" else COMMAND_NAME
    return COMMAND_NAME if shutil.which(COMMAND_NAME) == str(invoked) else str(invoked)


def canvas_view(console: Console, client: Client, model: str) -> CanvasView:
    """Shows canvases on `console` in the words of `model`, which `client` asks for them.

    A canvas is only decoration: one whose words cannot be had is left out, and the answer goes on.
    """

    def text_of(ids: Sequence[int]) -> str | None:
        try:
            return harmless(client.detokenize(ids, model=model))
        except MlxStreamError:
            return None

    return CanvasView(console, text_of)
