"""`mlx-stream generate`: one prompt, one answer."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mlxstream import Client
from mlxstream.requests import Prompt
from service.cli import durable_notes
from service.cli.asking import EXIT_INTERRUPTED, canvas_view, connected, connection_flags
from service.cli.credentials import Credentials
from service.cli.option_flags import option_flags, set_options
from service.cli.probabilities import probability_table
from service.cli.terminal import PROGRESS_DELIVERY, Terminal, show_as_json


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat/--raw", default=None, help="Ask through the model's chat template, or continue the bare text. "
              "Default: chat where the model has a template.")  # fmt: skip
@click.option("--system", help="What the model is told before the prompt; implies --chat.")
@click.option("--image", "image_files", multiple=True, type=click.Path(dir_okay=False, exists=True, path_type=Path),
              metavar="FILE", help="Show the model a PNG, JPEG or WebP image before the prompt; may be given again. "
              "Implies --chat.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write every event as one line of JSON.")
@click.option("--logprobs", is_flag=True, help="Show how probable each token was.")
@click.option("--top-logprobs", type=click.IntRange(min=1), metavar="COUNT",
              help="Show that many of the most likely tokens at each place; implies --logprobs.")  # fmt: skip
@click.option("--show-canvas", is_flag=True,
              help="Watch a block-diffusion model revise its blocks; the answer is written at the end.")  # fmt: skip
@click.option("--durable", is_flag=True, help="Survive a lost connection, and a server that ends and is started again.")
@option_flags
@connection_flags
def generate(
    prompt: str | None,
    chat: bool | None,
    system: str | None,
    image_files: tuple[Path, ...],
    as_json: bool,
    logprobs: bool,
    top_logprobs: int | None,
    show_canvas: bool,
    durable: bool,
    target: str,
    model: str,
    timeout_seconds: float,
    credentials: Credentials,
    **options: Any,
) -> None:
    """Stream the answer to PROMPT. Without PROMPT, what is piped in is read; with -, standard input in any case.

    The text goes to standard output, statistics go to standard error. Ctrl-C cancels the generation; `resume` goes on
    with a durable one.
    Exit status: 0 finished, 1 failed, 2 wrong usage or refused for good, 69 no server, or none that takes it now,
    130 cancelled.
    """
    needing = "--system" if system is not None else "--image" if image_files else ""
    if needing and chat is False:
        raise click.UsageError(f"{needing} needs the chat template; leave out --raw")
    text, images = _read_prompt(prompt), [_read_image(file) for file in image_files]
    with connected(target, timeout_seconds, credentials) as client:
        asked = _prompt(client, text, chat=True if needing else chat, system=system, images=images, model=model)
        wanted = set_options({**options, "logprobs": logprobs, "top_logprobs": top_logprobs})
        told = bool(wanted.get("logprobs") or wanted.get("top_logprobs"))
        if told:
            wanted["logprobs"] = True
        delivery = {**PROGRESS_DELIVERY, "include_token_bytes": told, "draft_blocks": show_canvas}
        console = Console(stderr=True)
        canvas = canvas_view(console, client, model) if show_canvas else None
        terminal = Terminal(sys.stdout, console, canvas=canvas)
        stream = client.stream(
            asked, model=model, delivery=delivery, durable=durable_notes.told(terminal) if durable else False, **wanted
        )
        with durable_notes.hinted(terminal, stream) if durable else nullcontext():
            if as_json:
                return show_as_json(stream, sys.stdout)
            answer = terminal.show(stream)
        if told:
            console.print(probability_table(answer.tokens, functools.partial(_token_text, client, model)))
        if answer.interrupted and durable:
            durable_notes.tell_how_to_go_on(terminal, stream)
        if answer.interrupted:
            raise SystemExit(EXIT_INTERRUPTED)
        return None


def _token_text(client: Client, model: str, token: int) -> str:
    return client.detokenize([token], model=model, skip_special_tokens=False)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or pipe one in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise click.UsageError("standard input is not valid UTF-8") from None


def _read_image(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{file.name} cannot be read: {error.strerror}") from None


def _prompt(
    client: Client, text: str, *, chat: bool | None, system: str | None, images: list[bytes], model: str
) -> Prompt:
    if chat is None:
        chat = client.model(model).has_chat_template
    if not chat:
        return text
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    turns: list[dict[str, Any]] = [{"role": "user", "content": [*images, text] if images else text}]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns
