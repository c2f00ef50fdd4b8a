"""The probe that container engines run: its status is the server's health."""

from __future__ import annotations

import asyncio

import pytest

from service.probe import main
from service.readiness import NotReady
from tests.service.harness import Serving


async def status(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_its_status_follows_health(serving: Serving) -> None:
    target = str(serving.address)
    assert await status(target) == 1
    serving.health.report(NotReady.NO_MODEL, alive=True)
    assert await status(target) == 0
    assert await status(target, "mlxstream.v1.GenerationService") == 1
    serving.health.report(None)
    assert await status(target, "mlxstream.v1.GenerationService") == 0
    assert await status(target, "no.such.Service") == 1


def test_nobody_there_is_a_failure_and_no_target_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1"]) == 1
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
