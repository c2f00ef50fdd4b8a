"""What the terminal says of a durable stream: that it was lost, that it goes on, and how to go on with it later."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlxstream import (
    DeadlineExceededError,
    Durability,
    Interruption,
    LocalReason,
    Resumption,
    StreamCutError,
    UnavailableError,
)
from service.cli.asking import command_as_invoked, flags_as_given
from service.cli.terminal import tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxstream import DurableEvent, TextStream
    from service.cli.terminal import Terminal


def told(terminal: Terminal) -> Durability:
    """A durability that says on `terminal` what happens to the stream: once for each loss, and for each return."""

    def say(event: DurableEvent) -> None:
        match event:
            case Interruption(attempt=1):
                terminal.interject(_loss(event))
            case Resumption():
                terminal.interject("resumed" if event.attempt == 1 else f"resumed at try {event.attempt}")

    return Durability(on_event=say)


def _loss(event: Interruption) -> str:
    """What was lost, and why; how far a single call had come is of no interest."""
    why = "the server went away" if event.error.reason == LocalReason.CONNECTION_LOST else event.error.message
    when = f"lost after {tokens(event.generated_tokens)}: " if event.generated_tokens else ""
    return f"{when}{why}; trying again"


@contextmanager
def hinted(terminal: Terminal, stream: TextStream, generation_id: str = "") -> Iterator[None]:
    """If the block ends because the server is away, or time is up: say how to go on. `generation_id`: see below."""
    try:
        yield
    except (UnavailableError, StreamCutError, DeadlineExceededError) as error:
        was_asked = error.reason not in {
            LocalReason.UNREACHABLE,
            LocalReason.UNRESOLVABLE_TARGET,
            LocalReason.TLS_FAILED,
        }
        if stream.started is not None or (generation_id and was_asked):
            tell_how_to_go_on(terminal, stream, generation_id)
        raise


def tell_how_to_go_on(terminal: Terminal, stream: TextStream, generation_id: str = "") -> None:
    """Say the command that goes on with a generation; nothing is lost of it.

    `generation_id` is its name where that is known without a word from the server.
    """
    if stream.started is not None:
        generation_id = stream.started.generation_id
    if generation_id:
        command = f"{command_as_invoked()} resume {generation_id}{flags_as_given()}"
        terminal.note(f"go on with `{command}`", to_copy=True)
    else:
        terminal.note("it had not begun: nothing is kept of it")
