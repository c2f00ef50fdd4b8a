from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HlgPivot(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HLG_PIVOT_UNSPECIFIED: _ClassVar[HlgPivot]
    HLG_PIVOT_TOP: _ClassVar[HlgPivot]
    HLG_PIVOT_ENTROPY: _ClassVar[HlgPivot]
    HLG_PIVOT_MEDIAN: _ClassVar[HlgPivot]

class FillMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILL_MODE_UNSPECIFIED: _ClassVar[FillMode]
    FILL_MODE_OFF: _ClassVar[FillMode]
    FILL_MODE_STRICT: _ClassVar[FillMode]
    FILL_MODE_ECHO: _ClassVar[FillMode]

class DenoisingSampler(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DENOISING_SAMPLER_UNSPECIFIED: _ClassVar[DenoisingSampler]
    DENOISING_SAMPLER_CONFIDENCE_THRESHOLD: _ClassVar[DenoisingSampler]
    DENOISING_SAMPLER_ENTROPY_BOUND: _ClassVar[DenoisingSampler]
HLG_PIVOT_UNSPECIFIED: HlgPivot
HLG_PIVOT_TOP: HlgPivot
HLG_PIVOT_ENTROPY: HlgPivot
HLG_PIVOT_MEDIAN: HlgPivot
FILL_MODE_UNSPECIFIED: FillMode
FILL_MODE_OFF: FillMode
FILL_MODE_STRICT: FillMode
FILL_MODE_ECHO: FillMode
DENOISING_SAMPLER_UNSPECIFIED: DenoisingSampler
DENOISING_SAMPLER_CONFIDENCE_THRESHOLD: DenoisingSampler
DENOISING_SAMPLER_ENTROPY_BOUND: DenoisingSampler

class GenerateOptions(_message.Message):
    __slots__ = ("max_tokens", "eos_token_ids", "stop_sequences", "prefill_chunk_size", "temperature", "top_p", "top_k", "min_p", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "xtc_special_tokens", "seed", "hlg", "curve", "logit_bias", "repetition_penalty", "repetition_context_size", "presence_penalty", "presence_context_size", "frequency_penalty", "frequency_context_size", "logprobs", "top_logprobs", "adapters", "json_schema", "json_object", "regex", "grammar", "choice", "checkpoint_every_tokens", "cache_session_id", "cache", "speculation", "fill", "denoising")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_TO_KEEP_FIELD_NUMBER: _ClassVar[int]
    XTC_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    XTC_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    XTC_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    HLG_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    DENOISING_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    eos_token_ids: TokenIds
    stop_sequences: _containers.RepeatedScalarFieldContainer[str]
    prefill_chunk_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    hlg: HlgOptions
    curve: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    presence_context_size: int
    frequency_penalty: float
    frequency_context_size: int
    logprobs: bool
    top_logprobs: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterSelection]
    json_schema: str
    json_object: JsonObjectConstraint
    regex: str
    grammar: str
    choice: ChoiceConstraint
    checkpoint_every_tokens: int
    cache_session_id: str
    cache: CacheOptions
    speculation: SpeculationOptions
    fill: FillMode
    denoising: DenoisingOptions
    def __init__(self, max_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., stop_sequences: _Optional[_Iterable[str]] = ..., prefill_chunk_size: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., min_tokens_to_keep: _Optional[int] = ..., xtc_probability: _Optional[float] = ..., xtc_threshold: _Optional[float] = ..., xtc_special_tokens: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., hlg: _Optional[_Union[HlgOptions, _Mapping]] = ..., curve: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., repetition_penalty: _Optional[float] = ..., repetition_context_size: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., presence_context_size: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., frequency_context_size: _Optional[int] = ..., logprobs: bool = ..., top_logprobs: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterSelection, _Mapping]]] = ..., json_schema: _Optional[str] = ..., json_object: _Optional[_Union[JsonObjectConstraint, _Mapping]] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[ChoiceConstraint, _Mapping]] = ..., checkpoint_every_tokens: _Optional[int] = ..., cache_session_id: _Optional[str] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., fill: _Optional[_Union[FillMode, str]] = ..., denoising: _Optional[_Union[DenoisingOptions, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token", "bias")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token: int
    bias: float
    def __init__(self, token: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class AdapterSelection(_message.Message):
    __slots__ = ("id", "scale")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    id: str
    scale: float
    def __init__(self, id: _Optional[str] = ..., scale: _Optional[float] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("x_percent", "y_percent")
    X_PERCENT_FIELD_NUMBER: _ClassVar[int]
    Y_PERCENT_FIELD_NUMBER: _ClassVar[int]
    x_percent: float
    y_percent: float
    def __init__(self, x_percent: _Optional[float] = ..., y_percent: _Optional[float] = ...) -> None: ...

class HlgOptions(_message.Message):
    __slots__ = ("parametric", "oetf", "eotf", "pipeline", "shaper")
    PARAMETRIC_FIELD_NUMBER: _ClassVar[int]
    OETF_FIELD_NUMBER: _ClassVar[int]
    EOTF_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    SHAPER_FIELD_NUMBER: _ClassVar[int]
    parametric: HlgParametric
    oetf: HlgOetf
    eotf: HlgEotf
    pipeline: HlgPipeline
    shaper: HlgShaper
    def __init__(self, parametric: _Optional[_Union[HlgParametric, _Mapping]] = ..., oetf: _Optional[_Union[HlgOetf, _Mapping]] = ..., eotf: _Optional[_Union[HlgEotf, _Mapping]] = ..., pipeline: _Optional[_Union[HlgPipeline, _Mapping]] = ..., shaper: _Optional[_Union[HlgShaper, _Mapping]] = ...) -> None: ...

class HlgParametric(_message.Message):
    __slots__ = ("gain", "width", "shoulder", "toe", "pivot", "pivot_offset")
    GAIN_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SHOULDER_FIELD_NUMBER: _ClassVar[int]
    TOE_FIELD_NUMBER: _ClassVar[int]
    PIVOT_FIELD_NUMBER: _ClassVar[int]
    PIVOT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    gain: float
    width: float
    shoulder: float
    toe: float
    pivot: HlgPivot
    pivot_offset: float
    def __init__(self, gain: _Optional[float] = ..., width: _Optional[float] = ..., shoulder: _Optional[float] = ..., toe: _Optional[float] = ..., pivot: _Optional[_Union[HlgPivot, str]] = ..., pivot_offset: _Optional[float] = ...) -> None: ...

class HlgOetf(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HlgEotf(_message.Message):
    __slots__ = ("lw",)
    LW_FIELD_NUMBER: _ClassVar[int]
    lw: float
    def __init__(self, lw: _Optional[float] = ...) -> None: ...

class HlgPipeline(_message.Message):
    __slots__ = ("max_brightness", "lw")
    MAX_BRIGHTNESS_FIELD_NUMBER: _ClassVar[int]
    LW_FIELD_NUMBER: _ClassVar[int]
    max_brightness: float
    lw: float
    def __init__(self, max_brightness: _Optional[float] = ..., lw: _Optional[float] = ...) -> None: ...

class HlgShaper(_message.Message):
    __slots__ = ("window", "lw", "x_m", "y_m", "x_floor", "y_floor", "p", "s_m", "shoulder_a", "target_gap", "ref_gap", "max_brightness")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LW_FIELD_NUMBER: _ClassVar[int]
    X_M_FIELD_NUMBER: _ClassVar[int]
    Y_M_FIELD_NUMBER: _ClassVar[int]
    X_FLOOR_FIELD_NUMBER: _ClassVar[int]
    Y_FLOOR_FIELD_NUMBER: _ClassVar[int]
    P_FIELD_NUMBER: _ClassVar[int]
    S_M_FIELD_NUMBER: _ClassVar[int]
    SHOULDER_A_FIELD_NUMBER: _ClassVar[int]
    TARGET_GAP_FIELD_NUMBER: _ClassVar[int]
    REF_GAP_FIELD_NUMBER: _ClassVar[int]
    MAX_BRIGHTNESS_FIELD_NUMBER: _ClassVar[int]
    window: float
    lw: float
    x_m: float
    y_m: float
    x_floor: float
    y_floor: float
    p: float
    s_m: float
    shoulder_a: float
    target_gap: float
    ref_gap: float
    max_brightness: float
    def __init__(self, window: _Optional[float] = ..., lw: _Optional[float] = ..., x_m: _Optional[float] = ..., y_m: _Optional[float] = ..., x_floor: _Optional[float] = ..., y_floor: _Optional[float] = ..., p: _Optional[float] = ..., s_m: _Optional[float] = ..., shoulder_a: _Optional[float] = ..., target_gap: _Optional[float] = ..., ref_gap: _Optional[float] = ..., max_brightness: _Optional[float] = ...) -> None: ...

class JsonObjectConstraint(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChoiceConstraint(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("bypass", "salt")
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    bypass: bool
    salt: str
    def __init__(self, bypass: bool = ..., salt: _Optional[str] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("draft_tokens", "source")
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    draft_tokens: int
    source: str
    def __init__(self, draft_tokens: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class DenoisingOptions(_message.Message):
    __slots__ = ("max_denoising_steps", "min_canvas_length", "max_canvas_length", "full_canvas", "sampler", "threshold", "entropy_bound", "t_min", "t_max", "stability_threshold", "confidence_threshold")
    MAX_DENOISING_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIN_CANVAS_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_CANVAS_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FULL_CANVAS_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_BOUND_FIELD_NUMBER: _ClassVar[int]
    T_MIN_FIELD_NUMBER: _ClassVar[int]
    T_MAX_FIELD_NUMBER: _ClassVar[int]
    STABILITY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    max_denoising_steps: int
    min_canvas_length: int
    max_canvas_length: int
    full_canvas: bool
    sampler: DenoisingSampler
    threshold: float
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float
    def __init__(self, max_denoising_steps: _Optional[int] = ..., min_canvas_length: _Optional[int] = ..., max_canvas_length: _Optional[int] = ..., full_canvas: bool = ..., sampler: _Optional[_Union[DenoisingSampler, str]] = ..., threshold: _Optional[float] = ..., entropy_bound: _Optional[float] = ..., t_min: _Optional[float] = ..., t_max: _Optional[float] = ..., stability_threshold: _Optional[int] = ..., confidence_threshold: _Optional[float] = ...) -> None: ...
