"""Where the settings of a server come from: flags first, then MLX_STREAM_* variables, the TOML file, the defaults.

Unknown keys are errors wherever they stand, so that a setting is never believed to be in force when it is not.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from service.reading import UnreadableFileError, read_small_file
from service.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ENVIRONMENT_PREFIX: Final = "MLX_STREAM_"
MAX_FILE_BYTES: Final = 1024 * 1024
# Variables of this family that belong to the command line rather than to the server.
FOREIGN_VARIABLES: Final = frozenset({"MLX_STREAM_CONFIG"})
# What pydantic finds, by its names, in our words; what is not here says it well enough.
PROBLEMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool_parsing": "must be true or false",
        "bool_type": "must be true or false",
        "extra_forbidden": "no such setting",
        "finite_number": "must be a finite number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be at least {ge}",
        "int_from_float": "must be a whole number",
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be {expected}",
        "missing": "must be given",
        "path_type": "must be a path",
        "string_pattern_mismatch": "must be {form}",
        "string_type": "must be text",
    }
)


class SettingsError(Exception):
    """The configuration cannot be used; the message names the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One setting as it stands: its value as TOML and where that came from.

    `is_set` is False where `toml` is what holds because nothing is set; it is None where that depends on the model or
    the machine, or where there is none.
    """

    name: str
    toml: str | None
    source: str
    is_set: bool


def load_settings(flags: Mapping[str, Any], config_file: Path | None) -> ServerSettings:
    """Build the configuration; `flags` holds what was given on the command line, by field name.

    Raises:
        SettingsError: a key is unknown, a value is out of range, or the file cannot be read.
    """
    _refuse_unknown_variables()
    return _built(flags, _read_file(config_file), config_file)


def explain_settings(
    flags: Mapping[str, Any], config_file: Path | None, when_unset: Mapping[str, object]
) -> list[Explained]:
    """Every setting with its value and its source, in the order of the class.

    Args:
        flags: as for `load_settings`.
        config_file: as for `load_settings`.
        when_unset: what holds for settings that have no value, by name.

    Raises:
        SettingsError: as `load_settings`.
    """
    _refuse_unknown_variables()
    file_values = _read_file(config_file)
    settings, variables = _built(flags, file_values, config_file), _read_variables()
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
            toml=_toml(when_unset.get(name) if value is None else value),
            source=next(told(name) for layer, told in sources if name in layer),
            is_set=value is not None,
        )
        for name, value in settings
    ]


def _built(flags: Mapping[str, Any], file_values: Mapping[str, Any], config_file: Path | None) -> ServerSettings:
    def place_of(name: str) -> str:
        """Where the value was set, as it is written there; what was set nowhere goes by its flag."""
        variable = ENVIRONMENT_PREFIX + name.upper()
        if name not in flags and os.environ.get(variable):
            return variable
        return f"{config_file}: {name}" if name not in flags and name in file_values else flag_of(name)

    try:
        return ServerSettings(**{**file_values, **_read_variables(), **flags})
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(dict(one), place_of) for one in error.errors())) from None


def flag_of(name: str) -> str:
    """The flag of a setting; the one that may be repeated is singular."""
    return "--adapter" if name == "adapters" else f"--{name.replace('_', '-')}"


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


def _describe(error: dict[str, Any], place_of: Callable[[str], str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    field = ServerSettings.model_fields.get(name)
    facts = {**error.get("ctx", {}), "form": field.description if field is not None else None}
    text = PROBLEMS[error["type"]].format(**facts) if error["type"] in PROBLEMS else error["msg"]
    return f"{place_of(name)}: {text[:1].lower()}{text[1:]}" if name else text


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
