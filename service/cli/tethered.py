"""`python -m service.cli.tethered ARGUMENT...`: `mlx-stream ARGUMENT...`, ended when its standard input closes.

A parent that holds the other end of that pipe never leaves this process behind, however the parent itself ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from service.cli.main import main


def end_with_standard_input() -> None:
    """Watch standard input from a thread, and leave by SIGTERM at its end."""
    threading.Thread(target=_watch, args=(sys.stdin.fileno(),), name="tether", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_standard_input()
    main(prog_name="mlx-stream")
