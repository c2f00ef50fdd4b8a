"""Our server, unchanged but for notes of when the engine thread handed each step over and when aborts were raised.

Run by the product's interpreter: `python -m benchmarks.serving.observed_server NOTES serve ...`. SIGUSR1 sets the
interpreter's switch interval to 0.5 ms, SIGUSR2 back to its default. NOTES gets one JSON array per line when it ends.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.contracts.cancellation import AbortReason
from engine.contracts.events import GenerationFinished, GenerationStarted, PrefillProgress, TokensGenerated
from engine.execution.delivery import Dispatcher, Mailbox
from engine.execution.engine import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.events import GenerationEvent

DEFAULT_INTERVAL_SECONDS = 0.005
SHORT_INTERVAL_SECONDS = 0.0005


class Notes:
    """What was seen: (monotonic seconds, kind, generation id, token index or count)."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str, int]] = []
        self._ids: dict[int, str] = {}

    def delivered(self, batch: Sequence[tuple[Mailbox, GenerationEvent]]) -> None:
        """Note one hand-off of the engine thread."""
        now = time.monotonic()
        for mailbox, event in batch:
            if isinstance(event, GenerationStarted):
                self._ids[id(mailbox)] = event.generation_id
            name = self._ids.get(id(mailbox), "")
            match event:
                case TokensGenerated():
                    self.lines += [(now, "token", name, token.index) for token in event.tokens]
                case PrefillProgress():
                    self.lines.append((now, "prefill", name, event.prefilled_tokens))
                case GenerationFinished():
                    self.lines.append((now, "finished", name, 0))
                case _:
                    self.lines.append((now, "started", name, 0))

    def aborted(self, generation_id: str) -> None:
        """Note that a generation's abort signal is being raised."""
        self.lines.append((time.monotonic(), "aborted", generation_id, 0))

    def write(self, file: Path) -> None:
        """Put all lines into `file`."""
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")


def observe(notes: Notes) -> None:
    """Put the notes between the engine thread and its dispatcher, and before aborts."""
    deliver, abort = Dispatcher.deliver, Generation.abort

    def noting_deliver(dispatcher: Dispatcher, batch: Sequence[tuple[Mailbox, GenerationEvent]]) -> None:
        notes.delivered(batch)
        deliver(dispatcher, batch)

    def noting_abort(generation: Generation, reason: AbortReason) -> None:
        notes.aborted(generation.generation_id)
        abort(generation, reason)

    Dispatcher.deliver = noting_deliver  # type: ignore[method-assign, assignment]
    Generation.abort = noting_abort  # type: ignore[method-assign, assignment]


def main() -> None:
    """Serve with notes."""
    from service.cli.main import main as command_line

    notes = Notes()
    observe(notes)

    def set_interval(number: int, _frame: Any) -> None:
        short = number == signal.SIGUSR1
        sys.setswitchinterval(SHORT_INTERVAL_SECONDS if short else DEFAULT_INTERVAL_SECONDS)

    signal.signal(signal.SIGUSR1, set_interval)
    signal.signal(signal.SIGUSR2, set_interval)
    file = Path(sys.argv.pop(1))
    try:
        command_line(prog_name="mlx-stream")
    finally:
        notes.write(file)


if __name__ == "__main__":
    main()
