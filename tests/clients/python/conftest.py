"""A server in the test's own event loop that says "Hello, world", and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import mlxstream
from tests.clients.python.scripted_server import ScriptedServer, answer, serving


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """Answers every request alike."""
    async with serving(answer("Hello", ", ", "world")) as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[mlxstream.AsyncClient]:
    """Connected to `server`, whichever the test's module has."""
    async with mlxstream.AsyncClient(server.target, timeout_seconds=20) as connected:
        yield connected
