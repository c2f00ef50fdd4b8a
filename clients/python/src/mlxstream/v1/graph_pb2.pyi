from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerationMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATION_METHOD_UNSPECIFIED: _ClassVar[GenerationMethod]
    GENERATION_METHOD_AUTOREGRESSIVE: _ClassVar[GenerationMethod]
    GENERATION_METHOD_DENOISING: _ClassVar[GenerationMethod]

class ExecutionMechanism(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTION_MECHANISM_UNSPECIFIED: _ClassVar[ExecutionMechanism]
    EXECUTION_MECHANISM_CONTINUOUS: _ClassVar[ExecutionMechanism]
    EXECUTION_MECHANISM_UNSUPPORTED: _ClassVar[ExecutionMechanism]

class MediaInput(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_INPUT_UNSPECIFIED: _ClassVar[MediaInput]
    MEDIA_INPUT_EMBEDDINGS: _ClassVar[MediaInput]
    MEDIA_INPUT_EMBEDDINGS_AND_POSITIONS: _ClassVar[MediaInput]
    MEDIA_INPUT_PIXELS: _ClassVar[MediaInput]

class DelayedAffine(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELAYED_AFFINE_UNSPECIFIED: _ClassVar[DelayedAffine]
    DELAYED_AFFINE_NONE: _ClassVar[DelayedAffine]
    DELAYED_AFFINE_ORDINARY: _ClassVar[DelayedAffine]
    DELAYED_AFFINE_ALL: _ClassVar[DelayedAffine]
GENERATION_METHOD_UNSPECIFIED: GenerationMethod
GENERATION_METHOD_AUTOREGRESSIVE: GenerationMethod
GENERATION_METHOD_DENOISING: GenerationMethod
EXECUTION_MECHANISM_UNSPECIFIED: ExecutionMechanism
EXECUTION_MECHANISM_CONTINUOUS: ExecutionMechanism
EXECUTION_MECHANISM_UNSUPPORTED: ExecutionMechanism
MEDIA_INPUT_UNSPECIFIED: MediaInput
MEDIA_INPUT_EMBEDDINGS: MediaInput
MEDIA_INPUT_EMBEDDINGS_AND_POSITIONS: MediaInput
MEDIA_INPUT_PIXELS: MediaInput
DELAYED_AFFINE_UNSPECIFIED: DelayedAffine
DELAYED_AFFINE_NONE: DelayedAffine
DELAYED_AFFINE_ORDINARY: DelayedAffine
DELAYED_AFFINE_ALL: DelayedAffine

class GraphDescriptor(_message.Message):
    __slots__ = ("id", "backend", "graph_abi", "state_abi", "artifact")
    ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    GRAPH_ABI_FIELD_NUMBER: _ClassVar[int]
    STATE_ABI_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    id: str
    backend: str
    graph_abi: str
    state_abi: str
    artifact: str
    def __init__(self, id: _Optional[str] = ..., backend: _Optional[str] = ..., graph_abi: _Optional[str] = ..., state_abi: _Optional[str] = ..., artifact: _Optional[str] = ...) -> None: ...

class GraphGeometry(_message.Message):
    __slots__ = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "context_length", "layer_types", "sliding_window", "canvas_length")
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LAYER_TYPES_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    CANVAS_LENGTH_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    layer_types: _containers.RepeatedScalarFieldContainer[str]
    sliding_window: int
    canvas_length: int
    def __init__(self, vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., layers: _Optional[int] = ..., heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., context_length: _Optional[int] = ..., layer_types: _Optional[_Iterable[str]] = ..., sliding_window: _Optional[int] = ..., canvas_length: _Optional[int] = ...) -> None: ...

class GraphDeclaration(_message.Message):
    __slots__ = ("method", "packed_segments", "adapters", "media", "paged_attention", "compiled_decode", "sparse_attention", "embeddings", "hidden_layer_taps", "native_draft", "prefill", "kv", "speculation")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PACKED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    PAGED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    COMPILED_DECODE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYER_TAPS_FIELD_NUMBER: _ClassVar[int]
    NATIVE_DRAFT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    method: GenerationMethod
    packed_segments: bool
    adapters: AdapterCapability
    media: MediaCapability
    paged_attention: bool
    compiled_decode: bool
    sparse_attention: bool
    embeddings: bool
    hidden_layer_taps: bool
    native_draft: DraftCapability
    prefill: PrefillCapability
    kv: KvCapability
    speculation: SpeculationCapability
    def __init__(self, method: _Optional[_Union[GenerationMethod, str]] = ..., packed_segments: bool = ..., adapters: _Optional[_Union[AdapterCapability, _Mapping]] = ..., media: _Optional[_Union[MediaCapability, _Mapping]] = ..., paged_attention: bool = ..., compiled_decode: bool = ..., sparse_attention: bool = ..., embeddings: bool = ..., hidden_layer_taps: bool = ..., native_draft: _Optional[_Union[DraftCapability, _Mapping]] = ..., prefill: _Optional[_Union[PrefillCapability, _Mapping]] = ..., kv: _Optional[_Union[KvCapability, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationCapability, _Mapping]] = ...) -> None: ...

class AdapterCapability(_message.Message):
    __slots__ = ("batched", "mountable")
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    MOUNTABLE_FIELD_NUMBER: _ClassVar[int]
    batched: bool
    mountable: bool
    def __init__(self, batched: bool = ..., mountable: bool = ...) -> None: ...

class MediaCapability(_message.Message):
    __slots__ = ("input", "video")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    input: MediaInput
    video: bool
    def __init__(self, input: _Optional[_Union[MediaInput, str]] = ..., video: bool = ...) -> None: ...

class DraftCapability(_message.Message):
    __slots__ = ("kind", "num_draft_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_draft_tokens: int
    def __init__(self, kind: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class PrefillCapability(_message.Message):
    __slots__ = ("bounded_workspace",)
    BOUNDED_WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    bounded_workspace: bool
    def __init__(self, bounded_workspace: bool = ...) -> None: ...

class KvCapability(_message.Message):
    __slots__ = ("dense_reads", "delayed_affine")
    DENSE_READS_FIELD_NUMBER: _ClassVar[int]
    DELAYED_AFFINE_FIELD_NUMBER: _ClassVar[int]
    dense_reads: bool
    delayed_affine: DelayedAffine
    def __init__(self, dense_reads: bool = ..., delayed_affine: _Optional[_Union[DelayedAffine, str]] = ...) -> None: ...

class SpeculationCapability(_message.Message):
    __slots__ = ("adapters", "logprobs", "affine_kv", "turbo_kv", "external_tokens", "grammar_proposals", "immediate_affine4")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    AFFINE_KV_FIELD_NUMBER: _ClassVar[int]
    TURBO_KV_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    IMMEDIATE_AFFINE4_FIELD_NUMBER: _ClassVar[int]
    adapters: bool
    logprobs: bool
    affine_kv: bool
    turbo_kv: bool
    external_tokens: bool
    grammar_proposals: bool
    immediate_affine4: bool
    def __init__(self, adapters: bool = ..., logprobs: bool = ..., affine_kv: bool = ..., turbo_kv: bool = ..., external_tokens: bool = ..., grammar_proposals: bool = ..., immediate_affine4: bool = ...) -> None: ...

class ResolvedExecution(_message.Message):
    __slots__ = ("method", "mechanism", "paged_kv", "prompt_cache", "checkpoint", "fill", "compiled_decode", "grammar_jump", "reasons", "kv_storage", "row_tile_tokens")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MECHANISM_FIELD_NUMBER: _ClassVar[int]
    PAGED_KV_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    COMPILED_DECODE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_JUMP_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    KV_STORAGE_FIELD_NUMBER: _ClassVar[int]
    ROW_TILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    method: GenerationMethod
    mechanism: ExecutionMechanism
    paged_kv: bool
    prompt_cache: bool
    checkpoint: bool
    fill: bool
    compiled_decode: bool
    grammar_jump: bool
    reasons: _containers.RepeatedScalarFieldContainer[str]
    kv_storage: str
    row_tile_tokens: int
    def __init__(self, method: _Optional[_Union[GenerationMethod, str]] = ..., mechanism: _Optional[_Union[ExecutionMechanism, str]] = ..., paged_kv: bool = ..., prompt_cache: bool = ..., checkpoint: bool = ..., fill: bool = ..., compiled_decode: bool = ..., grammar_jump: bool = ..., reasons: _Optional[_Iterable[str]] = ..., kv_storage: _Optional[str] = ..., row_tile_tokens: _Optional[int] = ...) -> None: ...
