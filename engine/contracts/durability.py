"""What makes a generation durable: what is kept of it, how a row goes on from that, and what the store is asked.

A durable generation has one folder of its own, named by its id and its key, and locked by whoever runs it. Checkpoints
lie in it, and so does the log of its tokens. A checkpoint holds the state of all tokens but the newest, which is fed
next (the reference calls it pending): penalties, text and stop rules are rebuilt from the tokens, and the keys of the
draws from the seed and the place of a token. Units: tokens, bytes and seconds. Importing this module never imports mlx.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from engine.contracts.errors import CheckpointDamagedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint says of its generation, beside the state.

    `tokens` are those of the prompt, then the generated ones; the state covers all but the last of them. `seed` is the
    one that the generation runs with, whoever chose it.
    """

    identity: DurableIdentity
    tokens: tuple[int, ...]
    prompt_tokens: int
    seed: int
    seed_was_explicit: bool

    @property
    def state_tokens(self) -> int:
        """Tokens whose state is kept."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What the checkpoints on disk cover: the first `tokens`, and the kind of each layer that can be added to."""

    tokens: int = 0
    kinds: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))


class HeldState(Protocol):
    """A state that was read from disk and verified, in host memory, and not brought to the device yet."""

    @property
    def tokens(self) -> int:
        """Tokens, from the first of the prompt on, whose state this is."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""

    def take_snapshots(self) -> list[LayerSnapshot]:
        """The state for `CacheMaker.restore`, once: the host memory is given back. Only on the engine thread."""


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

    Every method may be called from any thread, except where it says so, and waits for nothing: what there is to do on
    the disk is done soon, in order.
    """

    @property
    def generation_id(self) -> str:
        """32 hexadecimal digits."""

    @property
    def key(self) -> str:
        """The generation checkpoint key: 64 hexadecimal digits."""

    @property
    def path(self) -> Path:
        """Where it lies. Files named `checkpoint-*`, `*.part` and `delivered` are the store's, others another's."""

    def next_base(self) -> Covered | None:
        """What the next checkpoint is to add to; None while one is being written, or the disk has lately failed.

        Waits for nothing: where the disk is slow, checkpoints are skipped.
        """

    def offer(self, facts: CheckpointFacts, layers: Sequence[LayerSnapshot]) -> None:
        """Have a checkpoint written, whose layers add to what `next_base` has said; on the engine thread alone."""

    def drop_checkpoints(self) -> None:
        """The generation has come to its own end: its checkpoints go. The rest stays."""

    def deliver(self, *, keep_seconds: float) -> None:
        """The end of the generation was sent: nobody looks for it any more, but by its id for so long.

        `DurableStore.find` passes it over from now on. It goes when the time is over, also if this process has ended by
        then; called again, the time begins anew. One small write, which is not waited for longer than that takes.
        """

    def release(self) -> None:
        """Unlock: the generation no longer runs here, and may go on elsewhere. Idempotent."""

    def remove(self, *, leave_mark: bool) -> None:
        """Remove the folder and all that is in it, and unlock it. Idempotent.

        Args:
            leave_mark: remember for a while that it was there, so that `DurableStore.open` can tell.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGeneration:
    """A generation that was found on disk and locked. Whoever gets it has to release or remove its folder.

    `facts` and `state` are those of the newest good checkpoint, None where there is none; `damaged` names the files
    that had to be passed over for it, newest first. `was_delivered`: its end was sent.
    """

    folder: DurableFolder
    facts: CheckpointFacts | None = None
    state: HeldState | None = None
    damaged: tuple[str, ...] = ()
    was_delivered: bool = False

    def require_good(self) -> CheckpointFacts:
        """The facts.

        Raises:
            CheckpointDamagedError: there is no good checkpoint.
        """
        if self.facts is None:
            raise CheckpointDamagedError(self.folder.generation_id, next(iter(self.damaged), "no checkpoint"))
        return self.facts


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
            ResumePointGoneError: it was, and is not any more.
            UnavailableError: another process, or a row of this one, holds it.
        """

    def find(self, key: str) -> KeptGeneration | None:
        """Lock the newest generation of this key that nobody holds, and read it; None when there is none.

        One that was delivered is passed over, and one without a checkpoint if there is another.
        """

    def close(self) -> None:
        """Write what is queued, for a while, and release every folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableUse:
    """What a row of a durable generation carries: where its checkpoints go, how often, and what they say of it."""

    folder: DurableFolder
    identity: DurableIdentity
    every_tokens: int
