"""A row's state in a graph of another package: mlx-lm's own caches, all layers together, as one `Cache`.

What attention does with them is the foreign graph's business; here they are counted, cut, kept and given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import mlx.core as mx

from engine.contracts.errors import GraphContractError
from engine.contracts.snapshot import LayerSnapshot
from engine.ops.copying import true_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.contracts.cache import Cache

FOREIGN = "mlx-lm"
_NOTHING = "nothing"
_TEXT = "text "


class ForeignCache(Protocol):
    """What mlx-lm's caches have in common; `state` is a tree of arrays, numbers and None."""

    state: Any

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""

    def is_trimmable(self) -> bool:
        """Whether `trim` can drop the newest tokens exactly."""

    def trim(self, n: int) -> int:
        """Forget the newest `n` tokens."""


class ForeignState:
    """See `engine.contracts.cache.Cache`. One stands for all layers of a row."""

    def __init__(self, caches: Sequence[ForeignCache]) -> None:
        """Take fresh caches of one row, in the order in which the foreign graph made them."""
        self._caches = list(caches)
        self._offset = 0

    @property
    def caches(self) -> list[ForeignCache]:
        """The caches, for the foreign graph to append to."""
        return self._caches

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes reserved, padding included."""
        return sum(array.nbytes for array in self.arrays())

    def append(self, keys: mx.array, values: mx.array) -> NoReturn:  # noqa: ARG002 - the Protocol's parameters
        """Never: a foreign graph attends by itself."""
        raise GraphContractError("the state of a foreign graph does not attend")

    @property
    def is_seated(self) -> bool:
        """Never: the row attends by itself."""
        return False

    def place_for(self, tokens: int) -> None:  # noqa: ARG002 - the Protocol's parameter
        """No table: a foreign graph attends by itself."""
        return

    def advance(self, tokens: int) -> None:
        """Count `tokens` that the foreign graph appended."""
        self._offset += tokens

    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""
        return [node for _, node in _nodes(self._states()) if isinstance(node, mx.array)]

    def maintain(self) -> None:
        """Nothing: the form of storage is the foreign graph's business."""

    @property
    def trimmable_tokens(self) -> int:
        """All, or none as soon as one layer cannot drop tokens."""
        return self._offset if all(cache.is_trimmable() for cache in self._caches) else 0

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`, or all if there are fewer.

        Raises:
            ValueError: a layer cannot; nothing was forgotten.
        """
        tokens = min(tokens, self._offset)
        if tokens > self.trimmable_tokens:
            raise ValueError("a layer of the foreign graph cannot drop its newest tokens")
        for cache in self._caches:
            cache.trim(tokens)
        self._offset -= tokens

    def snapshot(self) -> LayerSnapshot:
        """The state as it stands, with settled arrays of its own. See `engine.contracts.cache.Cache.snapshot`."""
        if not self._offset:
            raise ValueError("a state that holds no token has no snapshot")
        nodes = list(_nodes(self._states()))
        arrays = {path: true_copy(node) for path, node in nodes if isinstance(node, mx.array)}
        facts = {path: _fact(node) for path, node in nodes if not isinstance(node, mx.array)}
        mx.eval(arrays)
        least = 0 if self.trimmable_tokens else self._offset
        return LayerSnapshot(kind=FOREIGN, tokens=self._offset, least_tokens=least, facts=facts, arrays=arrays)

    def added_since(self, tokens: int) -> LayerSnapshot:  # noqa: ARG002 - the Protocol's parameter
        """The whole state: how its arrays grow is the foreign graph's business."""
        return self.snapshot()

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """Hold the first `tokens` of `snapshot`. See `engine.contracts.cache.Cache.restore`."""
        if snapshot.kind != FOREIGN:
            raise ValueError(f"a snapshot of kind {snapshot.kind!r} does not fill a state of kind {FOREIGN!r}")
        if not max(1, snapshot.least_tokens) <= tokens <= snapshot.tokens:
            raise ValueError(f"a snapshot of {snapshot.tokens} tokens cannot be cut to {tokens}")
        states = _rebuilt("", snapshot)
        for cache, state in zip(self._caches, states, strict=True):
            cache.state = state
        self._offset = snapshot.tokens
        if tokens < snapshot.tokens:
            self.trim(snapshot.tokens - tokens)

    def close(self) -> None:
        """Release the arrays."""
        self._caches.clear()
        self._offset = 0

    def _states(self) -> list[Any]:
        return [cache.state for cache in self._caches]


class ForeignStates:
    """Makes rows' states; see `engine.contracts.cache.CacheMaker`."""

    def __init__(self, make: Callable[[], Sequence[ForeignCache]]) -> None:
        """`make` yields fresh caches of one row."""
        self._make = make

    @property
    def converts(self) -> bool:
        """Never."""
        return False

    def make_caches(self) -> list[Cache]:
        """The fresh state of one row."""
        return [ForeignState(self._make())]

    def restore(self, snapshots: Sequence[LayerSnapshot], tokens: int) -> list[Cache]:
        """The state of a new row that holds the first `tokens` of `snapshots`."""
        state = ForeignState(self._make())
        state.restore(snapshots[0], tokens)
        return [state]


def _nodes(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every node of a tree of lists and tuples by its path, such as ".3.0" for the keys of the fourth layer."""
    yield path, state
    if isinstance(state, list | tuple):
        for index, part in enumerate(state):
            yield from _nodes(part, f"{path}.{index}")


def _fact(node: Any) -> int | str:
    """A node that is no array, as a snapshot keeps it."""
    if isinstance(node, list | tuple):
        return f"{type(node).__name__} {len(node)}"
    if isinstance(node, str):
        return _TEXT + node
    if node is None or isinstance(node, int):
        return _NOTHING if node is None else node
    raise ValueError(f"a state that holds {type(node).__name__} has no snapshot")


def _rebuilt(path: str, snapshot: LayerSnapshot) -> Any:
    """The node at `path`; an array comes as a view of its own, because mlx-lm writes into what it is given."""
    if path in snapshot.arrays:
        return snapshot.arrays[path][...]
    fact = snapshot.facts[path]
    if not isinstance(fact, str):
        return fact
    kind, _, detail = fact.partition(" ")
    if fact == _NOTHING or kind == _TEXT.strip():
        return None if fact == _NOTHING else detail
    parts = [_rebuilt(f"{path}.{index}", snapshot) for index in range(int(detail))]
    return tuple(parts) if kind == "tuple" else parts
