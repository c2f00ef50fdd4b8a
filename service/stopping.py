"""Requests to stop a server that has begun, and the fault with which one cannot begin."""

from __future__ import annotations

import asyncio

from service.signals import STOP_SIGNALS


class StartError(Exception):
    """The server cannot start; the message is one line for the operator."""


class Signals:
    """Counts requests to stop: the first begins the end, the second hurries it."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """Ask the server to stop."""
        if not self.first.is_set():
            self.first.set()
            return
        self.second.set()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
