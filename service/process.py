"""The server as an operating system sees it: what it reads, the one line it fails with, and its certain end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from service.configuration import SettingsError, load_settings
from service.lifecycle import engine_class_of, run_server
from service.logs import configure_logging
from service.stopping import Signals, StartError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from service.settings import ServerSettings

# Threads of the engine, which have nothing left to do once it has stopped.
ENGINE_THREADS: Final = "mlx-"
ENDING_SECONDS: Final = 0.5
# How soon the loop gets the interpreter back from the engine thread, which builds steps in Python. With the default of
# 5 ms, tokens of 16 streams took 19 ms to reach a client (52 ms at p99); with this, 8 ms (19 ms).
SWITCH_SECONDS: Final = 0.0005


def run_process(flags: Mapping[str, Any], config_file: Path | None) -> NoReturn:
    """Serve until a signal asks to stop, then end the process: with 0, or with 1 and one line on standard error."""
    status = 0
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        settings = load_settings(flags, config_file)
        configure_logging(settings.log_level, as_json=settings.log_format == "json")
        asyncio.run(_serve(settings))
    except (SettingsError, StartError) as error:
        sys.stderr.write(f"mlx-stream serve: {error}\n")
        status = 1
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End the process, even if a thread of the engine cannot end.

    A read from a dead network folder or from a pipe that nobody writes to cannot be interrupted, and an interpreter
    that ends by itself waits for such threads for ever. Nothing of theirs is worth waiting for by then.
    """
    if _engine_threads_end(time.monotonic() + ENDING_SECONDS):
        gc.freeze()  # what is left is not searched for cycles, which would take longer than all the rest
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _engine_threads_end(latest: float) -> bool:
    """Whether all threads of the engine have ended, at `latest` by the monotonic clock."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(ENGINE_THREADS)]
    for thread in threads:
        thread.join(max(0.0, latest - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


async def _serve(settings: ServerSettings) -> None:
    signals = Signals()
    signals.install()
    await run_server(settings, signals, engine_class=engine_class_of(settings))
