"""The flags that become options of a generation, each under the schema's name.

Ranges are the server's to check: it knows the model, and names the field. Here stands what no message can carry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from mlxstream.requests import filled
from mlxstream.v1.options_pb2 import GenerateOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_ANY_OPTIONS: Final = "any_options"
_COUNT: Final = click.IntRange(min=0)
_WINDOW_HELP: Final = "Newest tokens that it sees, of prompt and answer taken together. Default 20."


def parse_bias(text: str) -> tuple[int, float]:
    """ID=VALUE: a token's id, and what is added to its score."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not ID=VALUE, such as 42=-1.5") from None


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE: an option by its name in the schema; the value is JSON, or else plain text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE, such as curve=[[0,0],[100,80]]")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


_FLAGS: Final = (
    click.option("--max-tokens", type=click.IntRange(min=1), metavar="COUNT",
                 help="Most tokens to generate. Default: the model's, else 512."),
    click.option("--temperature", type=float, help="0 always takes the likeliest token. Default: the model's, else 0."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability mass. "
                 "Default: the model's, else off."),
    click.option("--top-k", type=_COUNT, metavar="COUNT",
                 help="Keep this many of the likeliest tokens. Default: the model's, else off."),
    click.option("--min-p", type=float, help="Keep tokens at least this probable relative to the likeliest. "
                 "Default: the model's, else off."),
    click.option("--min-tokens-to-keep", type=click.IntRange(min=1), metavar="COUNT",
                 help="Tokens that --min-p keeps anyway. Default 1."),
    click.option("--xtc-probability", type=float, help="How often to drop all top choices but the least likely (XTC)."),
    click.option("--xtc-threshold", type=float, help="Probability that makes a top choice. Default 0.1."),
    click.option("--seed", type=_COUNT, metavar="NUMBER", help="Makes sampling repeatable."),
    click.option("--repetition-penalty", type=float, help="Above 1, tokens that have occurred become less likely."),
    click.option("--repetition-context-size", type=_COUNT, metavar="COUNT", help=_WINDOW_HELP),
    click.option("--presence-penalty", type=float, help="Taken once from the score of each token that has occurred."),
    click.option("--presence-context-size", type=_COUNT, metavar="COUNT", help=_WINDOW_HELP),
    click.option("--frequency-penalty", type=float, help="Taken from a token's score each time that it has occurred."),
    click.option("--frequency-context-size", type=_COUNT, metavar="COUNT", help=_WINDOW_HELP),
    click.option("--logit-bias", type=parse_bias, multiple=True, metavar="ID=VALUE",
                 help="Add VALUE to the score of the token ID; repeatable."),
    click.option("--stop", "stop_sequences", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--option", _ANY_OPTIONS, type=parse_option, multiple=True, metavar="NAME=VALUE",
                 help="Any other option of the schema; VALUE is JSON or text; repeatable."),
)  # fmt: skip


def option_flags(command: Command) -> Command:
    """Add the flags to a command, which passes what it gets for them to `set_options`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def set_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given.

    Raises:
        click.UsageError: One was given twice, is unknown, or has a value that no message can carry.
    """
    given = {name: value for name, value in values.items() if value is not None and value != () and value is not False}
    options = {name: value for name, value in given.items() if name != _ANY_OPTIONS}
    for name, value in given.get(_ANY_OPTIONS, ()):
        if name in options:
            raise click.UsageError(f"the option {name} was given twice")
        options[name] = value
    try:
        filled(GenerateOptions(), options, "option")
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    return options
