"""The folder of one durable generation while it is locked: its checkpoints, from the newest good one on.

The two newest are kept, so that damage to one leaves the other. Rows and callers only queue work here; the disk's
worker does it. Units: tokens and bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.contracts.durability import Covered, KeptGeneration
from engine.contracts.errors import ArtifactError
from engine.state.checkpoint_file import HEAD, OURS, read_checkpoint, write_checkpoint
from engine.state.snapshots import joined
from engine.state.state_arrays import to_device, to_host
from engine.state.state_file import ForeignFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from engine.contracts.durability import CheckpointFacts
    from engine.contracts.snapshot import LayerSnapshot
    from engine.state.checkpoint_file import Head, StoredLayer
    from engine.state.durable_root import FolderLock
    from engine.state.state_file import HostTensor

logger = logging.getLogger(__name__)

KEPT_HEADS = 2


class Disk(Protocol):
    """What a generation's folder asks of the disk that it is on."""

    def takes_more(self) -> bool:
        """Whether a checkpoint may be offered now."""

    def submit(self, task: Callable[[], None], nbytes: int = 0) -> None:
        """Have the worker do `task`."""

    def make_room(self, needed_bytes: int) -> None:
        """Raise `OSError` unless so many bytes may be written."""

    def remove(self, lock: FolderLock, *, leave_mark: bool) -> None:
        """Remove a folder. Raises `OSError`."""


class StoredState:
    """See `engine.contracts.durability.HeldState`."""

    def __init__(self, tokens: int, layers: Sequence[StoredLayer]) -> None:
        """Hold what was read."""
        self.tokens = tokens
        self._layers = tuple(layers)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(
            len(tensor.data) for layer in self._layers for _, tensors in layer.pieces for tensor in tensors.values()
        )

    def take_snapshots(self) -> list[LayerSnapshot]:
        """See `engine.contracts.durability.HeldState.take_snapshots`."""
        layers, self._layers = self._layers, ()
        return [
            joined(to_device([piece for piece, _ in layer.pieces], [tensors for _, tensors in layer.pieces]))
            for layer in layers
        ]


class GenerationFolder:
    """See `engine.contracts.durability.DurableFolder`."""

    def __init__(self, disk: Disk, lock: FolderLock, *, generation_id: str, key: str) -> None:
        """Take over a locked folder, and assume nothing of what is in it."""
        self.generation_id = generation_id
        self.key = key
        self._disk = disk
        self._lock = lock
        self._guard = threading.Lock()
        self._heads: tuple[Head, ...] = ()
        self._is_busy = False
        self._is_over = False

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._lock.path

    def read_newest(self) -> KeptGeneration:
        """The newest checkpoint that is whole, to which later ones will add; waits for the disk."""
        damaged: list[str] = []
        for name in sorted((path.name for path in self.path.glob(OURS) if HEAD.fullmatch(path.name)), reverse=True):
            try:
                facts, head, layers = read_checkpoint(self.path, name, self.generation_id)
            except (ArtifactError, ForeignFileError, OSError) as error:
                logger.warning("a checkpoint of generation %s is passed over: %s", self.generation_id, error)
                damaged.append(name)
                continue
            self._heads = (head,)
            state = StoredState(facts.state_tokens, layers)
            return KeptGeneration(folder=self, facts=facts, state=state, damaged=tuple(damaged))
        return KeptGeneration(folder=self, damaged=tuple(damaged))

    def next_base(self) -> Covered | None:
        """See `engine.contracts.durability.DurableFolder.next_base`."""
        with self._guard:
            if self._is_busy or self._is_over or not self._disk.takes_more():
                return None
            if not self._heads:
                return Covered()
            newest = self._heads[-1]
        return Covered(tokens=newest.state_tokens, kinds=newest.kinds)

    def offer(self, facts: CheckpointFacts, layers: Sequence[LayerSnapshot]) -> None:
        """See `engine.contracts.durability.DurableFolder.offer`."""
        tensors = to_host(layers)
        held = [(replace(layer, arrays={}), tensor) for layer, tensor in zip(layers, tensors, strict=True)]
        nbytes = sum(layer.nbytes for layer in layers)
        with self._guard:
            if self._is_over:
                return
            self._is_busy = True
        self._disk.submit(lambda: self._write(facts, held, nbytes), nbytes)

    def drop_checkpoints(self) -> None:
        """See `engine.contracts.durability.DurableFolder.drop_checkpoints`."""
        if self._end():
            self._disk.submit(lambda: self._tidy(keep=set()))

    def deliver(self, *, keep_seconds: float) -> None:
        """See `engine.contracts.durability.DurableFolder.deliver`."""
        with suppress(OSError):  # a disk that refuses it has to hold the rest until that is too old
            self._lock.deliver(time.time() + keep_seconds)

    def release(self) -> None:
        """See `engine.contracts.durability.DurableFolder.release`."""
        self._end()
        self._disk.submit(self._lock.unlock)

    def remove(self, *, leave_mark: bool) -> None:
        """See `engine.contracts.durability.DurableFolder.remove`."""
        self._end()
        self._disk.submit(lambda: self._remove(leave_mark=leave_mark))

    def _end(self) -> bool:
        """Take no more checkpoints; returns whether any were taken until now."""
        with self._guard:
            before, self._is_over = self._is_over, True
        return not before

    def _remove(self, *, leave_mark: bool) -> None:
        if self._lock.is_held:
            self._disk.remove(self._lock, leave_mark=leave_mark)

    def _write(
        self, facts: CheckpointFacts, layers: Sequence[tuple[LayerSnapshot, Mapping[str, HostTensor]]], nbytes: int
    ) -> None:
        try:
            self._disk.make_room(nbytes)
            before = self._heads[-1].pieces if self._heads else ()
            head = write_checkpoint(self.path, self.generation_id, facts, layers, before)
            with self._guard:
                self._heads = (*self._heads, head)[-KEPT_HEADS:]
            self._tidy(keep=set().union(*(one.files for one in self._heads)))
        finally:
            with self._guard:
                self._is_busy = False

    def _tidy(self, keep: set[str]) -> None:
        """Remove what no kept checkpoint needs, and what writers that were killed have left."""
        for path in self.path.glob(OURS):
            if path.name not in keep:
                with suppress(FileNotFoundError):
                    path.unlink()
