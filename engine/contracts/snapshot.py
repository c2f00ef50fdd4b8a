"""A layer's state, taken out of a row so that other rows can begin with it: what prefix stores keep and disks hold.

A snapshot never changes: no append, trim or close of the row that it came from, or of a row that began with it, can be
seen in its arrays. Units: tokens and bytes. Importing this module never imports mlx.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.core as mx


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSnapshot:
    """The state of one layer after `tokens` tokens.

    `kind` names the layout of `arrays`, which are settled; `facts` is what else is needed to read them, ready for JSON.
    `least_tokens` is the fewest tokens to which the state can be cut: 0 for any cut, `tokens` for none.
    With a `start` above 0 it is a piece of a state: what the tokens from there on have added to the pieces before it.
    """

    kind: str
    tokens: int
    least_tokens: int = 0
    start: int = 0
    facts: Mapping[str, int | str] = field(default_factory=dict)
    arrays: Mapping[str, mx.array]

    def __post_init__(self) -> None:
        """Seal the mappings."""
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))
        object.__setattr__(self, "arrays", MappingProxyType(dict(self.arrays)))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def usable_tokens(snapshots: Sequence[LayerSnapshot], wanted_tokens: int) -> int:
    """How many tokens of a row's layers can be used by a row that shares its first `wanted_tokens` with it.

    Source: reference, autoregressive §4.4: what cannot be cut to the shared length is of no use.
    """
    found = min((wanted_tokens, *(snapshot.tokens for snapshot in snapshots))) if snapshots else 0
    return found if all(snapshot.least_tokens <= found for snapshot in snapshots) else 0
