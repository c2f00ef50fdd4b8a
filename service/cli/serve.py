"""`mlx-stream serve`: run a server. What it takes to do so is imported once signals are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from service.cli.server_flags import given, server_flags
from service.libraries import collect_seldom, let_blas_threads_sleep, look_for_no_plugins, silence_grpc_core
from service.signals import leave_on_signals


@click.command()
@server_flags
def serve(config_file: Path | None, **flags: Any) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C.

    Every flag has a variable (MLX_STREAM_MODEL, ...) and a key in the file (model, ...); flags come first, then
    variables, then the file. `mlx-stream config --show` tells what came from where.
    """
    leave_on_signals()
    silence_grpc_core()
    let_blas_threads_sleep()
    look_for_no_plugins()
    collect_seldom()
    from service.process import run_process  # takes a second or two

    run_process(given(flags), config_file)
