import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from mlxstream.v1 import graph_pb2 as _graph_pb2
from mlxstream.v1 import options_pb2 as _options_pb2
from mlxstream.v1 import prompt_pb2 as _prompt_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_AVAILABLE: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_AVAILABLE: ModelState
MODEL_STATE_FAILED: ModelState

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model", "schema_revision", "minimum_client_revision", "server_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_CLIENT_REVISION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    schema_revision: int
    minimum_client_revision: int
    server_version: str
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., schema_revision: _Optional[int] = ..., minimum_client_revision: _Optional[int] = ..., server_version: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "weights_fingerprint", "model_type", "graph", "declaration", "geometry", "context_length", "vocab_size", "eos_token_ids", "bos_token_id", "has_chat_template", "option_defaults", "runtime", "compute_dtype", "stored_quantization", "weights_bytes", "parameters", "load_time", "max_rows", "kv_storage", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    OPTION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    STORED_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_STORAGE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weights_fingerprint: str
    model_type: str
    graph: _graph_pb2.GraphDescriptor
    declaration: _graph_pb2.GraphDeclaration
    geometry: _graph_pb2.GraphGeometry
    context_length: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    has_chat_template: bool
    option_defaults: _options_pb2.GenerateOptions
    runtime: RuntimeInfo
    compute_dtype: str
    stored_quantization: str
    weights_bytes: int
    parameters: int
    load_time: _duration_pb2.Duration
    max_rows: int
    kv_storage: str
    adapters: _containers.RepeatedCompositeFieldContainer[MountedAdapter]
    def __init__(self, name: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., model_type: _Optional[str] = ..., graph: _Optional[_Union[_graph_pb2.GraphDescriptor, _Mapping]] = ..., declaration: _Optional[_Union[_graph_pb2.GraphDeclaration, _Mapping]] = ..., geometry: _Optional[_Union[_graph_pb2.GraphGeometry, _Mapping]] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., has_chat_template: bool = ..., option_defaults: _Optional[_Union[_options_pb2.GenerateOptions, _Mapping]] = ..., runtime: _Optional[_Union[RuntimeInfo, _Mapping]] = ..., compute_dtype: _Optional[str] = ..., stored_quantization: _Optional[str] = ..., weights_bytes: _Optional[int] = ..., parameters: _Optional[int] = ..., load_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_rows: _Optional[int] = ..., kv_storage: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[MountedAdapter, _Mapping]]] = ...) -> None: ...

class MountedAdapter(_message.Message):
    __slots__ = ("id", "revision", "rank", "scale")
    ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    id: str
    revision: str
    rank: int
    scale: float
    def __init__(self, id: _Optional[str] = ..., revision: _Optional[str] = ..., rank: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class RuntimeInfo(_message.Message):
    __slots__ = ("device", "device_name", "mlx_version", "blas", "blas_optimized", "remedy")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    MLX_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLAS_FIELD_NUMBER: _ClassVar[int]
    BLAS_OPTIMIZED_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    device: str
    device_name: str
    mlx_version: str
    blas: str
    blas_optimized: bool
    remedy: str
    def __init__(self, device: _Optional[str] = ..., device_name: _Optional[str] = ..., mlx_version: _Optional[str] = ..., blas: _Optional[str] = ..., blas_optimized: bool = ..., remedy: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelSummary]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[ModelSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ModelSummary(_message.Message):
    __slots__ = ("name", "state", "model_type", "weights_fingerprint", "context_length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ModelState
    model_type: str
    weights_fingerprint: str
    context_length: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., model_type: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., context_length: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "add_special_tokens", "parse_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    add_special_tokens: bool
    parse_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., add_special_tokens: bool = ..., parse_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "model")
    IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    model: str
    def __init__(self, text: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RenderChatRequest(_message.Message):
    __slots__ = ("model", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    chat: _prompt_pb2.ChatPrompt
    def __init__(self, model: _Optional[str] = ..., chat: _Optional[_Union[_prompt_pb2.ChatPrompt, _Mapping]] = ...) -> None: ...

class RenderChatResponse(_message.Message):
    __slots__ = ("text", "ids", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    def __init__(self, text: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ...) -> None: ...

class EstimateMemoryRequest(_message.Message):
    __slots__ = ("model", "prompt_tokens", "max_tokens", "rows", "images")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt_tokens: int
    max_tokens: int
    rows: int
    images: int
    def __init__(self, model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., rows: _Optional[int] = ..., images: _Optional[int] = ...) -> None: ...

class EstimateMemoryResponse(_message.Message):
    __slots__ = ("weights_bytes", "kv_bytes", "workspace_bytes", "total_bytes", "budget_bytes", "fits", "max_context_tokens")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    total_bytes: int
    budget_bytes: int
    fits: bool
    max_context_tokens: int
    def __init__(self, weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., fits: bool = ..., max_context_tokens: _Optional[int] = ...) -> None: ...
