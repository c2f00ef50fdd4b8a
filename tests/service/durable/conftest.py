"""A store that outlives servers, and a server over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.durable.fake_store import FakeStore
from tests.service.durable.lives import Life, Words, engine_of
from tests.service.harness import serve


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


@pytest.fixture
async def life(store: FakeStore) -> AsyncIterator[Life]:
    words = Words()
    async with serve(engine_of(store, words)) as serving:
        yield Life(serving, words)
