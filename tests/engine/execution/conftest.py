"""One tiny model folder for a module, and an engine that serves it."""

import pytest

from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.execution.driving import settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write(folder)
    return folder


@pytest.fixture
async def engine(folder, tmp_path):
    engine = Engine(settings(folder, tmp_path))
    await engine.start()
    yield engine
    await engine.stop()
