"""Options as they run, everything off but what a test turns on, and a draw by them."""

from engine.contracts.options import ResolvedOptions
from engine.sampling.recipe import Draw, Recipe
from engine.sampling.sampler import sample

OFF = {
    "max_tokens": 8,
    "eos_token_ids": (),
    "stop_sequences": (),
    "prefill_chunk_size": 8,
    "temperature": 0.0,
    "top_p": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens_to_keep": 1,
    "seed": 1,
    "seed_was_explicit": True,
}


def options(**changes):
    return ResolvedOptions(**(OFF | changes))


def draw(step=0, *, history=(), unread=None, **changes):
    return Draw(Recipe(options(**changes)), step, history, unread)


def ids(logits, draws, **how):
    """The ids that are chosen; None where a row is not finite."""
    return [None if one is None else one.token for one in sample(logits, draws, **how).read()]
