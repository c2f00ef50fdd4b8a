"""Work for the engine thread between rounds: bringing a model in, mounting an adapter, forgetting what is kept.

An errand may have to wait until nothing that runs needs what it takes away. Safe from any thread.
"""

from __future__ import annotations

import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from engine.contracts.errors import EngineFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def at_once() -> bool:
    """For errands that need not wait."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Errand:
    """Some work, when it may be done, and where its result goes."""

    work: Callable[[], Any]
    is_due: Callable[[], bool] = at_once
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Do it, unless nobody wants it any more; a fault is its caller's to hear, but for the end of the device.

        Raises:
            EngineFailedError: the device no longer works.
        """
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except EngineFailedError as error:
            self.future.set_exception(error)
            raise
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # else half a model lives as long as its failure
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: Exception) -> None:
        """End it undone."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
