from mlxstream.v1 import error_pb2 as _error_pb2
from mlxstream.v1 import graph_pb2 as _graph_pb2
from mlxstream.v1 import options_pb2 as _options_pb2
from mlxstream.v1 import result_pb2 as _result_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Started(_message.Message):
    __slots__ = ("generation_id", "request_id", "model", "weights_fingerprint", "graph", "execution", "options", "seed_was_explicit", "prompt_tokens", "cached_tokens", "resumed_tokens")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_WAS_EXPLICIT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    request_id: str
    model: str
    weights_fingerprint: str
    graph: _graph_pb2.GraphDescriptor
    execution: _graph_pb2.ResolvedExecution
    options: _options_pb2.GenerateOptions
    seed_was_explicit: bool
    prompt_tokens: int
    cached_tokens: int
    resumed_tokens: int
    def __init__(self, generation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., graph: _Optional[_Union[_graph_pb2.GraphDescriptor, _Mapping]] = ..., execution: _Optional[_Union[_graph_pb2.ResolvedExecution, _Mapping]] = ..., options: _Optional[_Union[_options_pb2.GenerateOptions, _Mapping]] = ..., seed_was_explicit: bool = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., resumed_tokens: _Optional[int] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("tokens", "text")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_result_pb2.GeneratedToken]
    text: str
    def __init__(self, tokens: _Optional[_Iterable[_Union[_result_pb2.GeneratedToken, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...

class BlockUpdate(_message.Message):
    __slots__ = ("block_index", "revision", "step", "tokens", "committed")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    revision: int
    step: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    committed: bool
    def __init__(self, block_index: _Optional[int] = ..., revision: _Optional[int] = ..., step: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., committed: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("prefilled_tokens", "prompt_tokens")
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefilled_tokens: int
    prompt_tokens: int
    def __init__(self, prefilled_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "matched_stop", "stats", "error")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _result_pb2.FinishReason
    matched_stop: str
    stats: _result_pb2.GenerateStats
    error: _error_pb2.GenerationError
    def __init__(self, finish_reason: _Optional[_Union[_result_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., stats: _Optional[_Union[_result_pb2.GenerateStats, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.GenerationError, _Mapping]] = ...) -> None: ...
