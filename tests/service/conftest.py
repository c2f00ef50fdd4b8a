"""A server on a free loopback port, over the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.certificates import Authority
from tests.service.fake_engine import FakeEngine
from tests.service.harness import Serving, serve


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    async with serve(FakeEngine()) as running:
        yield running


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("certificates") / "other")
