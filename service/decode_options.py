"""GenerateOptions from the wire, faithfully: whether an option can be honoured is for the engine to say."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.errors import InvalidRequestError
from engine.contracts.hlg import HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper
from engine.contracts.option_groups import (
    AdapterSelection,
    CacheOptions,
    Constraint,
    DenoisingOptions,
    SpeculationOptions,
)
from engine.contracts.options import GenerateOptions
from mlxstream.v1 import options_pb2
from service.decode_values import refuse_bad_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.message import Message

    from engine.contracts.hlg import HlgCurve

# Optional scalars whose name and meaning are the same on both sides.
SCALARS: Final = (
    "max_tokens",
    "prefill_chunk_size",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens_to_keep",
    "xtc_probability",
    "xtc_threshold",
    "seed",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
    "logprobs",
    "top_logprobs",
    "checkpoint_every_tokens",
    "cache_session_id",
)
DENOISING_SCALARS: Final = (
    "max_denoising_steps",
    "min_canvas_length",
    "max_canvas_length",
    "full_canvas",
    "threshold",
    "entropy_bound",
    "t_min",
    "t_max",
    "stability_threshold",
    "confidence_threshold",
)

_FILL_MODES = MappingProxyType(
    {options_pb2.FILL_MODE_OFF: "off", options_pb2.FILL_MODE_STRICT: "strict", options_pb2.FILL_MODE_ECHO: "echo"}
)
_SAMPLERS = MappingProxyType(
    {
        options_pb2.DENOISING_SAMPLER_CONFIDENCE_THRESHOLD: "confidence-threshold",
        options_pb2.DENOISING_SAMPLER_ENTROPY_BOUND: "entropy-bound",
    }
)
_PIVOTS = MappingProxyType(
    {
        options_pb2.HLG_PIVOT_TOP: "top",
        options_pb2.HLG_PIVOT_ENTROPY: "entropy",
        options_pb2.HLG_PIVOT_MEDIAN: "median",
    }
)
_HLG_CURVES: Final[Mapping[str, Callable[..., HlgCurve]]] = MappingProxyType(
    {curve.MODE: curve for curve in (HlgParametric, HlgOetf, HlgEotf, HlgPipeline, HlgShaper)}
)


def decode_options(options: options_pb2.GenerateOptions) -> GenerateOptions:
    """The options that are set; static ranges are checked.

    Raises:
        InvalidRequestError: a value is none that an option can have, or an option contradicts itself.
    """
    refuse_bad_values(options, "options")
    values: dict[str, Any] = _present(options, SCALARS)
    if options.HasField("eos_token_ids"):
        values["eos_token_ids"] = tuple(options.eos_token_ids.ids)
    if options.HasField("hlg"):
        values["hlg"] = _hlg(options.hlg)
    if options.HasField("cache"):
        values["cache"] = CacheOptions(bypass=options.cache.bypass, salt=options.cache.salt)
    if options.HasField("speculation"):
        values["speculation"] = SpeculationOptions(**_present(options.speculation, ("draft_tokens", "source")))
    if options.HasField("denoising"):
        values["denoising"] = _denoising(options.denoising)
    return GenerateOptions(
        stop_sequences=tuple(options.stop_sequences),
        xtc_special_tokens=tuple(options.xtc_special_tokens),
        curve=tuple((point.x_percent, point.y_percent) for point in options.curve),
        logit_bias=tuple((entry.token, entry.bias) for entry in options.logit_bias),
        adapters=tuple(AdapterSelection(id=one.id, **_present(one, ("scale",))) for one in options.adapters),
        constraint=_constraint(options),
        fill=_FILL_MODES.get(options.fill),  # type: ignore[arg-type]
        **values,
    )


def _present(message: Message, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _hlg(hlg: options_pb2.HlgOptions) -> HlgCurve:
    mode = hlg.WhichOneof("mode")
    if mode is None:
        raise InvalidRequestError.of("options.hlg", "one of parametric, oetf, eotf, pipeline and shaper must be set")
    arm = getattr(hlg, mode)
    values = _present(arm, tuple(field.name for field in arm.DESCRIPTOR.fields if field.enum_type is None))
    if mode == "parametric" and hlg.parametric.pivot in _PIVOTS:
        values["pivot"] = _PIVOTS[hlg.parametric.pivot]
    return _HLG_CURVES[mode](**values)


def _constraint(options: options_pb2.GenerateOptions) -> Constraint | None:
    match options.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return Constraint(kind="json_object")
        case "choice":
            return Constraint(kind="choice", choices=tuple(options.choice.choices))
        case kind:
            return Constraint(kind=kind, source=getattr(options, kind))


def _denoising(denoising: options_pb2.DenoisingOptions) -> DenoisingOptions:
    return DenoisingOptions(
        sampler=_SAMPLERS.get(denoising.sampler),  # type: ignore[arg-type]
        **_present(denoising, DENOISING_SCALARS),
    )
