"""The log of gRPC's core, which is none of ours. Imports nothing, so that it can come before gRPC itself."""

from __future__ import annotations

import os


def silence_grpc_core() -> None:
    """Keep gRPC's own lines off standard error, where our log is: anybody who connects badly could write them.

    They are in no format of ours. What the operator has set stays. Call it before gRPC is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
