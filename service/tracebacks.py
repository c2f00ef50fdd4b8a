"""What a log may tell of an exception: its kind and its places. Its text may quote a prompt or a path of this machine.

Errors of our own tree are told in full, since their texts are made for callers.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING

from engine.contracts.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator


def without_values(error: BaseException) -> str:
    """The chain of causes, innermost first: where each passed, and of what kind it was."""
    return "\n".join(line for one in reversed(list(_chain(error))) for line in _told(one))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _told(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"  {PurePath(frame.filename).name}:{frame.lineno} in {frame.name}"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    yield f"{name}: {error}" if isinstance(error, EngineError) else name
