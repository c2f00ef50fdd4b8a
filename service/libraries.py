"""What libraries and the interpreter are told before the server's modules are imported. Imports nothing of them.

What the operator has set in the environment stays.
"""

from __future__ import annotations

import gc
import os
from typing import Final

# Objects between two looks for garbage. A look goes through what was imported a moment ago: with the default, 700, they
# take a tenth of the start, with 50,000 still 30 to 40 ms of it. A start makes 200,000.
STARTING_OBJECTS: Final = 500_000
# While serving, calls that are left leave cycles behind, which hold messages and connections: soon looked for.
SERVING_OBJECTS: Final = 2_000
# As OpenBLAS counts: 2 to this power, in clock cycles, and its least.
BLAS_SPIN: Final = "4"


def silence_grpc_core() -> None:
    """Keep gRPC's own lines off standard error, where our log is: anybody who connects badly could write them.

    They are in no format of ours.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def let_blas_threads_sleep() -> None:
    """Let idle threads of OpenBLAS sleep at once. As it is, each copy keeps a core busy for a while after its import.

    numpy's copy computes nothing here, and products go through threads of our own (decision 0001).
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", BLAS_SPIN)


def look_for_no_plugins() -> None:
    """Let pydantic read settings without asking each installed package for plugins, which means to read its files."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def collect_seldom() -> None:
    """Look for garbage seldom while the server starts, which makes little of it that is not freed at once."""
    gc.set_threshold(STARTING_OBJECTS)


def collect_soon() -> None:
    """Look for garbage often from now on, and never again through what is there already: modules, classes, schemas."""
    gc.freeze()
    gc.set_threshold(SERVING_OBJECTS)
