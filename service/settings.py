"""The one configuration object of a server. Flags come first, then MLX_STREAM_* variables, the file, the defaults.

Unknown keys are errors wherever they stand, so that a setting is never believed to be in force when it is not.
"""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from engine.contracts.adapters import ID_RULE, is_adapter_id
from engine.contracts.kv_scheme import parse_kv_wish
from engine.execution.resident import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX: Final = "MLX_STREAM_"
MAX_FILE_BYTES: Final = 1024 * 1024
MLX_ENGINE: Final = "mlx"
SCRIPT_PREFIX: Final = "script:"
# Variables of this family that belong to the command line rather than to the server.
FOREIGN_VARIABLES: Final = frozenset({"MLX_STREAM_CONFIG"})


class SettingsError(Exception):
    """The configuration cannot be used; the message names the setting."""


class ServerSettings(BaseModel):
    """Everything that a server can be told. Units are in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = "mlx"
    model: str = Field(default="", validate_default=True)
    listen: str = "127.0.0.1:50051"
    state_dir: Path = Field(default_factory=lambda: platformdirs.user_state_path("mlx-stream"))
    insecure: bool = False
    device: Literal["auto", "cpu", "metal", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    blas: str = "auto"
    max_queue: int = Field(default=64, ge=1, le=1_000_000)
    max_rows: int = Field(default=32, ge=1, le=4096)
    prefill_step_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    state_bytes: int | None = Field(default=None, ge=1)
    row_tile_tokens: int | None = Field(default=None, ge=1, le=4096)
    prefix_cache_bytes: int | None = Field(default=None, ge=0)
    kv_storage: str = "plain"
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_bytes: int | None = Field(default=None, ge=1)
    adapters: tuple[tuple[str, Path], ...] = ()
    adapters_dir: Path | None = None
    shutdown_late_seconds: float = Field(default=0.25, ge=0, le=86_400, allow_inf_nan=False)
    shutdown_grace_seconds: float = Field(default=5.0, ge=0, le=86_400, allow_inf_nan=False)
    health_stall_seconds: float = Field(default=60.0, gt=0, le=86_400, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    metrics_listen: str | None = None
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/?$")

    @property
    def script_file(self) -> Path | None:
        """The script that is played in place of a model; None for the engine that loads one."""
        return Path(self.engine.removeprefix(SCRIPT_PREFIX)) if self.engine.startswith(SCRIPT_PREFIX) else None

    def engine_settings(self) -> EngineSettings:
        """The part that the engine reads; "auto" is its None."""
        return EngineSettings(
            model=self.model,
            state_dir=self.state_dir,
            device=_unless_auto(self.device),
            dtype=_unless_auto(self.dtype),
            blas=_unless_auto(self.blas),
            max_queue=self.max_queue,
            max_rows=self.max_rows,
            prefill_step_tokens=self.prefill_step_tokens,
            state_bytes=self.state_bytes,
            row_tile_tokens=self.row_tile_tokens,
            prefix_cache_bytes=self.prefix_cache_bytes,
            kv_storage=self.kv_storage,
            prefix_cache_dir=self.prefix_cache_dir,
            prefix_cache_disk_bytes=self.prefix_cache_disk_bytes,
            adapters=self.adapters,
            adapters_dir=self.adapters_dir,
        )

    @field_validator("adapters", mode="before")
    @classmethod
    def _are_named_folders(cls, entries: object) -> tuple[tuple[str, str], ...]:
        """Each of "NAME=FOLDER"; one text, as a variable holds it, separates them by commas."""
        texts = entries.split(",") if isinstance(entries, str) else entries
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise PydanticCustomError("adapter", "must be a list of NAME=FOLDER")
        named = [tuple(text.split("=", 1)) for text in texts]
        for text, parts in zip(texts, named, strict=True):
            if len(parts) != 2 or not parts[1]:
                raise PydanticCustomError("adapter", "must be NAME=FOLDER, got {text}", {"text": repr(text[:80])})
            if not is_adapter_id(parts[0]):
                raise PydanticCustomError("adapter", "{name}: {rule}", {"name": repr(parts[0][:80]), "rule": ID_RULE})
        names = [name for name, _ in named]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PydanticCustomError("adapter", "{name} is given twice", {"name": repr(twice)})
        return tuple(named)

    @field_validator("engine")
    @classmethod
    def _is_an_engine(cls, text: str) -> str:
        names_a_script = text.startswith(SCRIPT_PREFIX) and text != SCRIPT_PREFIX
        if text != MLX_ENGINE and not names_a_script:
            raise PydanticCustomError("engine", "must be mlx or script:FILE")
        return text

    @field_validator("model")
    @classmethod
    def _fits_the_engine(cls, name: str, others: ValidationInfo) -> str:
        engine = others.data.get("engine", MLX_ENGINE)
        if engine == MLX_ENGINE and not name:
            raise PydanticCustomError("model", "must be given")
        if engine != MLX_ENGINE and name:
            raise PydanticCustomError("model", "a script names its own model")
        return name

    @field_validator("kv_storage")
    @classmethod
    def _is_a_way_to_store(cls, text: str) -> str:
        try:
            parse_kv_wish(text)
        except ValueError as error:
            raise PydanticCustomError("kv_storage", "{problem}", {"problem": str(error)}) from None
        return text

    @field_validator("prefix_cache_dir")
    @classmethod
    def _needs_memory(cls, folder: Path | None, others: ValidationInfo) -> Path | None:
        if folder is not None and others.data.get("prefix_cache_bytes") == 0:
            raise PydanticCustomError("no_memory", "cannot be used while prefix_cache_bytes is 0")
        return folder

    @field_validator("prefix_cache_disk_bytes")
    @classmethod
    def _needs_folder(cls, limit: int | None, others: ValidationInfo) -> int | None:
        if limit is not None and others.data.get("prefix_cache_dir") is None:
            raise PydanticCustomError("no_folder", "bounds nothing without prefix_cache_dir")
        return limit


def load_settings(flags: Mapping[str, Any], config_file: Path | None) -> ServerSettings:
    """Build the configuration; `flags` holds what was given on the command line, by field name.

    Raises:
        SettingsError: a key is unknown, a value is out of range, or the file cannot be read.
    """
    _refuse_unknown_variables()
    file_values = _read_file(config_file) if config_file is not None else {}
    try:
        return ServerSettings(**{**file_values, **_read_variables(), **flags})
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(dict(one), flags) for one in error.errors())) from None


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value


def _refuse_unknown_variables() -> None:
    known = {ENVIRONMENT_PREFIX + name.upper() for name in ServerSettings.model_fields} | FOREIGN_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in known)
    if unknown:
        raise SettingsError(f"{', '.join(unknown)}: no such setting")


def _read_variables() -> dict[str, str]:
    """Values by field name; an empty variable counts as unset."""
    found = {name: os.environ.get(ENVIRONMENT_PREFIX + name.upper(), "") for name in ServerSettings.model_fields}
    return {name: value for name, value in found.items() if value}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_regular(path).decode("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None


def _read_regular(path: Path) -> bytes:
    """The bytes of a small file. Devices and pipes are not opened: they may never end, or never begin."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise SettingsError(f"{path}: not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    return content


def _describe(error: dict[str, Any], flags: Mapping[str, Any]) -> str:
    name = _name_where_it_was_set(".".join(str(part) for part in error["loc"]), flags)
    if error["type"] == "extra_forbidden":
        return f"{name}: no such setting"
    if error["type"] == "missing":
        return f"{name}: must be given"
    return f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _name_where_it_was_set(name: str, flags: Mapping[str, Any]) -> str:
    """The variable's name if the value came from one, else the setting's own, as flags and the file have it."""
    variable = ENVIRONMENT_PREFIX + name.upper()
    return variable if name not in flags and os.environ.get(variable) else name
