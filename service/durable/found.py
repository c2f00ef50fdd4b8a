"""A durable generation as it was found on disk, locked for us: its log, and what its newest good checkpoint says.

Whoever gets one goes on with it, or lets it go. Reading waits for the disk, so it is done beside the loop.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.contracts.durability import Continuation
from engine.contracts.errors import CheckpointDamagedError, CheckpointMismatchError
from service.durable.token_log import FILE_NAME, TokenLog, open_log, was_begun_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.durability import DurableIdentity, DurableStore, KeptGeneration

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGeneration:
    """`log` is None where it is damaged; then a checkpoint alone says what was generated."""

    kept: KeptGeneration
    log: TokenLog | None

    @property
    def generation_id(self) -> str:
        """The server's id of it."""
        return self.kept.folder.generation_id

    @property
    def identity(self) -> DurableIdentity:
        """What it was made with."""
        return self.log.header.identity if self.log is not None else self.kept.require_good().identity

    def require_identity(self, served: DurableIdentity) -> None:
        """Raise `CheckpointMismatchError`, which names the differences, unless it was made with what is `served`."""
        differences = self.identity.differences(served)
        if differences:
            raise CheckpointMismatchError(self.generation_id, differences)

    def require_log(self) -> TokenLog:
        """The log.

        Raises:
            CheckpointDamagedError: there is none that says what was asked.
        """
        if self.log is None:
            raise CheckpointDamagedError(self.generation_id, FILE_NAME)
        return self.log

    def is_of(self, key: str, caller: str, prompt_ids: Sequence[int]) -> bool:
        """Whether it is of this request, by what stands in its files: names of folders can be changed."""
        if self.log is not None:
            return (self.log.header.key, self.log.header.caller) == (key, caller)
        return self.with_prompt(prompt_ids).kept.facts is not None

    def with_prompt(self, prompt_ids: Sequence[int]) -> FoundGeneration:
        """The same without a checkpoint that is of another prompt."""
        facts = self.kept.facts
        if facts is None or facts.tokens[: facts.prompt_tokens] == tuple(prompt_ids):
            return self
        return replace(self, kept=replace(self.kept, facts=None, state=None))

    def let_go(self) -> None:
        """Unlock it for others."""
        if self.log is not None:
            self.log.close_file()
        self.kept.folder.release()

    def remove(self) -> None:
        """Remove it, and remember for a while that it was there."""
        if self.log is not None:
            self.log.close_file()
        self.kept.folder.remove(leave_mark=True)

    def continuation(self, *, only_logged: bool) -> Continuation:
        """How a row goes on: with all tokens that are known, or, with `only_logged`, those that the log holds.

        Raises:
            CheckpointDamagedError: log and checkpoint contradict each other.
        """
        facts, state = self.kept.facts, self.kept.state
        logged = () if self.log is None else tuple(token.token for token in self.log.tokens)
        checked = () if facts is None else facts.tokens[facts.prompt_tokens :]
        shared = min(len(logged), len(checked))
        if logged[:shared] != checked[:shared]:
            raise CheckpointDamagedError(self.generation_id, FILE_NAME)
        generated = logged if only_logged or len(logged) > len(checked) else checked
        if facts is not None and facts.state_tokens >= facts.prompt_tokens + len(generated):
            state = None
        return Continuation(generated=generated, seed=self._seed(), state=state)

    def _seed(self) -> int:
        return self.log.header.seed if self.log is not None else self.kept.require_good().seed


def open_found(store: DurableStore, generation_id: str) -> FoundGeneration:
    """Lock and read the generation of this id. What stands in its log is enough, be its checkpoints damaged.

    Raises:
        EngineError: see `DurableStore.open`.
        CheckpointDamagedError: the log does not even say what was asked.
    """
    kept = store.open(generation_id)
    try:
        log = open_log(kept.folder.path, generation_id)
    except BaseException:
        kept.folder.release()
        raise
    _tell_of_damage(kept, log)
    return FoundGeneration(kept=kept, log=log)


def find_found(store: DurableStore, key: str, caller: str, prompt_ids: Sequence[int]) -> FoundGeneration | None:
    """Lock and read the newest generation of this key whose end nobody has had; None when there is none.

    One whose files say that they are of another request than the name of its folder does is passed over.

    Raises:
        CheckpointDamagedError: nothing is whole of those that there are. They are gone by then.
    """
    damage: CheckpointDamagedError | None = None
    with contextlib.ExitStack() as passed:
        while (kept := store.find(key)) is not None:
            try:
                found = _usable(kept)
            except CheckpointDamagedError as error:
                damage = error
                continue
            if found is None:
                continue
            if found.is_of(key, caller, prompt_ids):
                return found
            passed.callback(found.let_go)
            logger.warning("a generation is kept under the name of another, and passed over")
    if damage is not None:
        raise damage
    return None


def _usable(kept: KeptGeneration) -> FoundGeneration | None:
    """What a caller may go on with; None when nothing was ever written. That is gone then.

    Raises:
        CheckpointDamagedError: nothing of it is whole. It is gone by then.
    """
    generation_id = kept.folder.generation_id
    try:
        log = open_log(kept.folder.path, generation_id)
    except CheckpointDamagedError:
        log = None
    found = FoundGeneration(kept=kept, log=log)
    if log is None and kept.facts is None:
        was_begun = was_begun_at(kept.folder.path)
        found.remove()
        if was_begun or kept.damaged:
            raise CheckpointDamagedError(generation_id, FILE_NAME)
        return None
    _tell_of_damage(kept, log)
    return found


def _tell_of_damage(kept: KeptGeneration, log: TokenLog | None) -> None:
    files = [*kept.damaged, *([FILE_NAME] if log is None or not log.is_whole else [])]
    if files:
        fields = {"generation_id": kept.folder.generation_id, "damaged": files}
        logger.warning("a generation goes on from what is whole", extra={"fields": fields})
