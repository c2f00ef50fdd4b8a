"""The identity of a generation that can be continued exactly: equal requests have equal keys, others do not.

The key covers what decides the tokens: how they are computed, the prompt's ids, limits, and every option of sampling
and of penalties. A seed that the server chose is not in it, so that an identical request finds what was begun for the
first one; it is kept with the checkpoint. Not in it either: names, priorities, widths of chunks, how keys and values
are stored. Source: the project's source document, `generationCheckpointKey`, version 5, whose field names these are.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from engine.generation.canonical_json import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.contracts.execution import ResolvedExecution
    from engine.contracts.hlg import HlgCurve
    from engine.contracts.options import ResolvedOptions

VERSION: Final = 5


def generation_checkpoint_key(
    prompt_ids: Sequence[int],
    options: ResolvedOptions,
    *,
    cache_namespace: str = "",
    execution: ResolvedExecution | None = None,
    binding_identity: Mapping[str, str] | None = None,
) -> str:
    """SHA-256, in hexadecimal, of the canonical JSON of everything that the key covers; what is unset is left out.

    Args:
        prompt_ids: ids of the rendered prompt, tools and all.
        options: what runs.
        cache_namespace: keeps generations of different adapters, and of callers who share nothing, apart.
        execution: the resolved plan.
        binding_identity: what computes: artifact, implementation, the form of its state, and that of the files.

    Raises:
        ValueError: a number is not finite, which options never let through; or the options hold a denoising plan,
            whose durability is refused before a key is asked for.
    """
    said = checkpoint_policy(
        prompt_ids,
        options,
        cache_namespace=cache_namespace,
        execution=execution,
        binding_identity=binding_identity,
    )
    return hashlib.sha256(canonical_json(said)).hexdigest()


def checkpoint_policy(
    prompt_ids: Sequence[int],
    options: ResolvedOptions,
    *,
    cache_namespace: str = "",
    execution: ResolvedExecution | None = None,
    binding_identity: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the key is made of; see `generation_checkpoint_key`."""
    if options.denoising is not None:
        raise ValueError("version 5 of the key does not cover a denoising plan, which would decide the tokens unheard")
    policy = {
        "version": VERSION,
        "execution": None if execution is None else _execution(execution),
        "bindingIdentity": None if binding_identity is None else dict(binding_identity),
        "stopSequences": list(options.stop_sequences),
        "cacheNs": cache_namespace,
        "promptIds": list(prompt_ids),
        "maxTokens": options.max_tokens,
        "eosTokenIds": list(options.eos_token_ids),
        "temperature": options.temperature,
        "topP": options.top_p,
        "topK": options.top_k,
        "minP": options.min_p,
        "minTokensToKeep": options.min_tokens_to_keep,
        "xtcProbability": options.xtc_probability,
        "xtcThreshold": options.xtc_threshold,
        "xtcSpecialTokens": list(options.xtc_special_tokens),
        "seedMode": "explicit" if options.seed_was_explicit else "server-default",
        "seed": options.seed if options.seed_was_explicit else None,
        "hlg": None if options.hlg is None else _hlg(options.hlg),
        "curve": [list(point) for point in options.curve] or None,
        "logitBias": {str(token): bias for token, bias in options.logit_bias} or None,
        "repetitionPenalty": options.repetition_penalty,
        "repetitionContextSize": options.repetition_context_size,
        "presencePenalty": options.presence_penalty,
        "presenceContextSize": options.presence_context_size,
        "frequencyPenalty": options.frequency_penalty,
        "frequencyContextSize": options.frequency_context_size,
    }
    return _without_unset(policy)


def _execution(execution: ResolvedExecution) -> dict[str, Any]:
    return {
        "method": execution.method,
        "mechanism": execution.mechanism,
        "fill": execution.fill,
        "compiledDecode": execution.compiled_decode,
        "grammarJump": execution.grammar_jump,
    }


def _hlg(curve: HlgCurve) -> dict[str, Any]:
    return _without_unset({"mode": curve.MODE} | asdict(curve))


def _without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
