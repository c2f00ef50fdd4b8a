"""The autoregressive method: one packed forward over every row's next unit, then one draw for each row due.

There is no second loop: a single request is a step with one row. A step may be dispatched before the tokens of the one
before it are read, which then reach it on the device. Runs on the engine thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ParamSpec

import mlx.core as mx

from engine.contracts.graph import PackedSegment
from engine.generation.row import RowFault, RowUnit
from engine.sampling.sampler import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.results import SampledToken
    from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding
    from engine.generation.row import Row
    from engine.sampling.sampler import SampledTokens

logger = logging.getLogger(__name__)

P = ParamSpec("P")


def dispatch_packed_step(
    binding: MlxAutoregressiveBinding, rows: Sequence[Row], after: PendingStep | None = None
) -> PendingStep:
    """Start a step without waiting for it.

    Args:
        binding: the graph.
        rows: who takes part; of those in `after`, only rows that `after.may_follow`.
        after: the step before, when it was not read yet. It must be read before the new one is.
    """
    shares = [_share(row, after) for row in rows]
    segments = [_segment(share.row, share.unit) for share in shares]
    binding.maintain(segments)
    logits = binding.logits(_packed_tokens(shares, after), segments, _due(shares))
    sampled = None if logits is None else _sampled(binding, logits, shares, None if after is None else after.tokens)
    states = [array for share in shares for cache in share.row.caches for array in cache.arrays()]
    mx.async_eval([] if sampled is None else sampled.arrays(), states)  # type: ignore[no-untyped-call]
    for share in shares:
        share.row.settle(share.unit)
    return PendingStep(shares, sampled, after, binding)


class PendingStep:
    """A step that runs. A row that ends meanwhile is closed as ever, and its token here ignored."""

    def __init__(
        self,
        shares: Sequence[_Share],
        sampled: SampledTokens | None,
        after: PendingStep | None,
        binding: MlxAutoregressiveBinding,
    ) -> None:
        self._binding = binding
        self._shares = shares
        self._sampled = sampled
        self._after = after
        self._places = {share.row: place for place, share in enumerate(s for s in shares if s.unit.samples)}
        self._misled: set[Row] = set()
        self._uncorrected: dict[Row, RowFault] = {}

    @property
    def tokens(self) -> mx.array | None:
        """The ids [R] on the device, for the rows that sample."""
        return None if self._sampled is None else self._sampled.tokens

    def place(self, row: Row) -> int | None:
        """The index of the row's id in `tokens`; None when it samples none here."""
        return self._places.get(row)

    def may_follow(self, row: Row) -> bool:
        """Whether `row` may take part in the next step before this one is read.

        Its first token may not: it is wanted on the host before anything else is computed. Its last has no successor.
        Where guesses keep turning out wrong, what follows them would only be taken back. Nobody may where the step was
        computed while it was built: it can be read at once, and its tokens would wait for the whole of the next one.
        """
        if self._binding.composition.computes_on_host:
            return False
        if row not in self._places:
            return True
        has_successor = 0 < row.next_index < row.options.max_tokens - 1
        return has_successor and row.is_guessed_well and row not in self._rows_misled_before()

    def read(self) -> list[SampledToken | RowFault | None]:
        """Wait; for each row the token sampled for it, why there is none, or None while its prompt is still prefilled.

        None also stands for a row that was fed a token which turned out to be another: it stands where it stood.
        """
        misled = self._rows_misled_before()
        astray = {share.row for share in self._shares if share.follows is not None and share.row in misled}
        self._after = None
        if self._sampled is None:
            mx.synchronize()  # holding a cache's arrays, to wait for them alone, would make the next step copy them
        drawn = iter([] if self._sampled is None else self._read_tokens(self._sampled, astray))
        tokens = [next(drawn) if share.unit.samples else None for share in self._shares]
        taken_back = {row: _fault_of(self._take_back, row) for row in astray}
        return [
            taken_back.get(share.row, self._uncorrected.get(share.row, token))
            for share, token in zip(self._shares, tokens, strict=True)
        ]

    def _rows_misled_before(self) -> set[Row]:
        return set() if self._after is None else self._after._misled  # noqa: SLF001 - its own kind

    def _read_tokens(self, sampled: SampledTokens, astray: set[Row]) -> list[SampledToken | RowFault]:
        read = sampled.read()
        self._misled = {row for row, place in self._places.items() if place in sampled.corrected} - astray
        for row in self._misled:
            fault = _fault_of(row.correct)
            if fault is not None:
                self._uncorrected[row] = fault
        return [_NOT_FINITE if token is None else token for token in read]

    def _take_back(self, row: Row) -> None:
        if all(cache.trimmable_tokens for cache in row.caches):
            row.step_back()
        else:
            row.restart(self._binding.make_cache())


@dataclass(frozen=True, slots=True)
class _Share:
    """One row's part of a step. `follows` is the place of its token in the step before, when that is still unread."""

    row: Row
    unit: RowUnit
    follows: int | None


_UNREAD = RowUnit((0,), samples=True)
_NOT_FINITE = RowFault("its logits are not finite")


def _fault_of(work: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> RowFault | None:
    """Why `work` on one row failed, if it did: others of its step are not to go with it."""
    try:
        work(*arguments, **named)
    except Exception as error:
        logger.exception("a row could not take back a guess")
        return RowFault(f"a wrong guess could not be taken back: {error!r}")
    return None


def _share(row: Row, after: PendingStep | None) -> _Share:
    follows = None if after is None else after.place(row)
    return _Share(row, row.next_unit() if follows is None else _UNREAD, follows)


def _segment(row: Row, unit: RowUnit) -> PackedSegment:
    return PackedSegment(len(unit.tokens), row.caches, row.options.adapters, ends_alone=unit.ends_alone)


def _packed_tokens(shares: Sequence[_Share], after: PendingStep | None) -> mx.array:
    """Ids [1, T] uint32; those that are unread stay on the device."""
    follows = [share.follows for share in shares]
    if after is not None and after.tokens is not None and follows == list(range(after.tokens.size)):
        return after.tokens[None]
    tokens = mx.array([[token for share in shares for token in share.unit.tokens]], dtype=mx.uint32)
    places, unread, end = [], [], 0
    for share in shares:
        if share.follows is not None:
            places.append(end)
            unread.append(share.follows)
        end += len(share.unit.tokens)
    if after is not None and after.tokens is not None and places:
        tokens[0, mx.array(places)] = after.tokens[mx.array(unread)]
    return tokens


def _due(shares: Sequence[_Share]) -> list[int]:
    """The packed position of the last token of each row that samples."""
    ends = accumulate(len(share.unit.tokens) for share in shares)
    return [end - 1 for share, end in zip(shares, ends, strict=True) if share.unit.samples]


def _sampled(
    binding: MlxAutoregressiveBinding, logits: mx.array, shares: Sequence[_Share], unread: mx.array | None
) -> SampledTokens:
    """A token for each row that is due, from its logits: [R, V]. Tokens that shares follow are in `unread`."""
    draws = [share.row.next_draw(share.follows) for share in shares if share.unit.samples]
    return sample(logits, draws, unread=unread, composed=binding.composition.composes_exponentials)
