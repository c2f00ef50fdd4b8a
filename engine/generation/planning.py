"""Turns a caller's options into what will really run: resolved values, execution facts, refusals by name.

Pure: reads the model's facts, touches no array. Everything that depends on the model is checked here, before admission.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from engine.contracts.errors import (
    FieldViolation,
    InvalidRequestError,
    NotFoundError,
    PromptOverLimitError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from engine.contracts.execution import ResolvedExecution
from engine.contracts.kv_scheme import converts_at
from engine.contracts.options import PENALTY_WINDOW_TOKENS, XTC_THRESHOLD, OptionDefaults, ResolvedOptions
from engine.contracts.prefix import PrefixUse, salt_mark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphDeclaration
    from engine.contracts.model import ModelInfo
    from engine.contracts.option_groups import AdapterSelection
    from engine.contracts.options import GenerateOptions
    from engine.contracts.prefill import PrefillPolicy

OUR_DEFAULTS = OptionDefaults(max_tokens=512, temperature=0.0, top_p=0.0, top_k=0, min_p=0.0)

CANVAS_BY_CANVAS = "canvases are computed one by one, so that nothing of a row depends on its company"
NO_CANVAS = "this model generates token by token, and revises no blocks"
ROW_BY_ROW = "the graph does not take packed segments: rows share a step, but are computed one by one"
NOT_AVAILABLE = "this build does not offer it yet"

_UNAVAILABLE: dict[str, Callable[[GenerateOptions], bool]] = {
    "constraint": lambda o: o.constraint is not None,
    "speculation": lambda o: o.speculation is not None,
    "fill": lambda o: o.fill not in (None, "off"),
}


def refuse_unavailable(options: GenerateOptions) -> None:
    """Raise `UnsupportedOptionError` for the first option that is set and cannot be honoured.

    A value that asks for nothing (a penalty of 1, a fill of "off") is honoured by doing nothing.
    """
    for name, is_asked in _UNAVAILABLE.items():
        if is_asked(options):
            raise UnsupportedOptionError(f"options.{name}", NOT_AVAILABLE)


def refuse_for_autoregression(options: GenerateOptions) -> None:
    """Raise `UnsupportedOptionError` for an option that only another method knows."""
    if options.denoising is not None:
        raise UnsupportedOptionError("options.denoising", NO_CANVAS)


def check_prompt_length(prompt_tokens: int, *, context_length: int, max_prompt_tokens: int | None) -> None:
    """Check the length of a prompt against the model's context and the operator's bound.

    Raises:
        PromptOverLimitError: it has more tokens than `max_prompt_tokens`.
        PromptTooLongError: no room for one new token.
    """
    if max_prompt_tokens is not None and prompt_tokens > max_prompt_tokens:
        raise PromptOverLimitError(prompt_tokens=prompt_tokens, context_length=max_prompt_tokens)
    if prompt_tokens >= context_length:
        raise PromptTooLongError(prompt_tokens=prompt_tokens, context_length=context_length)


def check_prompt(
    prompt_ids: Sequence[int],
    *,
    vocab_size: int,
    context_length: int,
    field: str,
    max_prompt_tokens: int | None = None,
) -> None:
    """Check a prompt's ids and length.

    Raises:
        InvalidRequestError: no ids, or one outside the vocabulary (the first bad position is named).
        PromptTooLongError: no room for one new token, or more than `max_prompt_tokens`.
    """
    if not prompt_ids:
        raise InvalidRequestError.of(field, "the prompt is empty: at least one token is needed")
    for position, token in enumerate(prompt_ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError.of(
                f"{field}[{position}]", f"token id {token} is outside the vocabulary of {vocab_size}"
            )
    check_prompt_length(len(prompt_ids), context_length=context_length, max_prompt_tokens=max_prompt_tokens)


def resolve_options(
    options: GenerateOptions,
    model: ModelInfo,
    policy: PrefillPolicy,
    *,
    prompt_tokens: int,
    fresh_seed: int,
    line_break_ids: tuple[int, ...],
) -> ResolvedOptions:
    """Fill in defaults (the caller's value, else the model's, else ours) and check what depends on the model.

    `max_tokens` is cut to the room that the context leaves, so a generation that reaches it ends with LENGTH.

    Raises:
        InvalidRequestError: an id lies outside the vocabulary.
        NotFoundError: an adapter is not mounted.
    """
    check_adapters(options.adapters, model)
    vocab_size = model.geometry.vocab_size
    check_ids("eos_token_ids", options.eos_token_ids or (), vocab_size)
    check_ids("xtc_special_tokens", options.xtc_special_tokens, vocab_size)
    check_ids("logit_bias", [token for token, _ in options.logit_bias], vocab_size, part=".token")
    eos_token_ids = model.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
    defaults = model.option_defaults
    room = model.geometry.context_length - prompt_tokens
    return ResolvedOptions(
        max_tokens=min(_first(options.max_tokens, defaults.max_tokens, OUR_DEFAULTS.max_tokens), room),
        eos_token_ids=eos_token_ids,
        stop_sequences=options.stop_sequences,
        prefill_chunk_size=_first(options.prefill_chunk_size, policy.chunk_size(prompt_tokens)),
        temperature=_first(options.temperature, defaults.temperature, OUR_DEFAULTS.temperature),
        top_p=_first(options.top_p, defaults.top_p, OUR_DEFAULTS.top_p),
        top_k=_first(options.top_k, defaults.top_k, OUR_DEFAULTS.top_k),
        min_p=_first(options.min_p, defaults.min_p, OUR_DEFAULTS.min_p),
        min_tokens_to_keep=_first(options.min_tokens_to_keep, 1),
        seed=_first(options.seed, fresh_seed),
        seed_was_explicit=options.seed is not None,
        logit_bias=options.logit_bias,
        repetition_penalty=_first(options.repetition_penalty, 1.0),
        repetition_context_size=_first(options.repetition_context_size, PENALTY_WINDOW_TOKENS),
        presence_penalty=_first(options.presence_penalty, 0.0),
        presence_context_size=_first(options.presence_context_size, PENALTY_WINDOW_TOKENS),
        frequency_penalty=_first(options.frequency_penalty, 0.0),
        frequency_context_size=_first(options.frequency_context_size, PENALTY_WINDOW_TOKENS),
        xtc_probability=_first(options.xtc_probability, 0.0),
        xtc_threshold=_first(options.xtc_threshold, XTC_THRESHOLD),
        xtc_special_tokens=options.xtc_special_tokens or tuple(dict.fromkeys((*eos_token_ids, *line_break_ids))),
        hlg=options.hlg,
        curve=options.curve,
        logprobs=_first(options.logprobs, False),
        top_logprobs=_first(options.top_logprobs, 0),
        adapters=options.adapters,
    )


def resolve_prefix(
    options: GenerateOptions, resolved: ResolvedOptions, model: ModelInfo, *, store_is_on: bool
) -> PrefixUse | None:
    """How the prefix store is used; None when it is off or bypassed.

    The namespace holds whatever makes states differ between rows of one resident model. Exact rows, see `Composition`,
    begin only at cuts of their own prompt. Where the first chunk alone is attended to as it is,
    prompts share with those of the same chunk.
    """
    if not store_is_on or (options.cache is not None and options.cache.bypass):
        return None
    cut_tokens = 1 if model.composition.row_tile_tokens is None else resolved.prefill_chunk_size
    least_tokens = resolved.prefill_chunk_size if converts_at(model.composition.kv) == 0 else 0
    revisions = {adapter.id: adapter.revision for adapter in model.adapters}
    facts = {
        "adapters": [[one.id, revisions[one.id], one.scale] for one in resolved.adapters],
        "cut_tokens": cut_tokens,
        "least_tokens": least_tokens,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode("ascii"))
    salt = "" if options.cache is None else options.cache.salt
    return PrefixUse(
        namespace=digest.hexdigest() + salt_mark(salt),
        of_session=bool(options.cache_session_id),
        cut_tokens=cut_tokens,
        least_tokens=least_tokens,
    )


def resolve_execution(
    composition: Composition, declaration: GraphDeclaration, *, prompt_cache: bool
) -> ResolvedExecution:
    """What this build runs: rows of the graph's method under one scheduler, continuously batched."""
    reasons = () if declaration.packed_segments else (ROW_BY_ROW,)
    return ResolvedExecution(
        method=declaration.method,
        mechanism="continuous",
        paged_kv=composition.paged_kv is not None,
        kv_storage=composition.kv_store_key,
        prompt_cache=prompt_cache,
        reasons=(CANVAS_BY_CANVAS,) if declaration.method == "denoising" else reasons,
        row_tile_tokens=composition.row_tile_tokens,
    )


def check_adapters(asked: Sequence[AdapterSelection], model: ModelInfo) -> None:
    """Raise `NotFoundError` for the first adapter that is not mounted."""
    mounted = [adapter.id for adapter in model.adapters]
    for adapter in asked:
        if adapter.id not in mounted:
            raise NotFoundError("adapter", adapter.id, mounted)


def check_ids(name: str, ids: Sequence[int], vocab_size: int, *, part: str = "") -> None:
    """Raise `InvalidRequestError` naming each of the option's `ids` that is outside the vocabulary."""
    bad = [
        FieldViolation(f"options.{name}[{index}]{part}", f"token id {token} is outside the vocabulary of {vocab_size}")
        for index, token in enumerate(ids)
        if not 0 <= token < vocab_size
    ]
    if bad:
        raise InvalidRequestError(bad)


def _first(*values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    raise ValueError("no default is stated")
