"""Where the filters cut each row of a step: all rows at once, on the device, without waiting for it.

Top-p, min-p and top-k keep a beginning of the tokens in descending order, so that a score tells who is kept. Only the
head of that order is sorted. Float32 sums leave a doubt, and so does a cut that lies beyond the head; hence there are
two scores: what is below `possible` is removed, what is above `certain` is kept, whatever the doubt. A token in between
has to be judged by `engine.sampling.filters`; few are ever drawn there.
Scores are relative to the row's largest, which is 0. C is rows, K tokens of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.sampling.columns import Columns, best_columns
from engine.sampling.recipe import SHALLOW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampling.recipe import Recipe

HEAD_TOKENS = 2048
DOUBT = 2.0**-11
"""A bound on the relative error of float32 sums over the head and, in stretches of `mass`, over a vocabulary."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Scores [C] between which the cut of each row lies."""

    possible: mx.array
    certain: mx.array


class _Head:
    """The largest scores of each row in descending order; of those above `bound` [C] none is missing.

    Attributes:
        scores: [C, K].
        bound: [C], -inf where the head holds every token.
        known: how many [C] are above the bound.
        odds: of the scores [C, K].
        mass: of each token and those before it [C, K].
        vocabulary: the number of all tokens.
    """

    def __init__(self, scores: mx.array, bound: mx.array, vocabulary: int) -> None:
        self.scores = scores
        self.bound = bound
        self.known = mx.sum(scores > bound[:, None], axis=-1).astype(mx.int32)
        self.odds = mx.exp(scores)
        self.mass = mx.cumsum(self.odds, axis=-1)
        self.vocabulary = vocabulary

    @classmethod
    def deep(cls, scores: mx.array) -> _Head:
        """Many tokens, for cuts that may lie far down."""
        vocabulary = scores.shape[-1]
        if vocabulary <= HEAD_TOKENS:
            return cls(_descending(scores), mx.full(scores.shape[:1], -mx.inf), vocabulary)
        largest = _descending(mx.topk(scores, HEAD_TOKENS, axis=-1))
        return cls(largest, largest[:, -1], vocabulary)

    @classmethod
    def shallow(cls, scores: mx.array, tokens: int) -> _Head:
        """A few more than `tokens`, for rows that keep no more than those."""
        columns = Columns(scores, padding=-mx.inf)
        best, bound = best_columns(columns.maxima, tokens)
        return cls(_descending(columns.take(best)), bound, scores.shape[-1])

    def count(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """How many begin the order that fulfil `tokens` [C, K]: at least, and at most, since the head may be short."""
        known = mx.arange(tokens.shape[-1]) < self.known[:, None]
        found = mx.sum(tokens & known, axis=-1).astype(mx.int32)
        return found, mx.where(found >= self.known, self.vocabulary, found)

    def where(self, on: list[bool], count: mx.array) -> mx.array:
        """`count` [C] of the rows whose filter is on; the others keep all."""
        return mx.where(mx.array(on), count, self.vocabulary)

    def at(self, values: mx.array, place: mx.array) -> mx.array:
        """The value [C] of each row at `place` [C], which is brought among the known ones."""
        nearest = mx.maximum(mx.minimum(place, self.known - 1), 0)
        return mx.take_along_axis(values, nearest[:, None], axis=-1)[:, 0]


def _descending(scores: mx.array) -> mx.array:
    return mx.sort(scores, axis=-1)[:, ::-1]


def find_cuts(scores: mx.array, recipes: Sequence[Recipe], totals: mx.array) -> Cuts:
    """Where each row is cut by top-p, min-p and top-k.

    Args:
        scores: [C, V] float32, the largest of each row 0.
        recipes: one for each row; all are `is_shallow`, or none is.
        totals: sums [C] of the odds of each row; not read where top-p is off.
    """
    shallow = recipes[0].is_shallow
    most_kept = max(recipe.options.top_k for recipe in recipes)
    head = _Head.shallow(scores, most_kept) if shallow else _Head.deep(scores)
    least, most = _kept_by_mass(head, recipes, totals)
    limits = _limits(recipes, head.vocabulary)
    return _scores_of(head, mx.minimum(least, limits), mx.minimum(most, limits))


def find_cuts_with_exclusion(
    scores: mx.array, recipes: Sequence[Recipe], totals: mx.array, *, chances: mx.array, exposed: mx.array
) -> tuple[Cuts, mx.array]:
    """The same with XTC between min-p and top-k.

    Args:
        scores: [C, V] float32.
        recipes: one for each row.
        totals: sums [C] of the odds of each row.
        chances: the numbers [C] drawn for XTC.
        exposed: which tokens [C, V] are not protected.

    Returns:
        The cuts, and `scores` without the tokens that are excluded: those are -inf.
    """
    head = _Head.deep(scores)
    least, most = _kept_by_mass(head, recipes, totals)
    excluded, doubtful = _exclusion(head, least, most, recipes, totals, chances)
    cuts = _scores_of(head, least, most)
    left = mx.where((scores > excluded[:, None]) & exposed, -mx.inf, scores)
    if any(recipe.options.top_k for recipe in recipes):
        cuts = _both(cuts, _cuts_by_count(left, recipes))
    return Cuts(cuts.possible, mx.where(doubtful, mx.inf, cuts.certain)), left


def _cuts_by_count(scores: mx.array, recipes: Sequence[Recipe]) -> Cuts:
    """Where top-k alone cuts each row of `scores` [C, V]; what is -inf counts for nothing."""
    most_kept = max(recipe.options.top_k for recipe in recipes)
    head = _Head.shallow(scores, most_kept) if most_kept <= SHALLOW_TOKENS else _Head.deep(scores)
    limits = _limits(recipes, head.vocabulary)
    return _scores_of(head, limits, limits)


def _both(one: Cuts, other: Cuts) -> Cuts:
    """The cuts of what both keep."""
    return Cuts(mx.maximum(one.possible, other.possible), mx.maximum(one.certain, other.certain))


def _kept_by_mass(head: _Head, recipes: Sequence[Recipe], totals: mx.array) -> tuple[mx.array, mx.array]:
    """How many tokens [C] top-p and then min-p keep, at least and at most."""
    by_mass = [recipe.top_p < math.inf for recipe in recipes]
    before = head.mass - head.odds
    share = (mx.array([recipe.top_p for recipe in recipes]) * totals)[:, None]
    least, _ = head.count(before < share * (1 - DOUBT))
    _, most = head.count(before < share * (1 + DOUBT))
    by_ratio = [recipe.min_p_score > -math.inf for recipe in recipes]
    likely = head.count(head.scores >= mx.array([recipe.min_p_score for recipe in recipes])[:, None])
    keep = mx.array([min(recipe.options.min_tokens_to_keep, head.vocabulary) for recipe in recipes], dtype=mx.int32)
    least, most = (
        mx.minimum(head.where(by_mass, mx.maximum(mass, 1)), head.where(by_ratio, mx.maximum(count, keep)))
        for mass, count in zip((least, most), likely, strict=True)
    )
    return least, most


def _limits(recipes: Sequence[Recipe], vocabulary: int) -> mx.array:
    """How many tokens [C] top-k keeps."""
    return mx.array([min(recipe.options.top_k or vocabulary, vocabulary) for recipe in recipes], dtype=mx.int32)


def _scores_of(head: _Head, least: mx.array, most: mx.array) -> Cuts:
    """The cuts of rows that keep at least and at most so many tokens [C]."""
    # Among tokens that equal the first one that may go, some may have to: only those above it are certain.
    certain = mx.where(least >= head.known, head.bound, head.at(head.scores, least))
    possible = mx.where(most > head.known, -mx.inf, head.at(head.scores, most - 1))
    return Cuts(possible, mx.where(least >= head.vocabulary, -mx.inf, certain))


def _exclusion(
    head: _Head, least: mx.array, most: mx.array, recipes: Sequence[Recipe], totals: mx.array, chances: mx.array
) -> tuple[mx.array, mx.array]:
    """The scores [C] above which XTC excludes (inf where it does not), and which rows that leaves in doubt."""
    unfiltered = mx.array([not recipe.filters_by_mass for recipe in recipes])
    threshold = mx.array([recipe.options.xtc_threshold for recipe in recipes])
    low = mx.where(unfiltered, totals, head.at(head.mass, least - 1))
    high = mx.where(most > head.known, totals, head.at(head.mass, most - 1))
    places = mx.arange(head.scores.shape[-1])
    surely = (head.odds > (threshold * high * (1 + DOUBT))[:, None]) & (places < least[:, None])
    perhaps = (head.odds >= (threshold * low * (1 - DOUBT))[:, None]) & (places < most[:, None])
    fewest, _ = head.count(surely)
    _, greatest = head.count(perhaps)
    acts = chances <= mx.array([recipe.options.xtc_probability for recipe in recipes])
    excluded = mx.where(acts & (fewest > 1), head.at(head.scores, fewest - 1), mx.inf)
    return excluded, acts & (fewest != greatest)
