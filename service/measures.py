"""What is told of calls and generations to whoever counts them; and who counts nothing, where no metrics are served.

`service.metrics` counts for Prometheus, whose library takes a while to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.contracts.events import GenerationFinished
    from engine.execution.engine import Generation
    from service.live import CallFacts
    from service.readiness import NotReady


class Measures(Protocol):
    """Whoever counts. Told on the loop."""

    def show_readiness(self, not_ready: Callable[[], NotReady | None], /) -> None:
        """Tell whoever looks why no new work is wanted; None: it is."""

    def ended(self, generation: Generation, finished: GenerationFinished, facts: CallFacts, /) -> None:
        """A generation has ended."""

    def refused(self, reason: str, /) -> None:
        """A generation was refused for `reason`, one of our error reasons."""

    def sent(self, tokens: int, /) -> None:
        """A message with so many tokens was sent."""

    def waited_for_tokens(self, seconds: float, /) -> None:
        """A stream's tokens came so long after those before."""

    def looked_at_loop(self, *, late_seconds: float, tasks: int) -> None:
        """A timer of the loop was so late, and the loop has so many tasks."""

    def resumed(self, *, hit: bool) -> None:
        """A call asked to go on with a generation; `hit`: it was there."""

    def call_ended(self, method: str, code: str, seconds: float, /) -> None:
        """A call of `method`, "package.Service/Method", has ended with `code`."""


class NoMeasures:
    """Counts nothing."""

    def show_readiness(self, *_: object) -> None:
        """Nobody looks."""

    def ended(self, *_: object) -> None:
        """Nothing is kept."""

    def refused(self, *_: object) -> None:
        """Nothing is kept."""

    def sent(self, *_: object) -> None:
        """Nothing is kept."""

    def waited_for_tokens(self, *_: object) -> None:
        """Nothing is kept."""

    def looked_at_loop(self, **_: object) -> None:
        """Nothing is kept."""

    def resumed(self, **_: object) -> None:
        """Nothing is kept."""

    def call_ended(self, *_: object) -> None:
        """Nothing is kept."""
