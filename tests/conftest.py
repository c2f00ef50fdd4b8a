"""Fixtures that every part of the suite may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contracts.errors import MissingArtifactError
from engine.execution import catalogue

DEMO_MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's file. `make test` fetches it; without it, the tests that need it are skipped by name."""
    try:
        return catalogue.resolve(DEMO_MODEL).path
    except MissingArtifactError:
        pytest.skip(f"the demo model is not on this machine: mlx-stream models pull {DEMO_MODEL}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the demo model, so that `-m "not demo_model"` leaves it out."""
    for item in items:
        if "demo_model_path" in getattr(item, "fixturenames", ()):
            item.add_marker("demo_model")
