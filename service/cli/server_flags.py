"""The flags of a server, for the commands that run one or explain one. Defaults are those of the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

FILE: Final = click.Path(path_type=Path)
# As it was typed: settings tell an empty text from the folder in which we are.
SET_PATH: Final = click.Path()

_FLAGS = (
    click.option("--model", help="Alias, Hugging Face id (org/name), folder, or .gguf file."),
    click.option("--engine", metavar="mlx|script:FILE",
                 help="script:FILE plays a script in place of a model, to test clients. Default mlx."),
    click.option("--listen", metavar="HOST:PORT|unix:PATH",
                 help="Where to listen; port 0 picks a free one. Default 127.0.0.1:50051."),
    click.option("--unix-socket-mode", metavar="OCTAL", help="Permissions of a Unix socket. Default 600."),
    click.option("--state-dir", type=SET_PATH, help="Folder for checkpoints and caches on disk. "
                 "Default: ~/.local/state/mlx-stream; on macOS, ~/Library/Application Support/mlx-stream."),
    click.option("--config", "config_file", type=FILE, envvar="MLX_STREAM_CONFIG",
                 help="TOML file with the same keys as these flags, with underscores."),
    click.option("--insecure", is_flag=True, default=None,
                 help="Listen unencrypted on an address that others can reach."),
    click.option("--tls-cert", type=SET_PATH,
                 help="PEM certificate chain; it and the next two are read again when changed."),
    click.option("--tls-key", type=SET_PATH, help="PEM private key of the certificate."),
    click.option("--tls-client-ca", type=SET_PATH,
                 help="PEM certificates; clients must present one that these have signed."),
    click.option("--tokens-file", type=SET_PATH, help="TOML file of bearer tokens and what each permits."),
    click.option("--admin/--no-admin", default=None, help="Offer AdminService. Default: on a local address alone."),
    click.option("--reflection/--no-reflection", default=None,
                 help="Offer server reflection. Default: on a local address alone."),
    click.option("--channelz/--no-channelz", default=None,
                 help="Offer channelz, the state of connections, to operators. Default: off."),
    click.option("--max-message-bytes", type=int, help="Largest request or answer. Default 64 MiB."),
    click.option("--max-message-seconds", type=float, help="Longest time for a request to arrive. Default 30."),
    click.option("--max-metadata-bytes", type=int, help="Largest metadata of a call. Default 16 KiB."),
    click.option("--max-streams", type=int, help="Calls at the same time. Default 1024."),
    click.option("--max-streams-per-caller", type=int, help="The same for each caller. Default: no bound of its own."),
    click.option("--max-prompt-tokens", type=int, help="Longest prompt. Default: what the model's context holds."),
    click.option("--max-stop-sequences", type=int, help="Stop sequences of one request. Default 64."),
    click.option("--max-constraint-bytes", type=int, help="Largest schema, grammar or expression. Default 64 KiB."),
    click.option("--max-queue-seconds", type=float,
                 help="Longest wait for a row. Default: as long as the caller waits."),
    click.option("--keepalive-seconds", type=float,
                 help="Silence after which a connection is asked whether it still lives. Default 60."),
    click.option("--device", help="auto, cpu, metal or cuda. Default auto."),
    click.option("--dtype", help="Type of activations: auto, float32, float16 or bfloat16. Default auto."),
    click.option("--blas", help="Library for matrix products on the CPU. Default auto."),
    click.option("--max-queue", type=int, help="Generations that may wait. Default 64."),
    click.option("--max-rows", type=int, help="Generations that share a step. Default 32."),
    click.option("--prefill-step-tokens", type=int, help="Prompt tokens per step. Default: by device."),
    click.option("--state-bytes", type=int, help="Memory for the KV state of all generations. Default: what is free."),
    click.option("--row-tile-tokens", type=int, help="Exact rows: compute this many tokens at a time, in any company. "
                 "Slower. Default: off."),
    click.option("--prefix-cache-bytes", type=int, help="Memory for states of earlier prompts, within --state-bytes "
                 "and given back when generations need it. Default: a quarter of it; 0: none."),
    click.option("--prefix-cache-dir", type=SET_PATH,
                 help="Folder that keeps states of long prompts across restarts. Default: none is kept."),
    click.option("--prefix-cache-disk-bytes", type=int, help="Size of that folder. Default 8 GiB."),
    click.option("--kv-storage", help="How keys and values are stored: plain, affine4 or affine8 (-g32, -g64, -g128), "
                 "config (the model's own list), turbo-k4v4 (other widths too), paged. Quantized forms take "
                 "-start{tokens}. Default plain."),
    click.option("--adapter", "adapters", multiple=True, metavar="NAME=FOLDER",
                 help="LoRA adapter that requests may select by its name; may be repeated."),
    click.option("--adapters-dir", type=SET_PATH,
                 help="Folder below which AdminService may mount more of them. Default: none."),
    click.option("--checkpoint-bytes", type=int, help="Size of what is kept of durable generations under --state-dir. "
                 "Default 8 GiB; 0: generations cannot be durable."),
    click.option("--checkpoint-age-seconds", type=float, help="How long it is kept after it was written last. "
                 "Default 86400."),
    click.option("--resume-grace-seconds", type=float, help="How long a durable generation that nobody reads goes on, "
                 "and one whose end was sent can be read again. Default 30."),
    click.option("--shutdown-late-seconds", type=float, help="How long new calls are still taken once health says that "
                 "the server ends. Default 0.1."),
    click.option("--shutdown-grace-seconds", type=float,
                 help="How long running streams may go on at the end. Default 5."),
    click.option("--health-stall-seconds", type=float, help="Age at which a step counts as stuck. Default 60."),
    click.option("--log-level", help="debug, info, warning or error. Default info."),
    click.option("--log-format", help="text, or json: one object a line. Default text."),
    click.option("--metrics-listen", metavar="HOST:PORT",
                 help="Where Prometheus finds metrics, over plain HTTP. Default: nowhere."),
    click.option("--otlp-endpoint", metavar="URL",
                 help="Where OpenTelemetry traces go, such as http://127.0.0.1:4317. Default: nowhere."),
)  # fmt: skip


def server_flags(command: Command) -> Command:
    """Add `config_file` and every setting."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """What was said on the command line, without what was not."""
    return {name: value for name, value in flags.items() if value not in (None, ())}
