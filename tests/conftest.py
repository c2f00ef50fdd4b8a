"""What the whole suite stands on: mlx is brought up once, as the product does it, before any test imports it.

Tests run on the CPU everywhere, with one BLAS thread: results do not depend on the machine's accelerator, and other
work on the machine slows them down least.
"""

import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from engine.contracts.errors import MissingArtifactError
from engine.execution import accepting, catalogue
from engine.runtime.prepare import prepare_runtime
from engine.runtime.settings import RuntimeSettings

DEMO_MODEL = "smollm2-135m"

# A run tries what the run before it tried; `--hypothesis-profile=exploring` tries something else each time.
settings.register_profile("exploring", deadline=None)
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Now, not in a hook: the other conftest files, which are imported before any hook runs, import mlx.
RUNTIME = prepare_runtime(
    RuntimeSettings(
        cache_directory=Path(__file__).resolve().parents[1] / ".pytest_cache" / "runtime", device="cpu", blas_threads=1
    )
)


@pytest.fixture(autouse=True)
def _repeatable_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that the engine chooses are the same each time that a test runs, so that none passes or fails by luck.

    `fresh_seeds` marks the tests that show that they are fresh.
    """
    if "fresh_seeds" not in request.keywords:
        seeds = random.Random(request.node.nodeid)
        monkeypatch.setattr(accepting, "fresh_seed", lambda: seeds.getrandbits(accepting.FRESH_SEED_BITS))


@pytest.fixture
def wide_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of twenty seconds that want a partial result are told to end after two, and so have ample time."""
    for name in ("MARGIN_SHARE", "MAX_MARGIN_SHARE"):
        monkeypatch.setattr(f"service.deadline.{name}", 0.9)
    monkeypatch.setattr("service.deadline.MAX_SHARE_SECONDS", 60.0)


@pytest.fixture(scope="session")
def bundled_blas() -> bool:
    """Whether products run on the BLAS inside mlx, whose sums do not depend on how products are fused."""
    return RUNTIME.blas is not None and not RUNTIME.blas.optimized


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's file. `make test` fetches it; without it, the tests that need it are skipped by name."""
    try:
        return catalogue.resolve(DEMO_MODEL).path
    except MissingArtifactError:
        pytest.skip(f"the demo model is not on this machine: mlx-stream models pull {DEMO_MODEL}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is too large to be fetched by every run of the suite."""
    parser.addoption("--gemma3", metavar="FILE", help="the GGUF file of Gemma 3 270M (make test-gemma3 fetches it)")


def pytest_configure() -> None:
    """Listen to Ctrl-C, which tests send: a shell that runs the suite in the background has told it not to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long ones first, so that none is left to one process in the end, and mark what needs the demo model.

    `-m "not demo_model"` leaves that out.
    """
    items.sort(key=lambda item: "tests/whole/" not in item.nodeid)
    for item in items:
        if "demo_model_path" in getattr(item, "fixturenames", ()):
            item.add_marker("demo_model")
