"""Where the settings of a server come from: flags first, then MLX_STREAM_* variables, the TOML file, the defaults.

Unknown keys are errors wherever they stand, so that a setting is never believed to be in force when it is not.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from service.reading import UnreadableFileError, read_small_file
from service.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX: Final = "MLX_STREAM_"
MAX_FILE_BYTES: Final = 1024 * 1024
# Variables of this family that belong to the command line rather than to the server.
FOREIGN_VARIABLES: Final = frozenset({"MLX_STREAM_CONFIG"})


class SettingsError(Exception):
    """The configuration cannot be used; the message names the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One setting as it stands: its value as TOML (None: unset) and where that came from."""

    name: str
    toml: str | None
    source: str


def load_settings(flags: Mapping[str, Any], config_file: Path | None) -> ServerSettings:
    """Build the configuration; `flags` holds what was given on the command line, by field name.

    Raises:
        SettingsError: a key is unknown, a value is out of range, or the file cannot be read.
    """
    _refuse_unknown_variables()
    return _built(flags, _read_file(config_file))


def explain_settings(flags: Mapping[str, Any], config_file: Path | None) -> list[Explained]:
    """Every setting with its value and its source, in the order of the class.

    Raises:
        SettingsError: as `load_settings`.
    """
    _refuse_unknown_variables()
    file_values = _read_file(config_file)
    settings, variables = _built(flags, file_values), _read_variables()
    file_name = config_file.name if config_file is not None else ""
    sources = (
        (flags, lambda _name: "flag"),
        (variables, lambda name: ENVIRONMENT_PREFIX + name.upper()),
        (file_values, lambda _name: file_name),
        (ServerSettings.model_fields, lambda _name: "default"),
    )
    return [
        Explained(
            name=name,
            toml=_toml(getattr(settings, name)),
            source=next(told(name) for layer, told in sources if name in layer),
        )
        for name in ServerSettings.model_fields
    ]


def _built(flags: Mapping[str, Any], file_values: Mapping[str, Any]) -> ServerSettings:
    try:
        return ServerSettings(**{**file_values, **_read_variables(), **flags})
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(dict(one), flags) for one in error.errors())) from None


def _refuse_unknown_variables() -> None:
    known = {ENVIRONMENT_PREFIX + name.upper() for name in ServerSettings.model_fields} | FOREIGN_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in known)
    if unknown:
        raise SettingsError(f"{', '.join(unknown)}: no such setting")


def _read_variables() -> dict[str, str]:
    """Values by field name; an empty variable counts as unset."""
    found = {name: os.environ.get(ENVIRONMENT_PREFIX + name.upper(), "") for name in ServerSettings.model_fields}
    return {name: value for name, value in found.items() if value}


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(read_small_file(path, MAX_FILE_BYTES).decode("utf-8"))
    except UnreadableFileError as error:
        raise SettingsError(f"{path}: {error.why}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None


def _describe(error: dict[str, Any], flags: Mapping[str, Any]) -> str:
    text = f"{error['msg'][:1].lower()}{error['msg'][1:]}"
    if not error["loc"]:
        return text
    name = _name_where_it_was_set(".".join(str(part) for part in error["loc"]), flags)
    if error["type"] == "extra_forbidden":
        return f"{name}: no such setting"
    return f"{name}: must be given" if error["type"] == "missing" else f"{name}: {text}"


def _name_where_it_was_set(name: str, flags: Mapping[str, Any]) -> str:
    """The variable's name if the value came from one, else the setting's own, as flags and the file have it."""
    variable = ENVIRONMENT_PREFIX + name.upper()
    return variable if name not in flags and os.environ.get(variable) else name


def _toml(value: object) -> str | None:
    """The value as it can stand in the file."""
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(_quoted('='.join(map(str, entry))) for entry in value)}]"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are all TOML's too, but for the character that JSON leaves alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
