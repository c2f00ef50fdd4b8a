"""The Protocol of one layer's state for one row (source name: one entry of `Cache[]`).

Units: `offset` counts tokens, `nbytes` bytes. A cache belongs to one row and to the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

    from engine.contracts.snapshot import LayerSnapshot

GROWTH_TOKENS = 256
"""A row's storage grows by so many tokens at a time, and is predicted in the same steps."""

SLACK_TOKENS = 32
"""A sliding layer keeps so many tokens more than its window sees, so that it seldom moves what it keeps."""


def capacity_for(tokens: int) -> int:
    """Tokens for which storage is reserved when a row holds `tokens`."""
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS


def window_capacity(window: int) -> int:
    """Tokens for which a layer that sees `window` tokens reserves storage at most, between steps."""
    return window + SLACK_TOKENS


@dataclass(frozen=True, slots=True)
class TableMember:
    """One row's part of a packed step, in a table: its slot, first packed token, tokens, and tokens held before."""

    slot: int
    start: int
    length: int
    offset: int


class TableStep(Protocol):
    """One packed step of the rows of one table, the same in every layer."""

    @property
    def members(self) -> Sequence[TableMember]:
        """Who takes part; their slots are places on the first axis of the table's storage."""

    def storage(self, layer: int, like: mx.array | None) -> mx.array:
        """Keys, then values, of one layer: [places, 2·Hkv, capacity, D].

        Made by the shape of `like` [.., 2·Hkv, .., D]; None when it was written before.
        """

    @property
    def order(self) -> Sequence[int]:
        """The packed tokens in the order in which `attend` returns them."""

    def attend(
        self, queries: mx.array, joined: mx.array | None, *, layer: int, softcap: float = 0.0
    ) -> list[Callable[[], mx.array]]:
        """Append, then attend causally; or attend again, when the step's keys and values were appended before.

        Args:
            queries: [T, H, 1, D] of the whole step, multiplied by `engine.ops.exponential.query_factor`.
            joined: keys, then values: [T, 2·Hkv, 1, D] of the whole step; None when they were appended before.
            layer: index into the rows' caches.
            softcap: bound that tanh puts on the scores; 0 means none.

        Returns:
            What computes the parts [.., H·D] that, joined, hold the tokens in `order`. Each may run in any stream.
        """


class CacheTable(Protocol):
    """Storage that rows share so that they can attend together."""

    def plan(self, members: Sequence[TableMember]) -> TableStep:
        """Plan a step of `members`, for whom there is room."""


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where a row's keys and values are kept among others'. `slot` names the row in its table until it leaves."""

    table: CacheTable
    slot: int


class HeldKeys(Protocol):
    """What the newest tokens of one row see in one layer. Lives no longer than the step that appended them."""

    def attend(self, queries: mx.array, *, scale: float, softcap: float = 0.0) -> mx.array:
        """Attend with `queries` [1, H, L, D] of those tokens, causally.

        Scores are multiplied by `scale`, then bounded by tanh to `softcap` unless that is 0. Returns [1, H, L, D].
        """


class Cache(Protocol):
    """Keys and values of one attention layer of one row."""

    @property
    def offset(self) -> int:
        """Tokens held."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved, padding included."""

    @property
    def is_seated(self) -> bool:
        """Whether `place_for` says where, so that stretches of this row may be split within one step."""

    def append(self, keys: mx.array, values: mx.array) -> HeldKeys:
        """Append `keys`, `values` [1, Hkv, L, D]; returns what their tokens see, for as many layers as attend to it."""

    def place_for(self, tokens: int) -> TablePlace | None:
        """Make room for `tokens` more, and say where; None when the row attends by itself, through `append`."""

    def advance(self, tokens: int) -> None:
        """Count `tokens` that a table step appended."""

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""

    def maintain(self) -> None:
        """Change the form of storage if that is due; called between steps, before each in which the row takes part."""

    @property
    def trimmable_tokens(self) -> int:
        """How many of the newest tokens `trim` can take back exactly."""

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`, or all if there are fewer.

        A step may have been fed a guess, so every cache of ours can take back the one token that was appended last by
        itself, once. A row whose state cannot is fed anew.

        Raises:
            ValueError: there are more than `trimmable_tokens`; nothing was forgotten.
        """

    def snapshot(self) -> LayerSnapshot:
        """The state as it stands, with settled arrays of its own: nothing done to this cache later changes it.

        Waits for the device. Raises `ValueError` when no token is held.
        """

    def added_since(self, tokens: int) -> LayerSnapshot:
        """What was appended after the first `tokens`, as a piece that can be joined to a snapshot of those.

        The whole state, as `snapshot` has it, where that is no row of tokens, where `tokens` is 0, or where the older
        ones have been rewritten or let go of since; pieces of another kind than those before them do not join either.
        Nothing else changes: storage that can be shared is copied here.
        """

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """Hold the first `tokens` of `snapshot`; only for a cache that holds nothing yet.

        Raises:
            ValueError: the snapshot is of another kind, or cannot be cut to `tokens`.
        """

    def close(self) -> None:
        """Release the arrays. The cache must not be used again."""


class RecurrentState(Protocol):
    """What the cache of a recurrent layer is beside a `Cache`: one matrix for each head, and a convolution's inputs."""

    def read(self) -> tuple[mx.array, mx.array] | None:
        """The newest inputs of the convolution [1, K-1, C] and the matrices [1, H, Dv, Dk]; None before any token."""

    def write(self, tail: mx.array, matrices: mx.array, *, tokens: int) -> None:
        """Replace both; they now stand `tokens` further on."""


class CacheMaker(Protocol):
    """Makes the state of each row of one graph; rows may share storage that it owns."""

    @property
    def converts(self) -> bool:
        """Whether caches may change their form between steps; see `Cache.maintain`."""

    def make_caches(self) -> list[Cache]:
        """The fresh state of one row."""

    def restore(self, snapshots: Sequence[LayerSnapshot], tokens: int) -> list[Cache]:
        """The state of a new row that holds the first `tokens` of `snapshots`, one for each cache.

        Raises:
            ValueError: the snapshots are of other caches, or cannot be cut to `tokens`. Nothing is held then.
        """
