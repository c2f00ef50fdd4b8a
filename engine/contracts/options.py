"""GenerateOptions: every knob a caller can turn, validated on construction.

`None` (or empty) means unset: the model's default applies, then ours. Field paths in errors are those of the
public schema. Ranges that depend on the model (vocabulary, context) are checked by `engine.generation.planning`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from engine.contracts.curve_points import curve_violations
from engine.contracts.errors import FieldViolation, InvalidRequestError
from engine.contracts.hlg import hlg_violations
from engine.contracts.option_groups import UINT32_MAX, label_violations
from engine.contracts.ranges import Range, range_violations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.contracts.denoising import DenoisingPlan
    from engine.contracts.hlg import HlgCurve
    from engine.contracts.option_groups import (
        AdapterSelection,
        CacheOptions,
        Constraint,
        DenoisingOptions,
        SpeculationOptions,
    )

UINT64_MAX: Final = 2**64 - 1
MAX_STOP_SEQUENCES: Final = 64
MAX_STOP_CHARACTERS: Final = 4096
MAX_TOP_LOGPROBS: Final = 20
XTC_THRESHOLD: Final = 0.1
"""Probability above which a token is a top choice when the threshold is not set."""
PENALTY_WINDOW_TOKENS: Final = 20
"""Newest tokens that a penalty sees when its own window is not set."""
MAX_TOKEN_IDS: Final = 1024
MAX_PROTECTED_IDS: Final = 2 * MAX_TOKEN_IDS  # the default holds all end tokens and a line break
MAX_LOGIT_BIASES: Final = 65_536
MAX_ADAPTERS: Final = 64

_WINDOW: Final = Range(0, UINT32_MAX)
_COUNT: Final = Range(1, UINT32_MAX)
_PROBABILITY: Final = Range(0.0, 1.0)
_FINITE: Final = Range(-math.inf, math.inf)
_RANGES: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "max_tokens": _COUNT,
        "prefill_chunk_size": _COUNT,
        "temperature": Range(0.0, math.inf),
        "top_p": _PROBABILITY,
        "top_k": Range(0, UINT32_MAX),
        "min_p": _PROBABILITY,
        "min_tokens_to_keep": _COUNT,
        "xtc_probability": _PROBABILITY,
        "xtc_threshold": Range(0.0, 0.5),
        "seed": Range(0, UINT64_MAX),
        "repetition_penalty": Range(0.0, math.inf, above=True),
        "repetition_context_size": _WINDOW,
        "presence_penalty": _FINITE,
        "presence_context_size": _WINDOW,
        "frequency_penalty": _FINITE,
        "frequency_context_size": _WINDOW,
        "top_logprobs": Range(0, MAX_TOP_LOGPROBS),
        "checkpoint_every_tokens": _COUNT,
    }
)
_COUNTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "stop_sequences": MAX_STOP_SEQUENCES,
        "eos_token_ids": MAX_TOKEN_IDS,
        "xtc_special_tokens": MAX_PROTECTED_IDS,
        "logit_bias": MAX_LOGIT_BIASES,
        "adapters": MAX_ADAPTERS,
    }
)


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
    hlg: HlgCurve | None = None
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
        found = range_violations(_RANGES, self, "options")
        # Lists that are too long are not read.
        found += _too_many(self) or [*_stops(self), *_biases(self), *_groups(self), *_contradictions(self)]
        if found:
            raise InvalidRequestError(found)


def _too_many(options: GenerateOptions) -> list[FieldViolation]:
    counts = {name: len(getattr(options, name) or ()) for name in _COUNTS}
    return [
        FieldViolation(f"options.{name}", f"at most {_COUNTS[name]} are allowed, got {count}")
        for name, count in counts.items()
        if count > _COUNTS[name]
    ]


def _stops(options: GenerateOptions) -> list[FieldViolation]:
    found = []
    for index, stop in enumerate(options.stop_sequences):
        path = f"options.stop_sequences[{index}]"
        if not stop:
            found.append(FieldViolation(path, "must not be empty"))
        elif len(stop) > MAX_STOP_CHARACTERS:
            found.append(FieldViolation(path, f"at most {MAX_STOP_CHARACTERS} characters are allowed, got {len(stop)}"))
    return found


def _biases(options: GenerateOptions) -> list[FieldViolation]:
    tokens = {token for token, _ in options.logit_bias}
    if len(tokens) == len(options.logit_bias) and all(math.isfinite(bias) for _, bias in options.logit_bias):
        return []  # a long list is looked at once
    found, seen = [], set()
    for index, (token, bias) in enumerate(options.logit_bias):
        path = f"options.logit_bias[{index}]"
        if token in seen:
            found.append(FieldViolation(f"{path}.token", f"token {token} has a bias already"))
        if (violation := _FINITE.violation(f"{path}.bias", bias)) is not None:
            found.append(violation)
        seen.add(token)
    return found


def _groups(options: GenerateOptions) -> list[FieldViolation]:
    found = curve_violations(options.curve, "options.curve") if options.curve else []
    found += hlg_violations(options.hlg, "options.hlg") if options.hlg is not None else []
    for index, adapter in enumerate(options.adapters):
        found += adapter.violations(f"options.adapters[{index}]")
    if options.constraint is not None:
        found += options.constraint.violations("options")
    for name in ("cache", "speculation", "denoising"):
        group = getattr(options, name)
        found += [] if group is None else group.violations(f"options.{name}")
    return found + label_violations(options.cache_session_id, "options.cache_session_id")


def _contradictions(options: GenerateOptions) -> list[FieldViolation]:
    if options.hlg is not None and options.curve:
        return [FieldViolation("options.hlg", "cannot be combined with curve: each replaces the other filters")]
    return []


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
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    repetition_context_size: int = PENALTY_WINDOW_TOKENS
    presence_penalty: float = 0.0
    presence_context_size: int = PENALTY_WINDOW_TOKENS
    frequency_penalty: float = 0.0
    frequency_context_size: int = PENALTY_WINDOW_TOKENS
    xtc_probability: float = 0.0
    xtc_threshold: float = XTC_THRESHOLD
    xtc_special_tokens: tuple[int, ...] = ()
    hlg: HlgCurve | None = None
    curve: tuple[tuple[float, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    adapters: tuple[AdapterSelection, ...] = ()
    denoising: DenoisingPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionDefaults:
    """The model's own defaults (from `generation_config.json`); None where the model states none."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
