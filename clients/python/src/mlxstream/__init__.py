"""Client of mlx-stream: stream tokens from an MLX engine over gRPC.

`Client` serves plain threads, `AsyncClient` serves asyncio; both have the same methods. The schema's own messages
are in `mlxstream.v1`.
"""

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
