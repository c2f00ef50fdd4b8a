"""A store of durable generations over plain folders: locks and marks are in memory, and nothing is checkpointed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from engine.contracts.durability import KeptGeneration
from engine.contracts.errors import NotFoundError, ResumePointGoneError, UnavailableError


class FakeFolder:
    """One generation's folder, locked until it is released or removed."""

    def __init__(self, store: FakeStore, generation_id: str, key: str) -> None:
        self.generation_id = generation_id
        self.key = key
        self.path = store.root / generation_id
        self._store = store

    def deliver(self, *, keep_seconds: float) -> None:
        self._store.delivered[self.generation_id] = keep_seconds

    def release(self) -> None:
        self._store.held.discard(self.generation_id)

    def remove(self, *, leave_mark: bool) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._store.keys.pop(self.generation_id, None)
        self._store.delivered.pop(self.generation_id, None)
        if leave_mark:
            self._store.marks.add(self.generation_id)
        self.release()


@dataclass
class FakeStore:
    """`takes` False stands for a disk that takes nothing."""

    root: Path
    takes: bool = True
    keys: dict[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    delivered: dict[str, float] = field(default_factory=dict)

    def create(self, generation_id: str, key: str) -> FakeFolder | None:
        if not self.takes:
            return None
        (self.root / generation_id).mkdir(parents=True)
        self.keys[generation_id] = key
        self.held.add(generation_id)
        return FakeFolder(self, generation_id, key)

    def open(self, generation_id: str) -> KeptGeneration:
        if generation_id in self.marks:
            raise ResumePointGoneError(generation_id)
        if generation_id not in self.keys:
            raise NotFoundError("generation", generation_id)
        if generation_id in self.held:
            raise UnavailableError("busy", "somebody holds it")
        self.held.add(generation_id)
        folder = FakeFolder(self, generation_id, self.keys[generation_id])
        return KeptGeneration(folder=folder, was_delivered=generation_id in self.delivered)

    def find(self, key: str) -> KeptGeneration | None:
        passed = self.held | self.delivered.keys()
        free = [one for one, its_key in self.keys.items() if its_key == key and one not in passed]
        return self.open(free[-1]) if free else None
