"""Client of mlx-stream: stream tokens from an MLX engine over gRPC.

`Client` serves plain threads, `AsyncClient` serves asyncio; both have the same methods. The schema's own messages
are in `mlxstream.v1`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxstream.client import AsyncClient
    from mlxstream.connection import Tls
    from mlxstream.durable import Durability, DurableEvent, Interruption, Resumption
    from mlxstream.errors import (
        AlreadyExistsError,
        AuthenticationError,
        DataLossError,
        DeadlineExceededError,
        FailedPreconditionError,
        FieldViolation,
        GenerationCancelledError,
        InvalidRequestError,
        LocalReason,
        MlxStreamError,
        NotFoundError,
        OutOfRangeError,
        OverloadedError,
        PromptTooLongError,
        ServerError,
        StreamCutError,
        UnavailableError,
        UnsupportedError,
    )
    from mlxstream.results import FinishReason, Generation, Usage
    from mlxstream.stream import AsyncTextStream
    from mlxstream.sync import Client, TextStream

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncTextStream",
    "AuthenticationError",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "Durability",
    "DurableEvent",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "Generation",
    "GenerationCancelledError",
    "Interruption",
    "InvalidRequestError",
    "LocalReason",
    "MlxStreamError",
    "NotFoundError",
    "OutOfRangeError",
    "OverloadedError",
    "PromptTooLongError",
    "Resumption",
    "ServerError",
    "StreamCutError",
    "TextStream",
    "Tls",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
]

_HOMES = {
    "AsyncClient": "client",
    "AsyncTextStream": "stream",
    "Client": "sync",
    "Durability": "durable",
    "DurableEvent": "durable",
    "FinishReason": "results",
    "Generation": "results",
    "Interruption": "durable",
    "Resumption": "durable",
    "TextStream": "sync",
    "Tls": "connection",
    "Usage": "results",
}


def __getattr__(name: str) -> Any:
    """Import a name's module when the name is asked for: whoever needs the messages alone waits for nothing else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    found = globals()[name] = getattr(home, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
