"""The options of the rows that are timed."""

from engine.contracts.options import ResolvedOptions

GREEDY: dict[str, object] = {}
# What callers send: each kind in turn. The fourth and seventh are the defaults that well-known models state.
MIXED: tuple[dict[str, object], ...] = (
    GREEDY,
    {"temperature": 0.7},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.8, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 5},
)
SETS = {"all greedy": (GREEDY,), "mixed": MIXED}


def resolved(changes: dict[str, object], seed: int) -> ResolvedOptions:
    """Options as they run, everything off but `changes`."""
    values: dict[str, object] = {
        "max_tokens": 100,
        "eos_token_ids": (),
        "stop_sequences": (),
        "prefill_chunk_size": 64,
        "temperature": 0.0,
        "top_p": 0.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens_to_keep": 1,
        "seed": seed,
        "seed_was_explicit": True,
    }
    return ResolvedOptions(**(values | changes))  # type: ignore[arg-type]
