"""The one configuration object of a server: every setting with its type, its range and its default.

Where values come from is the business of `service.configuration`. Nothing secret is a setting: tokens and keys are
named by their files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, get_args

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.contracts.adapters import ID_RULE, is_adapter_id
from engine.contracts.kv_scheme import parse_kv_wish
from engine.contracts.options import MAX_STOP_SEQUENCES
from engine.execution.resident import EngineSettings
from service import limits

MLX_ENGINE: Final = "mlx"
SCRIPT_PREFIX: Final = "script:"
NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class ServerSettings(BaseModel):
    """Everything that a server can be told. Units are in the names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = "mlx"
    model: str = Field(default="", validate_default=True)
    listen: str = "127.0.0.1:50051"
    state_dir: Path = Field(default_factory=lambda: platformdirs.user_state_path("mlx-stream"))
    insecure: bool = False
    unix_socket_mode: str | None = Field(
        default=None, pattern="^0?[0-7]{3}$", description="three octal digits, such as 660"
    )
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens_file: Path | None = None
    admin: bool | None = None
    reflection: bool | None = None
    channelz: bool = False
    max_message_bytes: int = Field(default=limits.MAX_MESSAGE_BYTES, ge=1024, le=2**31 - 1)
    max_message_seconds: float = Field(default=limits.MAX_MESSAGE_SECONDS, gt=0, le=86_400, allow_inf_nan=False)
    max_metadata_bytes: int = Field(default=limits.MAX_METADATA_BYTES, ge=1024, le=1024 * 1024)
    max_streams: int = Field(default=limits.MAX_STREAMS, ge=1, le=1_000_000)
    max_streams_per_caller: int | None = Field(default=None, ge=1, le=1_000_000)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_stop_sequences: int = Field(default=MAX_STOP_SEQUENCES, ge=0, le=MAX_STOP_SEQUENCES)
    max_constraint_bytes: int = Field(default=limits.MAX_CONSTRAINT_BYTES, ge=0)
    max_queue_seconds: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)
    keepalive_seconds: float = Field(default=60.0, ge=1, le=86_400, allow_inf_nan=False)
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
    checkpoint_bytes: int | None = Field(default=None, ge=0)
    checkpoint_age_seconds: float = Field(default=86_400.0, gt=0, le=31_536_000, allow_inf_nan=False)
    resume_grace_seconds: float = Field(default=30.0, ge=0, le=86_400, allow_inf_nan=False)
    shutdown_late_seconds: float = Field(default=0.1, ge=0, le=86_400, allow_inf_nan=False)
    shutdown_grace_seconds: float = Field(default=5.0, ge=0, le=86_400, allow_inf_nan=False)
    health_stall_seconds: float = Field(default=60.0, gt=0, le=86_400, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    metrics_listen: str | None = None
    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s/?#]+/?$", description="http://HOST:PORT or https://HOST:PORT"
    )

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
            max_queue_seconds=self.max_queue_seconds,
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
            checkpoint_bytes=self.checkpoint_bytes,
            checkpoint_age_seconds=self.checkpoint_age_seconds,
        )

    def request_limits(self) -> limits.RequestLimits:
        """The part that bounds what one caller may ask for."""
        return limits.RequestLimits(
            max_message_bytes=self.max_message_bytes,
            max_message_seconds=self.max_message_seconds,
            max_metadata_bytes=self.max_metadata_bytes,
            max_streams=self.max_streams,
            max_streams_per_caller=self.max_streams_per_caller,
            max_prompt_tokens=self.max_prompt_tokens,
            max_stop_sequences=self.max_stop_sequences,
            max_constraint_bytes=self.max_constraint_bytes,
        )

    @property
    def unix_mode(self) -> int:
        """Permissions of a Unix socket."""
        return int(self.unix_socket_mode or "600", 8)

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: object, info: ValidationInfo) -> object:
        """No truth value and no text that Python alone takes for a number; no empty path, and no `~` for a folder."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = get_args(annotation) or (annotation,)
        if (int in kinds or float in kinds) and (
            isinstance(value, bool) or (isinstance(value, str) and not NUMBER.fullmatch(value))
        ):
            raise PydanticCustomError("number", "must be a number, got {value}", {"value": repr(value)[:80]})
        return _path_of(value) if Path in kinds and isinstance(value, (str, Path)) else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _holds_no_secret(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and "@" in endpoint:
            raise PydanticCustomError("secret", "must not hold a user or a password: settings are shown")
        return endpoint

    @field_validator("unix_socket_mode")
    @classmethod
    def _needs_socket(cls, mode: str | None, others: ValidationInfo) -> str | None:
        if mode is not None and not str(others.data.get("listen", "unix:")).startswith("unix:"):
            raise PydanticCustomError("no_socket", "has no meaning unless listen is unix:PATH")
        return mode

    @field_validator("tls_cert")
    @classmethod
    def _contradicts_insecure(cls, path: Path | None, others: ValidationInfo) -> Path | None:
        if path is not None and others.data.get("insecure"):
            raise PydanticCustomError("insecure", "contradicts insecure")
        return path

    @field_validator("tls_key", "tls_client_ca")
    @classmethod
    def _needs_certificate(cls, path: Path | None, others: ValidationInfo) -> Path | None:
        if path is not None and others.data.get("tls_cert", path) is None:
            raise PydanticCustomError("no_certificate", "needs tls_cert")
        return path

    @model_validator(mode="after")
    def _has_both_halves(self) -> ServerSettings:
        if self.tls_cert is not None and self.tls_key is None:
            raise PydanticCustomError("no_key", "tls_cert needs tls_key")
        return self

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
        return tuple((name, str(_path_of(folder))) for name, folder in named)

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
            raise PydanticCustomError("model", "must be given, such as smollm2-135m")
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


def _path_of(value: str | Path) -> Path:
    """The path; a shell is not always there to put a home folder in the place of `~`."""
    if not str(value):
        raise PydanticCustomError("path", "must not be empty")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise PydanticCustomError("path", "begins with the home folder of nobody") from None


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value
