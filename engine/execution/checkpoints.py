"""Takes checkpoints of running rows between steps, and lets rows begin with one. Runs on the engine thread.

A state is taken while its newest token is fed, and becomes a checkpoint once a sound token has followed: that one is
known then, and not in the state. Nothing here waits for a disk. A fault costs a row a checkpoint, never its life.
Units: tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.durability import CheckpointFacts, Covered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.durability import Continuation, DurableStore, DurableUse
    from engine.contracts.snapshot import LayerSnapshot
    from engine.generation.row import Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DurableRow:
    """A row, and where its checkpoints go."""

    row: Row
    use: DurableUse


@dataclass(slots=True)
class _Watched:
    """When a row's next checkpoint is due, the caches that those on disk are of, and a state that was just taken."""

    due_tokens: int
    caches: list[Cache]
    taken: tuple[int, list[LayerSnapshot]] | None = None


class CheckpointKeeper:
    """Stands between the rows and their folders."""

    def __init__(
        self, restore: Callable[[Sequence[LayerSnapshot], int], list[Cache]], store: DurableStore | None = None
    ) -> None:
        """`restore` makes caches that hold the first tokens of some snapshots; `store` is closed in the end."""
        self._restore = restore
        self._store = store
        self._rows: dict[DurableRow, _Watched] = {}

    def begin(self, continuation: Continuation) -> tuple[list[Cache], int] | None:
        """Caches that hold the state that a row goes on from, and its tokens; None when all is to be fed again."""
        state = continuation.state
        if state is None:
            return None
        try:
            return self._restore(state.take_snapshots(), state.tokens), state.tokens
        except Exception:
            logger.exception("a checkpoint cannot be used; its tokens are read again")
            return None

    def watch(self, durable: DurableRow | None) -> None:
        """Take the state of a row if a checkpoint is due; called after each of its units, be it closed by then."""
        if durable is None or not durable.row.caches:
            return
        row, use = durable.row, durable.use
        written_tokens = row.position - row.prompt_tokens
        watched = self._rows.get(durable)
        if watched is None:
            due_tokens = _multiple_from(max(1, written_tokens), use.every_tokens)
            watched = self._rows[durable] = _Watched(due_tokens, row.caches)
        if written_tokens < watched.due_tokens or row.is_astray:
            return
        base = use.folder.next_base()
        if base is None:
            return
        watched.due_tokens = _multiple_from(written_tokens + 1, use.every_tokens)
        if row.caches is not watched.caches:  # the state was built anew, and does not add to what was written before
            base, watched.caches = Covered(), row.caches
        layers = _taken(row.caches, base)
        watched.taken = None if layers is None else (row.position, layers)
        if len(row.known_tokens) > row.position:
            self.confirm(durable)

    def confirm(self, durable: DurableRow | None) -> None:
        """Have what was taken of a row written, now that a sound token has followed."""
        watched = None if durable is None else self._rows.get(durable)
        if durable is None or watched is None or watched.taken is None:
            return
        row = durable.row
        (position, layers), watched.taken = watched.taken, None
        facts = CheckpointFacts(
            identity=durable.use.identity,
            tokens=row.known_tokens[: position + 1],
            prompt_tokens=row.prompt_tokens,
            seed=row.options.seed,
            seed_was_explicit=row.options.seed_was_explicit,
        )
        try:
            durable.use.folder.offer(facts, layers)
        except Exception:
            logger.exception("a checkpoint is not written")

    def finish(self, durable: DurableRow | None) -> None:
        """A row has come to its own end: nobody will go on from its checkpoints."""
        if durable is not None:
            durable.use.folder.drop_checkpoints()

    def distrust(self, durable: DurableRow | None) -> None:
        """Let go of a state that was taken from a row whose step has failed."""
        if durable is not None and durable in self._rows:
            self._rows[durable].taken = None

    def forget(self, durable: DurableRow | None) -> None:
        """Let go of a row that leaves."""
        if durable is not None:
            self._rows.pop(durable, None)

    def close(self) -> None:
        """Let what is queued be written."""
        self._rows.clear()
        if self._store is not None:
            self._store.close()


def _taken(caches: Sequence[Cache], base: Covered) -> list[LayerSnapshot] | None:
    """What the layers add to `base`, or all of a layer that does not add to it; None when it cannot be had."""
    try:
        return [_added(cache, base.tokens, base.kinds.get(layer)) for layer, cache in enumerate(caches)]
    except Exception:
        logger.warning("a row's state could not be taken", exc_info=True)
        return None


def _added(cache: Cache, since_tokens: int, kind: str | None) -> LayerSnapshot:
    added = cache.added_since(since_tokens if kind is not None else 0)
    return added if not added.start or added.kind == kind else cache.added_since(0)


def _multiple_from(tokens: int, step_tokens: int) -> int:
    """The smallest multiple of `step_tokens` that is not below `tokens`."""
    return -(-tokens // step_tokens) * step_tokens
