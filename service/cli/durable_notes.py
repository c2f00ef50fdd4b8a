"""What the terminal says of a durable stream: that it was lost, that it goes on, and how to go on with it later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxstream import Durability, Interruption, Resumption
from service.cli.asking import command_as_invoked, explained
from service.cli.terminal import tokens

if TYPE_CHECKING:
    from mlxstream import DurableEvent, TextStream
    from service.cli.terminal import Terminal


def told(terminal: Terminal) -> Durability:
    """A durability that says on `terminal` what happens to the stream: once for each loss, and for each return."""

    def say(event: DurableEvent) -> None:
        match event:
            case Interruption(attempt=1):
                terminal.note(f"lost after {tokens(event.generated_tokens)} ({explained(event.error)}); trying again")
            case Resumption():
                terminal.note(f"resumed at try {event.attempt}")

    return Durability(on_event=say)


def how_to_go_on(stream: TextStream) -> str:
    """The command that goes on with a generation that was cancelled; nothing is lost of it."""
    if stream.started is None:
        return "nothing is kept of it"
    return f"go on with `{command_as_invoked()} resume {stream.started.generation_id}`"
