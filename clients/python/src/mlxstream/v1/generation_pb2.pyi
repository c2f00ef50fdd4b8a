from mlxstream.v1 import delivery_pb2 as _delivery_pb2
from mlxstream.v1 import event_pb2 as _event_pb2
from mlxstream.v1 import options_pb2 as _options_pb2
from mlxstream.v1 import prompt_pb2 as _prompt_pb2
from mlxstream.v1 import result_pb2 as _result_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_STATUS_UNSPECIFIED: _ClassVar[AbortStatus]
    ABORT_STATUS_ABORTED: _ClassVar[AbortStatus]
    ABORT_STATUS_NOT_RUNNING: _ClassVar[AbortStatus]
ABORT_STATUS_UNSPECIFIED: AbortStatus
ABORT_STATUS_ABORTED: AbortStatus
ABORT_STATUS_NOT_RUNNING: AbortStatus

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "tokens", "chat", "options", "delivery")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: _prompt_pb2.TextPrompt
    tokens: _prompt_pb2.TokenPrompt
    chat: _prompt_pb2.ChatPrompt
    options: _options_pb2.GenerateOptions
    delivery: _delivery_pb2.DeliveryOptions
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[_Union[_prompt_pb2.TextPrompt, _Mapping]] = ..., tokens: _Optional[_Union[_prompt_pb2.TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[_prompt_pb2.ChatPrompt, _Mapping]] = ..., options: _Optional[_Union[_options_pb2.GenerateOptions, _Mapping]] = ..., delivery: _Optional[_Union[_delivery_pb2.DeliveryOptions, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("sequence", "started", "chunk", "block", "heartbeat", "finished")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    started: _event_pb2.Started
    chunk: _event_pb2.TokenChunk
    block: _event_pb2.BlockUpdate
    heartbeat: _event_pb2.Heartbeat
    finished: _event_pb2.Finished
    def __init__(self, sequence: _Optional[int] = ..., started: _Optional[_Union[_event_pb2.Started, _Mapping]] = ..., chunk: _Optional[_Union[_event_pb2.TokenChunk, _Mapping]] = ..., block: _Optional[_Union[_event_pb2.BlockUpdate, _Mapping]] = ..., heartbeat: _Optional[_Union[_event_pb2.Heartbeat, _Mapping]] = ..., finished: _Optional[_Union[_event_pb2.Finished, _Mapping]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "tokens", "chat", "options", "delivery")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: _prompt_pb2.TextPrompt
    tokens: _prompt_pb2.TokenPrompt
    chat: _prompt_pb2.ChatPrompt
    options: _options_pb2.GenerateOptions
    delivery: _delivery_pb2.DeliveryOptions
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[_Union[_prompt_pb2.TextPrompt, _Mapping]] = ..., tokens: _Optional[_Union[_prompt_pb2.TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[_prompt_pb2.ChatPrompt, _Mapping]] = ..., options: _Optional[_Union[_options_pb2.GenerateOptions, _Mapping]] = ..., delivery: _Optional[_Union[_delivery_pb2.DeliveryOptions, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("started", "text", "tokens", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: _event_pb2.Started
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[_result_pb2.GeneratedToken]
    finished: _event_pb2.Finished
    def __init__(self, started: _Optional[_Union[_event_pb2.Started, _Mapping]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[_result_pb2.GeneratedToken, _Mapping]]] = ..., finished: _Optional[_Union[_event_pb2.Finished, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("generation_id", "after_sequence")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    after_sequence: int
    def __init__(self, generation_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "generation_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation_id: str
    def __init__(self, request_id: _Optional[str] = ..., generation_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("status", "stats")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    status: AbortStatus
    stats: _result_pb2.GenerateStats
    def __init__(self, status: _Optional[_Union[AbortStatus, str]] = ..., stats: _Optional[_Union[_result_pb2.GenerateStats, _Mapping]] = ...) -> None: ...
