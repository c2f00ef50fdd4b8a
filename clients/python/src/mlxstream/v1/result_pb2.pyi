from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason

class GeneratedToken(_message.Message):
    __slots__ = ("token", "index", "text_bytes", "logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    index: int
    text_bytes: bytes
    logprobs: TokenLogprobs
    def __init__(self, token: _Optional[int] = ..., index: _Optional[int] = ..., text_bytes: _Optional[bytes] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class GenerateStats(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "generated_tokens", "prefill_tps", "decode_tps", "prefill_ms", "decode_ms", "cache_tokens", "queue_ms", "time_to_first_token_ms", "speculation", "fill", "denoising")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    DENOISING_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_tps: float
    decode_tps: float
    prefill_ms: float
    decode_ms: float
    cache_tokens: _containers.RepeatedScalarFieldContainer[int]
    queue_ms: float
    time_to_first_token_ms: float
    speculation: SpeculationStats
    fill: FillStats
    denoising: DenoisingStats
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefill_tps: _Optional[float] = ..., decode_tps: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., cache_tokens: _Optional[_Iterable[int]] = ..., queue_ms: _Optional[float] = ..., time_to_first_token_ms: _Optional[float] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., fill: _Optional[_Union[FillStats, _Mapping]] = ..., denoising: _Optional[_Union[DenoisingStats, _Mapping]] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("drafted_tokens", "accepted_tokens", "rejected_tokens", "rounds", "target_calls", "accepted_by_position")
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_CALLS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    drafted_tokens: int
    accepted_tokens: int
    rejected_tokens: int
    rounds: int
    target_calls: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., rejected_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., target_calls: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ...) -> None: ...

class FillStats(_message.Message):
    __slots__ = ("proposed_spans", "filled_tokens", "rejected_tokens")
    PROPOSED_SPANS_FIELD_NUMBER: _ClassVar[int]
    FILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    proposed_spans: int
    filled_tokens: int
    rejected_tokens: int
    def __init__(self, proposed_spans: _Optional[int] = ..., filled_tokens: _Optional[int] = ..., rejected_tokens: _Optional[int] = ...) -> None: ...

class DenoisingStats(_message.Message):
    __slots__ = ("steps", "blocks", "canvas_tokens")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CANVAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    blocks: int
    canvas_tokens: int
    def __init__(self, steps: _Optional[int] = ..., blocks: _Optional[int] = ..., canvas_tokens: _Optional[int] = ...) -> None: ...
