"""Products that adapters add to, row by row of a packed step.

y + scale·(x·A)·B, cast to the type of x, in the order of a row's adapters. Rows without one keep their bits.
Source: Hu et al. 2021, "LoRA"; reference, autoregressive §8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.adapters import AdapterTarget
from engine.ops.linear import multiply_by_tiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.contracts.graph import PackedSegment
    from engine.contracts.option_groups import AdapterSelection
    from engine.ops.linear import Product


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
class AdaptedTokens:
    """The tokens of a step whose rows take the same adapters: a stretch, or their positions."""

    tokens: slice | mx.array
    adapters: tuple[AdapterSelection, ...]


class AdaptedLinear:
    """One product of joined projections, each of which adapters may change."""

    __slots__ = ("_attached", "_product", "_sites")

    def __init__(self, product: Product, sites: AdapterSites) -> None:
        """Adapt `product` as `sites` says for the step in hand."""
        self._product = product
        self._sites = sites
        self._attached: dict[str, list[tuple[slice, LowRankPair]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold, adapters apart."""
        return self._product.nbytes

    def arrays(self) -> list[mx.array]:
        """The resident arrays, adapters apart."""
        return self._product.arrays()

    def attach(self, adapter: str, columns: slice, pair: LowRankPair) -> None:
        """Let rows that take `adapter` add `pair` to `columns` of their results."""
        self._attached.setdefault(adapter, []).append((columns, pair))

    def detach_all(self) -> None:
        """Let go of all pairs."""
        self._attached.clear()

    def __call__(self, x: mx.array) -> mx.array:
        """Return the product of `x` [1, T, in], changed for the rows that take adapters: [1, T, out]."""
        y = self._product(x)
        for group in self._sites.step:
            for selection in group.adapters:
                for columns, pair in self._attached.get(selection.id, ()):
                    scale = pair.scale if selection.scale is None else selection.scale
                    part = multiply_by_tiles(pair, x[:, group.tokens], self._sites.row_tile_tokens)
                    added = (scale * part).astype(x.dtype)
                    y[:, group.tokens, columns] = y[:, group.tokens, columns] + added
        return y


class AdapterSites:
    """The projections of one graph that take adapters, and which rows of the step in hand take which."""

    def __init__(self, row_tile_tokens: int | None) -> None:
        """`row_tile_tokens` as in `Composition`."""
        self.row_tile_tokens = row_tile_tokens
        self.step: tuple[AdaptedTokens, ...] = ()
        self._places: dict[str, tuple[AdaptedLinear, slice]] = {}
        self._targets: dict[str, AdapterTarget] = {}
        self._pairs: list[LowRankPair] = []

    @property
    def targets(self) -> Mapping[str, AdapterTarget]:
        """The projections by their paths."""
        return self._targets

    @property
    def nbytes(self) -> int:
        """Bytes that the attached pairs hold."""
        return sum(pair.nbytes for pair in self._pairs)

    def place(self, product: Product, targets: Sequence[AdapterTarget]) -> AdaptedLinear:
        """`product`, whose results are those of `targets` side by side, as a place for adapters."""
        adapted, start = AdaptedLinear(product, self), 0
        for target in targets:
            self._targets[target.module] = target
            self._places[target.module] = adapted, slice(start, start + target.out_features)
            start += target.out_features
        return adapted

    def attach(self, adapter: str, pairs: Mapping[str, LowRankPair]) -> None:
        """Mount `pairs`, by the paths of their projections; each must be one of `targets` and fit it."""
        for module, pair in pairs.items():
            adapted, columns = self._places[module]
            adapted.attach(adapter, columns, pair)
            self._pairs.append(pair)

    def begin(self, segments: Sequence[PackedSegment]) -> None:
        """A step of `segments` follows."""
        groups: dict[tuple[AdapterSelection, ...], list[int]] = {}
        start = 0
        for segment in segments:
            end = start + segment.length
            if segment.adapters:
                groups.setdefault(segment.adapters, []).extend(range(start, end))
            start = end
        self.step = tuple(AdaptedTokens(_tokens(places), adapters) for adapters, places in groups.items())

    def close(self) -> None:
        """Let go of all adapters."""
        for adapted, _ in self._places.values():
            adapted.detach_all()
        self._pairs.clear()
        self.step = ()


def _tokens(places: Sequence[int]) -> slice | mx.array:
    """Ascending `places` as a stretch where they are one."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return mx.array(list(places), dtype=mx.uint32)
