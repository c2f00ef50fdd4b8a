"""Rows that come to a stand where a test wants them: how far they get does not depend on the machine's pace."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from engine.execution.stepper import MethodStepper

LOOK_SECONDS = 0.002


@contextlib.contextmanager
def held(waits: Callable[[Any], bool] = lambda row: True) -> Iterator[threading.Event]:
    """Hold each step of any engine while `waits` is true of one of its rows, and until the event is set.

    A row that is to leave holds up nobody.
    """
    let_go, real = threading.Event(), MethodStepper.dispatch

    def dispatch(stepper: MethodStepper, rows: Any, after: Any) -> Any:
        while any(waits(row) and not row.signal.aborted for row in rows) and not let_go.wait(LOOK_SECONDS):
            pass
        return real(stepper, rows, after)

    with mock.patch.object(MethodStepper, "dispatch", dispatch):
        try:
            yield let_go
        finally:
            let_go.set()


def held_after(tokens: int) -> contextlib.AbstractContextManager[threading.Event]:
    """Hold rows that have told so many tokens, and so have at most one more in hand."""
    return held(lambda row: row.next_index >= tokens)
