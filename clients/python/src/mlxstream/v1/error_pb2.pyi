from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_CHAT_TEMPLATE: _ClassVar[ErrorReason]
    ERROR_REASON_MALFORMED_MESSAGE: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED_OPTION: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION_DENIED: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_DUPLICATE_REQUEST_ID: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_MESSAGE_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_ENGINE_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_INSUFFICIENT_MEMORY: _ClassVar[ErrorReason]
    ERROR_REASON_ABORTED: _ClassVar[ErrorReason]
    ERROR_REASON_GENERATION_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_ENGINE_ERROR: _ClassVar[ErrorReason]
    ERROR_REASON_ARTIFACT: _ClassVar[ErrorReason]
    ERROR_REASON_ARTIFACT_MISSING: _ClassVar[ErrorReason]
    ERROR_REASON_ARTIFACT_CORRUPT: _ClassVar[ErrorReason]
    ERROR_REASON_ARTIFACT_UNSUPPORTED: _ClassVar[ErrorReason]
    ERROR_REASON_GRAPH_CONTRACT: _ClassVar[ErrorReason]
    ERROR_REASON_CONFIGURATION: _ClassVar[ErrorReason]
    ERROR_REASON_DURABILITY: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_DAMAGED: _ClassVar[ErrorReason]
    ERROR_REASON_RESUME_POINT_GONE: _ClassVar[ErrorReason]
    ERROR_REASON_TAKEN_OVER: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_REQUEST: ErrorReason
ERROR_REASON_PROMPT_TOO_LONG: ErrorReason
ERROR_REASON_CHAT_TEMPLATE: ErrorReason
ERROR_REASON_MALFORMED_MESSAGE: ErrorReason
ERROR_REASON_UNSUPPORTED_OPTION: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
ERROR_REASON_NOT_FOUND: ErrorReason
ERROR_REASON_DUPLICATE_REQUEST_ID: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_MESSAGE_TOO_LARGE: ErrorReason
ERROR_REASON_UNAVAILABLE: ErrorReason
ERROR_REASON_ENGINE_FAILED: ErrorReason
ERROR_REASON_INSUFFICIENT_MEMORY: ErrorReason
ERROR_REASON_ABORTED: ErrorReason
ERROR_REASON_GENERATION_FAILED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_ENGINE_ERROR: ErrorReason
ERROR_REASON_ARTIFACT: ErrorReason
ERROR_REASON_ARTIFACT_MISSING: ErrorReason
ERROR_REASON_ARTIFACT_CORRUPT: ErrorReason
ERROR_REASON_ARTIFACT_UNSUPPORTED: ErrorReason
ERROR_REASON_GRAPH_CONTRACT: ErrorReason
ERROR_REASON_CONFIGURATION: ErrorReason
ERROR_REASON_DURABILITY: ErrorReason
ERROR_REASON_CHECKPOINT_MISMATCH: ErrorReason
ERROR_REASON_CHECKPOINT_DAMAGED: ErrorReason
ERROR_REASON_RESUME_POINT_GONE: ErrorReason
ERROR_REASON_TAKEN_OVER: ErrorReason

class GenerationError(_message.Message):
    __slots__ = ("reason", "message", "retryable", "correlation_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    message: str
    retryable: bool
    correlation_id: str
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., retryable: bool = ..., correlation_id: _Optional[str] = ...) -> None: ...
