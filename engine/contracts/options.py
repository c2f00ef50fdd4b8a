"""GenerateOptions: every knob a caller can turn, validated on construction.

`None` (or empty) means unset: the model's default applies, then ours. Field paths in errors are those of the
public schema. Ranges that depend on the model (vocabulary, context) are checked by `engine.generation.planning`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.contracts.errors import FieldViolation, InvalidRequestError

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
MAX_STOP_SEQUENCES = 64
MAX_STOP_CHARACTERS = 4096
MAX_TOP_LOGPROBS = 20

HlgMode = Literal["parametric", "oetf", "eotf", "pipeline", "shaper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSelection:
    """One mounted adapter, with an optional scale that replaces its own."""

    id: str
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HlgOptions:
    """Tone-curve sampler: a mode and the parameters that were set, by their schema names.

    `pivot` belongs to mode "parametric" alone.
    """

    mode: HlgMode
    parameters: tuple[tuple[str, float], ...] = ()
    pivot: Literal["top", "entropy", "median"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Structured output: one kind and its source text; `choices` is for kind "choice" alone."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    source: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Prefix-store behaviour of one request."""

    bypass: bool = False
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding: tokens to draft per round, and the name of the source."""

    draft_tokens: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingOptions:
    """Knobs of the block-diffusion method; None means the method's default."""

    max_denoising_steps: int | None = None
    min_canvas_length: int | None = None
    max_canvas_length: int | None = None
    full_canvas: bool | None = None
    sampler: Literal["confidence-threshold", "entropy-bound"] | None = None
    threshold: float | None = None
    entropy_bound: float | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of one generation. Source: reference, autoregressive §1.1 (names, defaults, meaning)."""

    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    stop_sequences: tuple[str, ...] = ()
    prefill_chunk_size: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens_to_keep: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    xtc_special_tokens: tuple[int, ...] = ()
    seed: int | None = None
    hlg: HlgOptions | None = None
    curve: tuple[tuple[float, float], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    adapters: tuple[AdapterSelection, ...] = ()
    constraint: Constraint | None = None
    checkpoint_every_tokens: int | None = None
    cache_session_id: str | None = None
    cache: CacheOptions | None = None
    speculation: SpeculationOptions | None = None
    fill: Literal["off", "strict", "echo"] | None = None
    denoising: DenoisingOptions | None = None

    def __post_init__(self) -> None:
        """Check every static range at once; raises `InvalidRequestError` with one violation per bad field."""
        found = [violation for check in _CHECKS for violation in check(self)]
        if found:
            raise InvalidRequestError(found)


def _path(name: str) -> str:
    return f"options.{name}"


def _integer_ranges(options: GenerateOptions) -> list[FieldViolation]:
    limits = {
        "max_tokens": (1, UINT32_MAX),
        "prefill_chunk_size": (1, UINT32_MAX),
        "top_k": (0, UINT32_MAX),
        "min_tokens_to_keep": (1, UINT32_MAX),
        "seed": (0, UINT64_MAX),
        "repetition_context_size": (0, UINT32_MAX),
        "presence_context_size": (0, UINT32_MAX),
        "frequency_context_size": (0, UINT32_MAX),
        "top_logprobs": (0, MAX_TOP_LOGPROBS),
        "checkpoint_every_tokens": (1, UINT32_MAX),
    }
    found = []
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            found.append(FieldViolation(_path(name), f"must be from {low} to {high}, got {value}"))
    return found


def _number_ranges(options: GenerateOptions) -> list[FieldViolation]:
    limits = {
        "temperature": (0.0, math.inf),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "xtc_probability": (0.0, 1.0),
        "xtc_threshold": (0.0, 0.5),
        "repetition_penalty": (0.0, math.inf),
        "presence_penalty": (-math.inf, math.inf),
        "frequency_penalty": (-math.inf, math.inf),
    }
    found = []
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if value is None:
            continue
        if not math.isfinite(value):
            found.append(FieldViolation(_path(name), f"must be a finite number, got {value}"))
        elif not low <= value <= high:
            bound = f"from {low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
            found.append(FieldViolation(_path(name), f"must be {bound}, got {value!r}"))
    if options.repetition_penalty == 0:
        found.append(FieldViolation(_path("repetition_penalty"), "must be above 0; 1 or unset means off"))
    for index, (token, bias) in enumerate(options.logit_bias):
        if not math.isfinite(bias):
            found.append(
                FieldViolation(_path(f"logit_bias[{index}]"), f"bias of token {token} must be finite, got {bias}")
            )
    return found


def _stop_sequences(options: GenerateOptions) -> list[FieldViolation]:
    found = []
    if len(options.stop_sequences) > MAX_STOP_SEQUENCES:
        found.append(
            FieldViolation(
                _path("stop_sequences"), f"at most {MAX_STOP_SEQUENCES} are allowed, got {len(options.stop_sequences)}"
            )
        )
    for index, stop in enumerate(options.stop_sequences[: MAX_STOP_SEQUENCES + 1]):
        if not stop:
            found.append(FieldViolation(_path(f"stop_sequences[{index}]"), "must not be empty"))
        elif len(stop) > MAX_STOP_CHARACTERS:
            found.append(
                FieldViolation(
                    _path(f"stop_sequences[{index}]"),
                    f"at most {MAX_STOP_CHARACTERS} characters are allowed, got {len(stop)}",
                )
            )
    return found


_CHECKS = (_integer_ranges, _number_ranges, _stop_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """Options after defaults: concrete values that one generation runs with, and that `Started` echoes."""

    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_sequences: tuple[str, ...]
    prefill_chunk_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens_to_keep: int
    seed: int
    seed_was_explicit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionDefaults:
    """The model's own defaults (from `generation_config.json`); None where the model states none."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
