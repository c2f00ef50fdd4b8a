import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from mlxstream.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_PHASE_UNSPECIFIED: _ClassVar[LoadPhase]
    LOAD_PHASE_FETCHING: _ClassVar[LoadPhase]
    LOAD_PHASE_VALIDATING: _ClassVar[LoadPhase]
    LOAD_PHASE_READING: _ClassVar[LoadPhase]
    LOAD_PHASE_WARMING: _ClassVar[LoadPhase]

class GenerationPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATION_PHASE_UNSPECIFIED: _ClassVar[GenerationPhase]
    GENERATION_PHASE_QUEUED: _ClassVar[GenerationPhase]
    GENERATION_PHASE_PREFILLING: _ClassVar[GenerationPhase]
    GENERATION_PHASE_DECODING: _ClassVar[GenerationPhase]
    GENERATION_PHASE_DETACHED: _ClassVar[GenerationPhase]

class NotReadyReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_READY_REASON_UNSPECIFIED: _ClassVar[NotReadyReason]
    NOT_READY_REASON_LOADING: _ClassVar[NotReadyReason]
    NOT_READY_REASON_NO_MODEL: _ClassVar[NotReadyReason]
    NOT_READY_REASON_STALLED: _ClassVar[NotReadyReason]
    NOT_READY_REASON_OUT_OF_MEMORY: _ClassVar[NotReadyReason]
    NOT_READY_REASON_DRAINING: _ClassVar[NotReadyReason]
    NOT_READY_REASON_FAILED: _ClassVar[NotReadyReason]
    NOT_READY_REASON_STOPPING: _ClassVar[NotReadyReason]
LOAD_PHASE_UNSPECIFIED: LoadPhase
LOAD_PHASE_FETCHING: LoadPhase
LOAD_PHASE_VALIDATING: LoadPhase
LOAD_PHASE_READING: LoadPhase
LOAD_PHASE_WARMING: LoadPhase
GENERATION_PHASE_UNSPECIFIED: GenerationPhase
GENERATION_PHASE_QUEUED: GenerationPhase
GENERATION_PHASE_PREFILLING: GenerationPhase
GENERATION_PHASE_DECODING: GenerationPhase
GENERATION_PHASE_DETACHED: GenerationPhase
NOT_READY_REASON_UNSPECIFIED: NotReadyReason
NOT_READY_REASON_LOADING: NotReadyReason
NOT_READY_REASON_NO_MODEL: NotReadyReason
NOT_READY_REASON_STALLED: NotReadyReason
NOT_READY_REASON_OUT_OF_MEMORY: NotReadyReason
NOT_READY_REASON_DRAINING: NotReadyReason
NOT_READY_REASON_FAILED: NotReadyReason
NOT_READY_REASON_STOPPING: NotReadyReason

class LoadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("progress", "loaded")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    progress: LoadProgress
    loaded: _model_pb2.ModelInfo
    def __init__(self, progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., loaded: _Optional[_Union[_model_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("phase", "done_bytes", "total_bytes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    phase: LoadPhase
    done_bytes: int
    total_bytes: int
    def __init__(self, phase: _Optional[_Union[LoadPhase, str]] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("freed_bytes", "aborted_generations")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ABORTED_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    aborted_generations: int
    def __init__(self, freed_bytes: _Optional[int] = ..., aborted_generations: _Optional[int] = ...) -> None: ...

class MountAdapterRequest(_message.Message):
    __slots__ = ("id", "source", "model")
    ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    source: str
    model: str
    def __init__(self, id: _Optional[str] = ..., source: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class MountAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("id", "revision", "rank", "scale", "mounted_layers", "skipped_tensors", "file_bytes", "resident_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MOUNTED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TENSORS_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    revision: str
    rank: int
    scale: float
    mounted_layers: int
    skipped_tensors: int
    file_bytes: int
    resident_bytes: int
    def __init__(self, id: _Optional[str] = ..., revision: _Optional[str] = ..., rank: _Optional[int] = ..., scale: _Optional[float] = ..., mounted_layers: _Optional[int] = ..., skipped_tensors: _Optional[int] = ..., file_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class UnmountAdapterRequest(_message.Message):
    __slots__ = ("id", "model")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class UnmountAdapterResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("model", "page_size", "page_token")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    page_size: int
    page_token: str
    def __init__(self, model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListGenerationsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListGenerationsResponse(_message.Message):
    __slots__ = ("generations", "next_page_token")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[GenerationInfo]
    next_page_token: str
    def __init__(self, generations: _Optional[_Iterable[_Union[GenerationInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GenerationInfo(_message.Message):
    __slots__ = ("generation_id", "request_id", "model", "phase", "prompt_tokens", "prefilled_tokens", "generated_tokens", "create_time")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    generation_id: str
    request_id: str
    model: str
    phase: GenerationPhase
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, generation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., phase: _Optional[_Union[GenerationPhase, str]] = ..., prompt_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "queued", "queue_limit", "kv_utilization", "prefix_cache_bytes", "decode_tps", "step_age", "draining", "model", "max_rows", "kv_bytes", "kv_limit_bytes", "prefix_cache_limit_bytes", "prefill_tps", "generated_tokens", "prefilled_tokens", "not_ready_reason", "memory_bytes", "free_memory_bytes")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    KV_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_TPS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    queue_limit: int
    kv_utilization: float
    prefix_cache_bytes: int
    decode_tps: float
    step_age: _duration_pb2.Duration
    draining: bool
    model: str
    max_rows: int
    kv_bytes: int
    kv_limit_bytes: int
    prefix_cache_limit_bytes: int
    prefill_tps: float
    generated_tokens: int
    prefilled_tokens: int
    not_ready_reason: NotReadyReason
    memory_bytes: int
    free_memory_bytes: int
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ..., queue_limit: _Optional[int] = ..., kv_utilization: _Optional[float] = ..., prefix_cache_bytes: _Optional[int] = ..., decode_tps: _Optional[float] = ..., step_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: bool = ..., model: _Optional[str] = ..., max_rows: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_limit_bytes: _Optional[int] = ..., prefix_cache_limit_bytes: _Optional[int] = ..., prefill_tps: _Optional[float] = ..., generated_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., not_ready_reason: _Optional[_Union[NotReadyReason, str]] = ..., memory_bytes: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ...) -> None: ...

class ClearPrefixCacheRequest(_message.Message):
    __slots__ = ("model", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    salt: str
    def __init__(self, model: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class ClearPrefixCacheResponse(_message.Message):
    __slots__ = ("cleared_entries", "freed_bytes")
    CLEARED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    cleared_entries: int
    freed_bytes: int
    def __init__(self, cleared_entries: _Optional[int] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished_generations", "aborted_generations")
    FINISHED_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    finished_generations: int
    aborted_generations: int
    def __init__(self, finished_generations: _Optional[int] = ..., aborted_generations: _Optional[int] = ...) -> None: ...
