"""`mlx-stream serve`: the flags of a server. What it takes to run one is imported once signals are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from service.signals import leave_on_signals


@click.command()
@click.option("--model", help="Alias, Hugging Face id (org/name), folder, or .gguf file.")
@click.option("--engine", metavar="mlx|script:FILE", help="script:FILE plays a script in place of a model, to test "
              "clients. Default mlx.")  # fmt: skip
@click.option(
    "--listen", metavar="HOST:PORT", help="Where to listen; port 0 picks a free one. Default 127.0.0.1:50051."
)
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder for checkpoints and caches on disk.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    envvar="MLX_STREAM_CONFIG",
    help="TOML file with the same keys as these flags, with underscores.",
)
@click.option("--insecure", is_flag=True, default=None, help="Listen unencrypted on an address that others can reach.")
@click.option("--device", help="auto, cpu, metal or cuda. Default auto.")
@click.option("--dtype", help="Type of activations: auto, float32, float16 or bfloat16. Default auto.")
@click.option("--blas", help="Library for matrix products on the CPU. Default auto.")
@click.option("--max-queue", type=int, help="Generations that may wait. Default 64.")
@click.option("--max-rows", type=int, help="Generations that share a step. Default 32.")
@click.option("--prefill-step-tokens", type=int, help="Prompt tokens per step. Default: by device.")
@click.option("--state-bytes", type=int, help="Memory for the KV state of all generations. Default: what is free.")
@click.option("--row-tile-tokens", type=int, help="Exact rows: compute this many tokens at a time, in any company. "
              "Slower. Default: off.")  # fmt: skip
@click.option("--prefix-cache-bytes", type=int, help="Memory for states of earlier prompts, within --state-bytes and "
              "given back when generations need it. Default: a quarter of it; 0: none.")  # fmt: skip
@click.option("--prefix-cache-dir", type=click.Path(path_type=Path),
              help="Folder that keeps states of long prompts across restarts. Default: none is kept.")  # fmt: skip
@click.option("--prefix-cache-disk-bytes", type=int, help="Size of that folder. Default 8 GiB.")
@click.option("--kv-storage", help="How keys and values are stored: plain, affine4 or affine8 (-g32, -g64, -g128), "
              "config (the model's own list), turbo-k4v4 (other widths too), paged. Quantized forms take "
              "-start{tokens}. Default plain.")  # fmt: skip
@click.option("--adapter", "adapters", multiple=True, metavar="NAME=FOLDER",
              help="LoRA adapter that requests may select by its name; may be repeated.")  # fmt: skip
@click.option("--adapters-dir", type=click.Path(path_type=Path),
              help="Folder below which AdminService may mount more of them. Default: none.")  # fmt: skip
@click.option("--shutdown-late-seconds", type=float, help="How long new calls are still taken once health says that "
              "the server ends. Default 0.25.")  # fmt: skip
@click.option("--shutdown-grace-seconds", type=float, help="How long running streams may go on at the end. Default 5.")
@click.option("--health-stall-seconds", type=float, help="Age at which a step counts as stuck. Default 60.")
@click.option("--log-level", help="debug, info, warning or error. Default info.")
@click.option("--log-format", help="text, or json: one object a line. Default text.")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Where Prometheus finds metrics, over plain HTTP. "
              "Default: nowhere.")  # fmt: skip
@click.option("--otlp-endpoint", metavar="URL", help="Where OpenTelemetry traces go, such as http://127.0.0.1:4317. "
              "Default: nowhere.")  # fmt: skip
def serve(config_file: Path | None, **flags: Any) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C.

    Every flag has a variable (MLX_STREAM_MODEL, ...) and a key in the file (model, ...); flags come first, then
    variables, then the file.
    """
    leave_on_signals()
    from service.process import run_process  # takes a second or two

    run_process({name: value for name, value in flags.items() if value not in (None, ())}, config_file)
