"""The first moments of a server process: what is asked of it is checked, and the engine begins to load.

Reading weights leaves the interpreter free, so all that it takes to serve is imported meanwhile (`service.serving`),
and not before: whatever is imported earlier delays the reading. Source: decision 0025.
Signals are handled from the start: a second one cuts the grace short, a third one ends the process as it is.
"""

from __future__ import annotations

import asyncio
import importlib
from functools import partial
from typing import TYPE_CHECKING, Final

from engine.contracts.errors import EngineError
from engine.execution import catalogue
from engine.execution.engine import Engine
from service.listening import checked_entrance, checked_metrics_address
from service.stopping import StartError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.execution.resident import EngineSettings
    from service.settings import ServerSettings
    from service.stopping import Signals

# How long the load may have the interpreter for itself; a folder that does not answer must not keep probes waiting.
HEAD_START_SECONDS: Final = 1.0


async def run_server(
    settings: ServerSettings, signals: Signals, *, engine_class: Callable[[EngineSettings], Engine] = Engine
) -> None:
    """Serve until `signals` ask to stop.

    Raises:
        StartError: nothing could be served.
    """
    entrance = checked_entrance(settings)
    checked_metrics_address(settings)
    prepare_state_dir(settings)
    engine = engine_class(settings.engine_settings())
    loading = asyncio.ensure_future(engine.start())
    await engine.until_reading(HEAD_START_SECONDS)
    from service.serving import serve_engine  # takes a while, in which weights are read

    await serve_engine(engine, loading, settings, signals, entrance)


def engine_class_of(settings: ServerSettings) -> Callable[[EngineSettings], Engine]:
    """What makes the engine that is asked for; it raises `StartError` where a script or a model's name is of no use."""
    if settings.script_file is None:
        return model_engine
    return partial(scripted_engine, settings.script_file)


def model_engine(settings: EngineSettings) -> Engine:
    """An engine that loads a model. A name that is none is refused before an address is bound, or bytes are fetched."""
    try:
        catalogue.require_known(settings.model)
    except EngineError as error:
        raise StartError(f"cannot load the model: {error}") from None
    return Engine(settings)


def check_engine_files(settings: ServerSettings) -> None:
    """Look at what the engine will read beside the model: a script, and the folders of adapters.

    Raises:
        StartError: a script cannot be used, or a folder is not there.
    """
    if settings.script_file is not None:
        scripted_engine(settings.script_file, settings.engine_settings())
    for name, folder in settings.adapters:
        if not folder.is_dir():
            raise StartError(f"--adapter: {name}: there is no folder {folder}")


def scripted_engine(script_file: Path, settings: EngineSettings) -> Engine:
    """An engine that plays `script_file`."""
    module = importlib.import_module("engine.execution.scripted.engine")  # seldom needed, and takes a while
    try:
        engine: Engine = module.ScriptedEngine(settings, script_file)
    except EngineError as error:
        raise StartError(str(error)) from None
    return engine


def prepare_state_dir(settings: ServerSettings) -> None:
    """Make the folder in which the engine keeps its state."""
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--state-dir: {settings.state_dir}: {error.strerror}") from None
