"""The end of the process: it waits for what ends by itself, and for nothing that cannot."""

from __future__ import annotations

import pytest

from service import process
from tests.service.test_signals import start

STUCK = """
import threading, time
from service.process import end_process
class Stuck(threading.Thread):
    def run(self):
        time.sleep(3600)
Stuck(name={name!r}, daemon={daemon}).start()
print("last words")
end_process({status})
"""
BRIEF = """
import atexit, threading
from service.process import end_process
threading.Thread(target=lambda: print("done"), name="mlx-engine").start()
atexit.register(print, "all of it")
end_process(1)
"""


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(("name", "daemon"), [("mlx-engine", True), ("mlx-stream-text_0", False)])
def test_a_thread_of_the_engine_that_is_stuck_does_not_keep_the_process(name: str, daemon: bool, status: int) -> None:
    process = start(STUCK.format(name=name, daemon=daemon, status=status))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (status, "last words\n", "")


def test_without_such_a_thread_the_interpreter_ends_by_itself() -> None:
    process = start(BRIEF)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "done\nall of it\n", "")


def test_the_loop_gets_the_interpreter_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(process.sys, "setswitchinterval", asked.append)
    with pytest.raises(SystemExit):
        process.run_process({"model": ""}, None)
    assert asked == [0.0005]
