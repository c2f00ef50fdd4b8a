"""A server on a free loopback port, over the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.service.fake_engine import FakeEngine
from tests.service.harness import Serving, serve


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    async with serve(FakeEngine()) as running:
        yield running
