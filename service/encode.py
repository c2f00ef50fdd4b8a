"""From the engine's contracts to messages. Pure: what is sent is what the contracts say."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.contracts.hlg import HlgParametric
from engine.contracts.results import FinishReason
from mlxstream.v1 import event_pb2, options_pb2, result_pb2
from service.encode_graph import encode_descriptor, encode_execution

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.contracts.denoising import DenoisingPlan
    from engine.contracts.events import CanvasRevised, GenerationFinished, GenerationStarted, PrefillProgress
    from engine.contracts.hlg import HlgCurve
    from engine.contracts.options import ResolvedOptions
    from engine.contracts.results import GeneratedToken, GenerateStats, TokenLogprobs
    from mlxstream.v1 import error_pb2

_FINISH_REASONS: Final = MappingProxyType(
    {
        FinishReason.STOP: result_pb2.FINISH_REASON_STOP,
        FinishReason.LENGTH: result_pb2.FINISH_REASON_LENGTH,
        FinishReason.CANCELLED: result_pb2.FINISH_REASON_CANCELLED,
        FinishReason.DEADLINE: result_pb2.FINISH_REASON_DEADLINE,
        FinishReason.ERROR: result_pb2.FINISH_REASON_ERROR,
    }
)
_PIVOTS: Final = MappingProxyType(
    {
        "top": options_pb2.HLG_PIVOT_TOP,
        "entropy": options_pb2.HLG_PIVOT_ENTROPY,
        "median": options_pb2.HLG_PIVOT_MEDIAN,
    }
)

_SAMPLERS: Final = MappingProxyType(
    {
        "confidence-threshold": options_pb2.DENOISING_SAMPLER_CONFIDENCE_THRESHOLD,
        "entropy-bound": options_pb2.DENOISING_SAMPLER_ENTROPY_BOUND,
    }
)


def encode_started(started: GenerationStarted) -> event_pb2.Started:
    """The first event."""
    return event_pb2.Started(
        generation_id=started.generation_id,
        request_id=started.request_id,
        model=started.model,
        weights_fingerprint=started.weights_fingerprint,
        graph=encode_descriptor(started.descriptor),
        execution=encode_execution(started.execution),
        options=encode_options(started.options),
        seed_was_explicit=started.options.seed_was_explicit,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        resumed_tokens=started.resumed_tokens,
    )


def encode_options(options: ResolvedOptions) -> options_pb2.GenerateOptions:
    """Resolved options, in the form in which they can be sent again."""
    return options_pb2.GenerateOptions(
        max_tokens=options.max_tokens,
        eos_token_ids=options_pb2.TokenIds(ids=options.eos_token_ids),
        stop_sequences=options.stop_sequences,
        prefill_chunk_size=options.prefill_chunk_size,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        min_tokens_to_keep=options.min_tokens_to_keep,
        seed=options.seed,
        logit_bias=[options_pb2.LogitBias(token=token, bias=bias) for token, bias in options.logit_bias],
        repetition_penalty=options.repetition_penalty,
        repetition_context_size=options.repetition_context_size,
        presence_penalty=options.presence_penalty,
        presence_context_size=options.presence_context_size,
        frequency_penalty=options.frequency_penalty,
        frequency_context_size=options.frequency_context_size,
        xtc_probability=options.xtc_probability,
        xtc_threshold=options.xtc_threshold,
        xtc_special_tokens=options.xtc_special_tokens,
        hlg=None if options.hlg is None else _hlg(options.hlg),
        curve=[options_pb2.CurvePoint(x_percent=x, y_percent=y) for x, y in options.curve],
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        adapters=[options_pb2.AdapterSelection(id=one.id, scale=one.scale) for one in options.adapters],
        denoising=None if options.denoising is None else _denoising(options.denoising),
    )


def encode_chunk(tokens: Iterable[GeneratedToken], text: str, *, with_bytes: bool) -> event_pb2.TokenChunk:
    """Tokens and text; `with_bytes` adds the bytes of each token."""
    return event_pb2.TokenChunk(tokens=encode_tokens(tokens, with_bytes=with_bytes), text=text)


def encode_tokens(tokens: Iterable[GeneratedToken], *, with_bytes: bool) -> list[result_pb2.GeneratedToken]:
    """Tokens; `with_bytes` adds the bytes of each."""
    return [
        result_pb2.GeneratedToken(
            token=token.token,
            index=token.index,
            text_bytes=token.text_bytes if with_bytes else b"",
            logprobs=_logprobs(token.logprobs) if token.logprobs is not None else None,
        )
        for token in tokens
    ]


def encode_block(canvas: CanvasRevised, revision: int) -> event_pb2.BlockUpdate:
    """A canvas; `revision` counts those of its block that were sent before."""
    return event_pb2.BlockUpdate(
        block_index=canvas.block_index,
        revision=revision,
        step=canvas.step,
        tokens=canvas.tokens,
        committed=canvas.committed,
    )


def encode_heartbeat(progress: PrefillProgress) -> event_pb2.Heartbeat:
    """A sign of life."""
    return event_pb2.Heartbeat(prefilled_tokens=progress.prefilled_tokens, prompt_tokens=progress.prompt_tokens)


def encode_finished(
    finished: GenerationFinished, error: error_pb2.GenerationError | None, *, with_cache_tokens: bool
) -> event_pb2.Finished:
    """The last event, with `error` as callers may see it."""
    return event_pb2.Finished(
        finish_reason=_FINISH_REASONS[finished.finish_reason],
        matched_stop=finished.matched_stop,
        stats=encode_stats(finished.stats, with_cache_tokens=with_cache_tokens),
        error=error,
    )


def encode_stats(stats: GenerateStats, *, with_cache_tokens: bool = False) -> result_pb2.GenerateStats:
    """The account; `with_cache_tokens` adds the ids that the cache holds."""
    return result_pb2.GenerateStats(
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
        prefill_tps=stats.prefill_tps,
        decode_tps=stats.decode_tps,
        prefill_ms=stats.prefill_ms,
        decode_ms=stats.decode_ms,
        cache_tokens=stats.cache_tokens if with_cache_tokens else (),
        queue_ms=stats.queue_ms,
        time_to_first_token_ms=stats.time_to_first_token_ms,
        denoising=None
        if stats.denoising is None
        else result_pb2.DenoisingStats(
            steps=stats.denoising.steps, blocks=stats.denoising.blocks, canvas_tokens=stats.denoising.canvas_tokens
        ),
    )


def _denoising(plan: DenoisingPlan) -> options_pb2.DenoisingOptions:
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return options_pb2.DenoisingOptions(**{**values, "sampler": _SAMPLERS[plan.sampler]})


def _hlg(curve: HlgCurve) -> options_pb2.HlgOptions:
    values = {field.name: getattr(curve, field.name) for field in dataclasses.fields(curve)}
    if isinstance(curve, HlgParametric):
        values["pivot"] = _PIVOTS[curve.pivot]
    return options_pb2.HlgOptions(**{curve.MODE: values})


def _logprobs(logprobs: TokenLogprobs) -> result_pb2.TokenLogprobs:
    return result_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[result_pb2.TopLogprob(token=one.token, logprob=one.logprob) for one in logprobs.top],
    )
