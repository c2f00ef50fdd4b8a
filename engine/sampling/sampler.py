"""Chooses one token for each row of a step: greedy rows together, sampled rows by their own key and options."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from engine.ops.exponential import log_sum_exp
from engine.sampling import filters
from engine.sampling.greedy import GreedyChoice, choose_greedily
from engine.sampling.keys import step_key
from engine.sampling.processors import process
from engine.sampling.replacement import replaced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampling.recipe import Draw


class SampledTokens:
    """One token for each row: on the device at once, on the host after `read`."""

    __slots__ = ("_composed", "_greedy", "_greedy_logits", "_greedy_rows", "_sound", "tokens")

    def __init__(
        self,
        tokens: mx.array,
        sound: mx.array,
        *,
        greedy: GreedyChoice | None = None,
        greedy_rows: Sequence[int] = (),
        greedy_logits: mx.array | None = None,
        composed: bool = False,
    ) -> None:
        """`tokens` are ids [R] uint32, unevaluated; those of `greedy_rows` were chosen from `greedy_logits`.

        `sound` [R] tells whose logits are finite.
        """
        self.tokens = tokens
        self._sound = sound
        self._greedy = greedy
        self._greedy_rows = greedy_rows
        self._greedy_logits = greedy_logits
        self._composed = composed

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before `read` is quick."""
        chosen = [self.tokens, self._sound]
        return chosen if self._greedy is None else [*chosen, self._greedy.tokens, self._greedy.earliest]

    def read(self) -> list[int | None]:
        """The ids; None for a row whose logits are not finite numbers, whatever stands in `tokens`.

        Where rounding may tie two greedy scores, the id may differ from that in `tokens`.
        """
        ids = cast("list[int | None]", self.tokens.tolist())
        if self._greedy is not None and self._greedy_logits is not None:
            for place in self._greedy.unsure():
                logprobs = log_softmax(self._greedy_logits[place], composed=self._composed)
                ids[self._greedy_rows[place]] = cast("int", mx.argmax(logprobs).item())
        sound = cast("list[bool]", self._sound.tolist())
        return [token if is_sound else None for token, is_sound in zip(ids, sound, strict=True)]


def sample(
    logits: mx.array, draws: Sequence[Draw], *, unread: mx.array | None = None, composed: bool = False
) -> SampledTokens:
    """Choose a token for each row.

    Args:
        logits: [R, V], one row for each draw.
        draws: what is to be chosen for each row, in the same order.
        unread: ids [U] of tokens that only the device knows, which draws refer to.
        composed: avoid the library's exponential.

    Source: reference, autoregressive §3.2 (order of filters) and §3.3 (keys).
    """
    raw = logits.astype(mx.float32)
    # The largest tells all: it is NaN where one logit is, inf where one is, and -inf where all are.
    tops = mx.max(raw, axis=-1)
    sound = mx.isfinite(tops)
    wide = process(raw, draws, unread)
    if wide is not raw:
        tops = mx.max(wide, axis=-1)
    greedy_rows = [row for row, draw in enumerate(draws) if draw.recipe.is_greedy]
    if not greedy_rows:
        return SampledTokens(mx.stack(_drawn(wide, draws, range(len(draws)), composed)), sound)
    greedy_logits, greedy_tops = wide, tops
    if len(greedy_rows) < len(draws):
        greedy_logits, greedy_tops = (array[mx.array(greedy_rows)] for array in (wide, tops))
    choice = choose_greedily(greedy_logits, greedy_tops)
    tokens = choice.tokens
    if len(greedy_rows) < len(draws):
        others = [row for row in range(len(draws)) if row not in set(greedy_rows)]
        chosen = dict(zip(greedy_rows, choice.tokens, strict=True))
        chosen |= zip(others, _drawn(wide, draws, others, composed), strict=True)
        tokens = mx.stack([chosen[row] for row in range(len(draws))])
    return SampledTokens(
        tokens, sound, greedy=choice, greedy_rows=greedy_rows, greedy_logits=greedy_logits, composed=composed
    )


def log_softmax(logits: mx.array, *, composed: bool = False) -> mx.array:
    """Log-probabilities [..., V] of `logits`, in float32: 16-bit sums over a vocabulary lose too much."""
    wide = logits.astype(mx.float32)
    return wide - log_sum_exp(wide, composed=composed)


def _drawn(logits: mx.array, draws: Sequence[Draw], rows: Sequence[int], composed: bool) -> list[mx.array]:
    """One id for each of `rows`. Row by row: the cost is in the elements, so that rows gain nothing from company."""
    return [_draw(log_softmax(logits[row], composed=composed), draws[row]) for row in rows]


def _draw(logprobs: mx.array, draw: Draw) -> mx.array:
    options = draw.recipe.options
    key = step_key(options.seed, draw.step)
    if draw.recipe.is_replaced:
        return mx.random.categorical(replaced(logprobs, draw.recipe), key=key).astype(mx.uint32)
    if 0 < options.top_p < 1:
        logprobs = filters.top_p(logprobs, options.top_p)
    if options.min_p > 0:
        logprobs = filters.min_p(logprobs, options.min_p, options.min_tokens_to_keep)
    if options.top_k > 0:
        logprobs = filters.top_k(logprobs, options.top_k)
    return mx.random.categorical(logprobs / draw.recipe.temperature, key=key).astype(mx.uint32)
