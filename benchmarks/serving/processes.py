"""Child processes that never outlive the benchmark, can be stopped while others are measured, and tell their CPU time.

Every child leads a group of its own, and on Linux dies with its parent whatever kills that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP_SECONDS = 10.0
# Asks Linux for SIGKILL at the parent's death (PR_SET_PDEATHSIG is 1), then becomes the child; a hook between fork and
# exec would run in a copy of a process that uses gRPC.
BECOME_MORTAL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


class Child:
    """One running process and its log file."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: dict[str, str], folder: Path, speaks: bool = False
    ) -> None:
        """Start `command`; one that `speaks` has pipes for its input and output instead of a log of the latter."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.started_at = time.monotonic()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*_mortal(), *command],
                stdin=subprocess.PIPE if speaks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if speaks else sink,
                stderr=sink,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def input(self) -> IO[bytes]:
        """Where a child that speaks listens."""
        if self._process.stdin is None:
            raise RuntimeError("this child has no pipes")
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        """Where a child that speaks answers."""
        if self._process.stdout is None:
            raise RuntimeError("this child has no pipes")
        return self._process.stdout

    def require_running(self) -> None:
        """Raise, with the end of its log, if the child has ended."""
        if self._process.poll() is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"{self.log.stem} ended with {self._process.returncode}:\n{tail}")

    def pause(self) -> None:
        """Take the processor away."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Give the processor back."""
        self._signal(signal.SIGCONT)

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        self._process.send_signal(number)

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        if sys.platform == "linux":
            account = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
            fields = account.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        command = ["ps", "-o", "time=", "-p", str(self._process.pid)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        seconds = 0.0
        for part in shown.strip().replace("-", ":").split(":"):
            seconds = seconds * 60 + float(part)
        return seconds

    def stop(self) -> None:
        """End the process and its group, gently first."""
        self.resume()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _mortal() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", BECOME_MORTAL] if sys.platform == "linux" else []
