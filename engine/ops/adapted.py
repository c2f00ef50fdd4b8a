"""Products that adapters add to, row by row of a packed step.

y + scale·(x·A)·B, cast to the type of x, in the order of a row's adapters. Rows without one keep their bits.
Source: Hu et al. 2021, "LoRA"; reference, autoregressive §8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine.contracts.adapters import AdapterTarget
from engine.ops.linear import multiply_by_tiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.contracts.graph import PackedSegment
    from engine.contracts.option_groups import AdapterSelection
    from engine.ops.linear import Product


MOST_JOINED_RANK: Final = 64
"""Pairs of one product are joined up to this rank together: zeros between their blocks cost memory and products."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """Matrices `a` [in, r] and `b` [r, out] of one projection, and the factor on their product."""

    a: mx.array
    b: mx.array
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes that the matrices hold."""
        return self.a.nbytes + self.b.nbytes

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x @ a @ b`, without the factor."""
        return (x @ self.a) @ self.b


@dataclass(frozen=True, slots=True)
class AttachedPair:
    """A pair, and the columns of the joined results that it is added to; None means all of them."""

    columns: slice | None
    pair: LowRankPair


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """The tokens of a step whose rows take the same adapters: a stretch, their positions, or None for all of them."""

    tokens: slice | mx.array | None
    adapters: tuple[AdapterSelection, ...]

    def of(self, x: mx.array) -> mx.array:
        """The tokens' own part [1, t, in] of `x` [1, T, in]."""
        return x if self.tokens is None else x[:, self.tokens]

    def added(self, y: mx.array, columns: slice | None, part: mx.array) -> mx.array:
        """`y` [1, T, out] with `part` [1, t, ..] added to `columns` of the tokens; nothing else changes a bit."""
        if self.tokens is None and columns is None:
            return y + part
        columns = columns or slice(None)
        if isinstance(self.tokens, mx.array):
            return y.at[:, self.tokens, columns].add(part)
        place = (slice(None), self.tokens or slice(None), columns)
        y[place] = y[place] + part
        return y


class AdaptedLinear:
    """One product of joined projections, each of which adapters may change."""

    __slots__ = ("_attached", "_product", "_sites", "out_features")

    def __init__(self, product: Product, sites: AdapterSites, out_features: int) -> None:
        """Adapt `product`, whose results are `out_features` wide, as `sites` says for the step in hand."""
        self.out_features = out_features
        self._product = product
        self._sites = sites
        self._attached: dict[str, list[AttachedPair]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold, adapters apart."""
        return self._product.nbytes

    def arrays(self) -> list[mx.array]:
        """The resident arrays, adapters apart."""
        return self._product.arrays()

    def attach(self, adapter: str, pairs: Sequence[AttachedPair]) -> None:
        """Let rows that take `adapter` add `pairs` to their results."""
        self._attached[adapter] = list(pairs)

    def detach(self, adapter: str) -> None:
        """Let go of the pairs of `adapter`."""
        self._attached.pop(adapter, None)

    def detach_all(self) -> None:
        """Let go of all pairs."""
        self._attached.clear()

    def __call__(self, x: mx.array) -> mx.array:
        """Return the product of `x` [1, T, in], changed for the rows that take adapters: [1, T, out]."""
        y = self._product(x)
        for group in self._sites.step:
            asked = [(one, place) for one in group.adapters for place in self._attached.get(one.id, ())]
            own = group.of(x) if asked else x
            for selection, place in asked:
                scale = place.pair.scale if selection.scale is None else selection.scale
                part = multiply_by_tiles(place.pair, own, self._sites.row_tile_tokens)
                y = group.added(y, place.columns, (scale * part).astype(x.dtype))
        return y


class AdapterSites:
    """The projections of one graph that take adapters, and which rows of the step in hand take which."""

    def __init__(self, row_tile_tokens: int | None) -> None:
        """`row_tile_tokens` as in `Composition`."""
        self.row_tile_tokens = row_tile_tokens
        self.step: tuple[AdaptedTokens, ...] = ()
        self._places: dict[str, tuple[AdaptedLinear, slice]] = {}
        self._targets: dict[str, AdapterTarget] = {}
        self._bytes_of: dict[str, int] = {}

    @property
    def targets(self) -> Mapping[str, AdapterTarget]:
        """The projections by their paths."""
        return self._targets

    @property
    def nbytes(self) -> int:
        """Bytes that the attached pairs hold."""
        return sum(self._bytes_of.values())

    def place(self, product: Product, targets: Sequence[AdapterTarget]) -> AdaptedLinear:
        """`product`, whose results are those of `targets` side by side, as a place for adapters."""
        adapted, start = AdaptedLinear(product, self, sum(target.out_features for target in targets)), 0
        for target in targets:
            self._targets[target.module] = target
            self._places[target.module] = adapted, slice(start, start + target.out_features)
            start += target.out_features
        return adapted

    def attach(self, adapter: str, pairs: Mapping[str, LowRankPair]) -> int:
        """Mount `pairs`, by the paths of their projections; each must be one of `targets` and fit it.

        Returns:
            The bytes that they hold.
        """
        found: dict[AdaptedLinear, list[AttachedPair]] = {}
        for module, pair in pairs.items():
            adapted, columns = self._places[module]
            found.setdefault(adapted, []).append(AttachedPair(columns, pair))
        held = [(adapted, _joined(attached, adapted.out_features)) for adapted, attached in found.items()]
        mx.eval([(one.pair.a, one.pair.b) for _, attached in held for one in attached])
        for adapted, attached in held:
            adapted.attach(adapter, attached)
        self._bytes_of[adapter] = sum(one.pair.nbytes for _, attached in held for one in attached)
        return self._bytes_of[adapter]

    def detach(self, adapter: str) -> int:
        """Take `adapter` off; no row of a later step may take it.

        Returns:
            The bytes that its pairs held.
        """
        for adapted, _ in self._places.values():
            adapted.detach(adapter)
        return self._bytes_of.pop(adapter, 0)

    def begin(self, segments: Sequence[PackedSegment]) -> None:
        """A step of `segments` follows."""
        groups: dict[tuple[AdapterSelection, ...], list[int]] = {}
        start = 0
        for segment in segments:
            end = start + segment.length
            if segment.adapters:
                groups.setdefault(segment.adapters, []).extend(range(start, end))
            start = end
        self.step = tuple(AdaptedTokens(_tokens(places, start), adapters) for adapters, places in groups.items())

    def close(self) -> None:
        """Let go of all adapters."""
        for adapted, _ in self._places.values():
            adapted.detach_all()
        self._bytes_of.clear()
        self.step = ()


def _joined(attached: list[AttachedPair], out_features: int) -> list[AttachedPair]:
    """Small pairs of one product as one, A side by side and B as blocks: fewer operations for the same sums."""
    pairs = [one.pair for one in attached]
    rank = sum(pair.b.shape[0] for pair in pairs)
    alike = len({(pair.scale, pair.a.dtype, pair.b.dtype) for pair in pairs}) == 1
    if attached[0].columns == slice(0, out_features):
        return [AttachedPair(None, pairs[0])]
    if rank > MOST_JOINED_RANK or not alike:
        return attached
    blocks = mx.zeros((rank, out_features), dtype=pairs[0].b.dtype)
    start = 0
    for one in attached:
        end = start + one.pair.b.shape[0]
        blocks[start:end, one.columns or slice(None)] = one.pair.b
        start = end
    return [AttachedPair(None, LowRankPair(mx.concatenate([pair.a for pair in pairs], axis=1), blocks, pairs[0].scale))]


def _tokens(places: Sequence[int], step_tokens: int) -> slice | mx.array | None:
    """Ascending `places` as a stretch where they are one; None where they are all the tokens of the step."""
    if len(places) == step_tokens:
        return None
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return mx.array(list(places), dtype=mx.uint32)
