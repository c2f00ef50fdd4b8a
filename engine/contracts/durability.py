"""What makes a generation durable: what is kept of it, how a row goes on from that, and what the store is asked.

A durable generation has one folder of its own, named by its id and its key, and locked by whoever runs it. Checkpoints
lie in it, and so does the log of its tokens. A checkpoint holds the state of all tokens but the newest, which is fed
next (the reference calls it pending): penalties, text and stop rules are rebuilt from the tokens, and the keys of the
draws from the seed and the place of a token. Units: tokens, bytes and seconds. Importing this module never imports mlx.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.contracts.snapshot import LayerSnapshot

DEFAULT_EVERY_TOKENS: Final = 64
"""Tokens between two checkpoints where the request does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableIdentity:
    """What must be equal for a generation to go on in another process; the names are those that callers are told.

    `arithmetic` covers the rest of what decides the bits of a state: geometry, device, libraries, revisions.
    """

    model: str
    weights: str
    tokenizer: str
    kv_storage: str
    adapters: str
    arithmetic: str

    def differences(self, other: DurableIdentity) -> tuple[str, ...]:
        """The names of what differs, in the order above."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) != getattr(other, one.name))


class HeldState(Protocol):
    """A state that was read from disk and verified, in host memory, and not brought to the device yet."""

    @property
    def tokens(self) -> int:
        """Tokens, from the first of the prompt on, whose state this is."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""

    def snapshots(self) -> list[LayerSnapshot]:
        """The state for `CacheMaker.restore`; only on the engine thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a row goes on: it begins with `generated` as tokens that it has committed, the first of which has index 0.

    `state` covers less than the prompt and `generated` together. The tokens that it does not cover are fed again by
    their ids: those of the prompt in its chunks, those after it one at a time, as when they were generated, so that
    every bit is the same. None rebuilds the whole state so, which is as exact and takes longer. `seed` is the one that
    the generation ran with, whoever chose it.
    """

    generated: tuple[int, ...]
    seed: int
    state: HeldState | None = None


class DurableFolder(Protocol):
    """The folder of one durable generation, locked: no other process, and nobody else in this one, holds it.

    Every method may be called from any thread, except where it says so.
    """

    @property
    def generation_id(self) -> str:
        """32 hexadecimal digits."""

    @property
    def key(self) -> str:
        """The generation checkpoint key: 64 hexadecimal digits."""

    @property
    def path(self) -> Path:
        """Where it lies. Files named `checkpoint-*` and `*.part` are the store's; others are their writers'."""

    def drop_checkpoints(self) -> None:
        """The generation has come to its own end: queue the removal of its checkpoints. The rest stays."""

    def release(self) -> None:
        """Unlock: the generation no longer runs here, and may go on elsewhere. What is queued is written first.

        Idempotent, and waits for nothing.
        """

    def remove(self, *, leave_mark: bool) -> None:
        """Remove the folder and all that is in it, and unlock it. Idempotent.

        Args:
            leave_mark: remember for a while that it was there, so that `DurableStore.open` can tell.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGeneration:
    """A generation that was found on disk and locked. Whoever gets it has to release or remove its folder.

    `prompt_ids`, `generated`, `seed` and `identity` are what the newest good checkpoint says; `damaged` names the files
    that had to be passed over for it. `state` is None where there is no checkpoint yet; then the tokens are empty too,
    and only a log can say more.
    """

    folder: DurableFolder
    identity: DurableIdentity | None = None
    prompt_ids: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    seed: int = 0
    seed_was_explicit: bool = False
    state: HeldState | None = None
    damaged: tuple[str, ...] = ()


class DurableStore(Protocol):
    """All durable generations of one folder, which servers may share.

    Methods wait for the disk: they are called beside the loop, and never on the engine thread.
    """

    def create(self, generation_id: str, key: str) -> DurableFolder | None:
        """A new, locked folder; None when the disk does not take it, which the log tells once.

        The generation then runs all the same, and `ResolvedExecution` says that it is not durable.
        """

    def open(self, generation_id: str) -> KeptGeneration:
        """Lock the folder of this generation and read its newest good checkpoint.

        Raises:
            NotFoundError: no such generation was kept here.
            ResumePointGoneError: it was, and its time has run out.
            UnavailableError: another process, or a row of this one, holds it: try again.
            CheckpointDamagedError: there are checkpoints, and none of them is whole. `folder` is released; call
                `open_damaged` to go on from a log instead.
        """

    def open_damaged(self, generation_id: str) -> KeptGeneration:
        """As `open`, but with no state where `open` raises `CheckpointDamagedError`."""

    def find(self, key: str) -> KeptGeneration | None:
        """Lock the newest generation of this key that nobody holds and read it; None when there is none.

        Raises:
            CheckpointDamagedError: as `open`; what is damaged is removed, so that the next call finds nothing.
        """

    def close(self) -> None:
        """Write what is queued, for a while, and release every folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableUse:
    """What a row of a durable generation carries: where its checkpoints go, and what each of them says."""

    folder: DurableFolder
    identity: DurableIdentity
    every_tokens: int
    prompt_ids: Sequence[int]
    seed: int
    seed_was_explicit: bool
    continuation: Continuation | None = None
