"""Times the sampler, the body of a step and the product with the head apart, interleaved; ms of processor time.

Logits are the model's own, of a text that it did not write, so that tails are as long as they get. A vocabulary larger
than the model's is made of it: its head repeats, and what is repeated is less likely by a random distance.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.sampling.requests import SETS, resolved
from engine.contracts.graph import PackedSegment

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORY_TOKENS = 64
CONTEXT_TOKENS = 100


def body(graph: Any, composition: Any, rows: int) -> Callable[[], None]:
    """One decode step of `rows` rows without the head; what it writes is taken back."""
    import mlx.core as mx

    from engine.state.build import CacheBuilder

    builder = CacheBuilder(graph.geometry, composition)
    held = [builder.make_caches() for _ in range(rows)]
    prompt = mx.random.randint(0, graph.geometry.vocab_size, (1, CONTEXT_TOKENS), key=mx.random.key(1))
    for caches in held:
        mx.eval(graph.hidden(prompt.astype(mx.uint32), [PackedSegment(CONTEXT_TOKENS, caches)]))
    tokens = mx.array([[5] * rows], dtype=mx.uint32)

    def step() -> None:
        mx.eval(graph.hidden(tokens, [PackedSegment(1, caches) for caches in held]))
        for caches in held:
            for cache in caches:
                cache.trim(1)

    return step


def parts(graph: Any, composition: Any, heads: dict[int, Any], logits: Any, rows: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name. `heads` are products by vocabulary; `logits` [N, V] of the smallest one."""
    import mlx.core as mx

    hidden = mx.random.normal((1, rows, graph.geometry.hidden_size))
    mx.eval(hidden)
    timed: dict[str, Callable[[], None]] = {"body": body(graph, composition, rows)}
    for vocabulary, head in heads.items():
        timed[f"head {vocabulary}"] = lambda head=head: mx.eval(head(hidden))
        widened = widen(logits[:rows], vocabulary)
        for name, kinds in SETS.items():
            timed[f"{name} {vocabulary}"] = sampling(widened, kinds, composed=composition.composes_exponentials)
    return timed


def sampling(logits: Any, kinds: Any, *, composed: bool) -> Callable[[], None]:
    """Sample and read one step; a single row takes each kind in turn, as a step of its own."""
    import mlx.core as mx

    from engine.sampling.recipe import Draw, Recipe
    from engine.sampling.sampler import sample

    rows = logits.shape[0]
    turns = len(kinds) if rows == 1 else 1
    recipes = [Recipe(resolved(kinds[row % len(kinds)], seed=row)) for row in range(max(rows, turns))]
    history = list(range(HISTORY_TOKENS))

    def choose() -> None:
        for turn in range(turns):
            draws = [Draw(recipe, 3, history) for recipe in recipes[turn : turn + rows]]
            sampled = sample(logits, draws, composed=composed)
            mx.eval(sampled.arrays())
            sampled.read()

    choose.turns = turns  # type: ignore[attr-defined]
    return choose


def widen(logits: Any, vocabulary: int) -> Any:
    """Logits [R, `vocabulary`]: those given, then copies that are less likely."""
    import mlx.core as mx

    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return mx.array(logits)
    copies = mx.concatenate([logits] * -(-missing // logits.shape[-1]), axis=-1)[:, :missing]
    distance = mx.abs(mx.random.normal(copies.shape, key=mx.random.key(2))) * 4
    widened = mx.concatenate([logits, copies - distance], axis=-1)
    mx.eval(widened)
    return widened


def timed(parts: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median ms of processor time of each part; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 1):
        for name, part in parts.items():
            began = time.process_time()
            part()
            if turn:
                times[name].append(1000 * (time.process_time() - began) / getattr(part, "turns", 1))
    return {name: statistics.median(values) for name, values in times.items()}
