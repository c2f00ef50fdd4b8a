"""Requests to stop that come before there is a server: while modules are imported, which takes a second or two.

Imports nothing heavy, so that the time in which a signal kills the process without a word is short.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from types import FrameType

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
STANDARD_ERROR: Final = 2


def leave_on_signals() -> None:
    """End the process at the first request to stop, until the server takes these signals over."""
    for number in STOP_SIGNALS:
        signal.signal(number, _leave)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """End at once: nothing is held yet, and an exception could be lost in whatever is being imported."""
    os.write(STANDARD_ERROR, b"mlx-stream serve: stopped before it was ready\n")
    os._exit(0)
