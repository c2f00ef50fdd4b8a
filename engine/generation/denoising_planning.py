"""Options of the denoising method: what is forced, what a caller may choose, and refusals by name.

The method draws no token: it takes each position's likeliest, so every option that would change a draw is refused
rather than ignored. A value that asks for nothing is honoured by doing nothing. The model's own sampling defaults are
not read. Source: reference, denoising-and-models §3.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.contracts.errors import UnsupportedOptionError
from engine.contracts.options import ResolvedOptions
from engine.generation.denoising_schedule import plan_denoising
from engine.generation.planning import check_adapters, check_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.contracts.model import ModelInfo
    from engine.contracts.options import GenerateOptions
    from engine.contracts.prefill import PrefillPolicy

DEFAULT_MAX_TOKENS: Final = 256
FRESH_SEEDS: Final = 2**31 - 1

TAKES_LIKELIEST: Final = "a block-diffusion model takes the likeliest token of each position and draws none"
SCORES_STAY: Final = "a block-diffusion model revises all positions together and takes their scores as they are"
NO_LOGPROBS: Final = "a block-diffusion model commits whole blocks, which have no probabilities token by token"
NO_PREFIXES: Final = "a block-diffusion model keeps no prefixes"

_REFUSED: Final[Mapping[str, tuple[Callable[[GenerateOptions], bool], str]]] = MappingProxyType(
    {
        "temperature": (lambda o: bool(o.temperature), TAKES_LIKELIEST),
        "top_p": (lambda o: o.top_p is not None and 0 < o.top_p < 1, TAKES_LIKELIEST),
        "top_k": (lambda o: bool(o.top_k), TAKES_LIKELIEST),
        "min_p": (lambda o: bool(o.min_p), TAKES_LIKELIEST),
        "xtc_probability": (lambda o: bool(o.xtc_probability), TAKES_LIKELIEST),
        "hlg": (lambda o: o.hlg is not None, TAKES_LIKELIEST),
        "curve": (lambda o: bool(o.curve), TAKES_LIKELIEST),
        "logit_bias": (lambda o: bool(o.logit_bias), SCORES_STAY),
        "repetition_penalty": (lambda o: o.repetition_penalty not in (None, 1), SCORES_STAY),
        "presence_penalty": (lambda o: bool(o.presence_penalty), SCORES_STAY),
        "frequency_penalty": (lambda o: bool(o.frequency_penalty), SCORES_STAY),
        "logprobs": (lambda o: bool(o.logprobs), NO_LOGPROBS),
        "top_logprobs": (lambda o: bool(o.top_logprobs), NO_LOGPROBS),
        "cache_session_id": (lambda o: bool(o.cache_session_id), NO_PREFIXES),
    }
)


def refuse_for_denoising(options: GenerateOptions) -> None:
    """Raise `UnsupportedOptionError` for the first option that the method cannot honour."""
    for name, (is_asked, why) in _REFUSED.items():
        if is_asked(options):
            raise UnsupportedOptionError(f"options.{name}", why)


def resolve_denoising_options(
    options: GenerateOptions, model: ModelInfo, policy: PrefillPolicy, *, prompt_tokens: int, fresh_seed: int
) -> ResolvedOptions:
    """What will run: the forced values, with the caller's budget, ends, seed and `DenoisingOptions`.

    Ends are those of the method's checkpoints and the caller's. `max_tokens` is cut to the room of the context.

    Raises:
        InvalidRequestError: an id lies outside the vocabulary.
        NotFoundError: an adapter is not mounted.
    """
    check_adapters(options.adapters, model)
    vocab_size = model.geometry.vocab_size
    asked_ends = options.eos_token_ids or ()
    check_ids("eos_token_ids", asked_ends, vocab_size)
    chunk_tokens = options.prefill_chunk_size or policy.chunk_size(prompt_tokens)
    return ResolvedOptions(
        max_tokens=min(options.max_tokens or DEFAULT_MAX_TOKENS, model.geometry.context_length - prompt_tokens),
        eos_token_ids=tuple(dict.fromkeys((*model.eos_token_ids, *asked_ends))),
        stop_sequences=options.stop_sequences,
        prefill_chunk_size=chunk_tokens,
        temperature=0.0,
        top_p=0.0,
        top_k=0,
        min_p=0.0,
        min_tokens_to_keep=1,
        seed=fresh_seed % FRESH_SEEDS if options.seed is None else options.seed,
        seed_was_explicit=options.seed is not None,
        adapters=options.adapters,
        denoising=plan_denoising(options.denoising, canvas_length=model.geometry.canvas_length),
    )
