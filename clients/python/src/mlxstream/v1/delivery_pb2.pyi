import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeadlinePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEADLINE_POLICY_UNSPECIFIED: _ClassVar[DeadlinePolicy]
    DEADLINE_POLICY_FAIL: _ClassVar[DeadlinePolicy]
    DEADLINE_POLICY_PARTIAL_RESULT: _ClassVar[DeadlinePolicy]
DEADLINE_POLICY_UNSPECIFIED: DeadlinePolicy
DEADLINE_POLICY_FAIL: DeadlinePolicy
DEADLINE_POLICY_PARTIAL_RESULT: DeadlinePolicy

class DeliveryOptions(_message.Message):
    __slots__ = ("max_tokens_per_message", "max_delay", "include_text", "include_token_bytes", "include_cache_tokens", "heartbeat_interval", "draft_blocks", "durable", "deadline_policy")
    MAX_TOKENS_PER_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_DELAY_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TEXT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_POLICY_FIELD_NUMBER: _ClassVar[int]
    max_tokens_per_message: int
    max_delay: _duration_pb2.Duration
    include_text: bool
    include_token_bytes: bool
    include_cache_tokens: bool
    heartbeat_interval: _duration_pb2.Duration
    draft_blocks: bool
    durable: bool
    deadline_policy: DeadlinePolicy
    def __init__(self, max_tokens_per_message: _Optional[int] = ..., max_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., include_text: bool = ..., include_token_bytes: bool = ..., include_cache_tokens: bool = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draft_blocks: bool = ..., durable: bool = ..., deadline_policy: _Optional[_Union[DeadlinePolicy, str]] = ...) -> None: ...
