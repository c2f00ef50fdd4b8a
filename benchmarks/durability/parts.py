"""The processor time of checkpoints alone, by watching the three places where it is spent."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class Parts:
    """Seconds of processor time: taking states on the device, handing them over, writing them; and how many."""

    taking: float = 0.0
    handing: float = 0.0
    writing: float = 0.0
    checkpoints: int = 0

    def told(self, whole_seconds: float) -> dict[str, float]:
        """Them, and their share of what else a run of `whole_seconds` has spent."""
        spent = self.taking + self.handing + self.writing
        return {
            "taking": round(self.taking, 4),
            "handing": round(self.handing, 4),
            "writing": round(self.writing, 4),
            "checkpoints": self.checkpoints,
            "share": round(spent / (whole_seconds - spent), 5),
        }


@contextlib.contextmanager
def spent_on_checkpoints() -> Iterator[Parts]:
    """Count while the block runs. Taking is counted for the whole process, once the step in hand is done."""
    import mlx.core as mx

    from engine.execution import checkpoints
    from engine.state.durable_generation import GenerationFolder

    parts, taken = Parts(), checkpoints._taken  # noqa: SLF001 - the very parts that are measured
    offer, write = GenerationFolder.offer, GenerationFolder._write  # noqa: SLF001

    def counted(name: str, clock: Callable[[], float], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            started = clock()
            try:
                return real(*given)
            finally:
                setattr(parts, name, getattr(parts, name) + clock() - started)

        return call

    timed = counted("taking", time.process_time, taken)

    def take(*given: Any) -> Any:
        mx.synchronize()
        parts.checkpoints += 1
        return timed(*given)

    with (
        mock.patch.object(checkpoints, "_taken", take),
        mock.patch.object(GenerationFolder, "offer", counted("handing", time.thread_time, offer)),
        mock.patch.object(GenerationFolder, "_write", counted("writing", time.thread_time, write)),
    ):
        yield parts
