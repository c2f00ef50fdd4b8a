"""Bearer tokens from a TOML file: for each name a token, what it permits, and bounds of its own.

    [team-a]
    token = "at least sixteen characters"       # or token_sha256 = "64 hexadecimal digits"
    permissions = ["application"]               # "application" (default), "admin", or both
    max_streams = 8                             # optional
    max_prompt_tokens = 8192                    # optional

Tokens are held as their SHA-256 alone. No message holds one, nor any other content of the file but names and keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from service.callers import Caller, Permission
from service.reading import UnusableFileError, read_small_file, warn_if_exposed
from service.reloading import Reloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MAX_FILE_BYTES: Final = 256 * 1024
MAX_TOKENS: Final = 1000
MIN_TOKEN_CHARACTERS: Final = 16
MAX_TOKEN_CHARACTERS: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Callers by the digests of their tokens."""

    entries: tuple[tuple[bytes, Caller], ...] = field(repr=False)

    def caller_of(self, token: str) -> Caller | None:
        """Whose token it is. The time it takes depends on the number of tokens alone: every one is compared."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found = None
        for known, caller in self.entries:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def followed_tokens(path: Path) -> Callable[[], TokenTable]:
    """Read `path` now, and return a function that gives its newest good content.

    Raises:
        UnusableFileError: it cannot be used.
    """
    reloaded = Reloaded((path,), lambda: read_tokens(path), what="tokens file")
    warn_if_exposed(path)
    return reloaded.current


def read_tokens(path: Path) -> TokenTable:
    """The tokens of a file.

    Raises:
        UnusableFileError: it cannot be read, or an entry is wrong.
    """
    try:
        tables = tomllib.loads(read_small_file(path, MAX_FILE_BYTES).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UnusableFileError(f"{path.name}: not TOML{_place(error)}") from None
    if not 1 <= len(tables) <= MAX_TOKENS:
        raise UnusableFileError(f"{path.name}: must hold from 1 to {MAX_TOKENS} tokens, got {len(tables)}")
    entries = tuple(_entry(path.name, name, table) for name, table in tables.items())
    if len({digest for digest, _ in entries}) < len(entries):
        raise UnusableFileError(f"{path.name}: two names have the same token")
    return TokenTable(entries)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN_CHARACTERS, max_length=MAX_TOKEN_CHARACTERS)
    token_sha256: SecretStr | None = None
    permissions: list[str] = Field(default=[Permission.APPLICATION.value], min_length=1)
    max_streams: int | None = Field(default=None, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _is_one_token(self) -> _Entry:
        if (self.token is None) == (self.token_sha256 is None):
            raise PydanticCustomError("token", "one of token and token_sha256 must be given")
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]+", self.token.get_secret_value()):
            raise PydanticCustomError("token", "token must be visible ASCII without spaces, as headers carry it")
        if self.token_sha256 is not None and not _is_digest(self.token_sha256.get_secret_value()):
            raise PydanticCustomError("token", "token_sha256 must be 64 hexadecimal digits")
        known = [permission.value for permission in Permission]
        if not set(self.permissions) <= set(known):
            raise PydanticCustomError("permission", "permissions must be of {known}", {"known": ", ".join(known)})
        return self

    def digest(self) -> bytes:
        """SHA-256 of the token."""
        if self.token is not None:
            return hashlib.sha256(self.token.get_secret_value().encode()).digest()
        return bytes.fromhex(self.token_sha256.get_secret_value()) if self.token_sha256 is not None else b""


def _entry(file_name: str, name: str, table: object) -> tuple[bytes, Caller]:
    if not _NAME.fullmatch(name):
        raise UnusableFileError(f"{file_name}: a name is 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(table, dict):
        raise UnusableFileError(f"{file_name}: {name} must be a table, [{name}]")
    try:
        entry = _Entry(**table)
    except ValidationError as error:
        raise UnusableFileError("; ".join(_described(file_name, name, dict(one)) for one in error.errors())) from None
    caller = Caller(
        name=name,
        permissions=frozenset(Permission(text) for text in entry.permissions),
        max_streams=entry.max_streams,
        max_prompt_tokens=entry.max_prompt_tokens,
    )
    return entry.digest(), caller


def _is_digest(text: str) -> bool:
    return re.fullmatch(r"[0-9A-Fa-f]{64}", text) is not None


def _described(file_name: str, name: str, error: Mapping[str, Any]) -> str:
    key = ".".join((name, *(str(part) for part in error["loc"])))
    if error["type"] == "extra_forbidden":
        return f"{file_name}: {key}: no such key"
    return f"{file_name}: {key}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _place(error: Exception) -> str:
    """Where it stopped being TOML, without a word of what stands there."""
    found = re.search(r"line \d+", str(error))
    return f" ({found.group()})" if found else ""
