"""What GetModel reports about this build. Raise SCHEMA_REVISION with every change of the schema callers can notice."""

from __future__ import annotations

import importlib.metadata

SCHEMA_REVISION = 3
MINIMUM_CLIENT_REVISION = 1


def server_version() -> str:
    """Version of the installed distribution; "unknown" in a bare checkout."""
    try:
        return importlib.metadata.version("mlx-stream")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
