"""Who calls: the name that scopes their requests, what they may do, and how much of it at once."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Permission(enum.Enum):
    """What a service asks for. Operators (`ADMIN`) may do what applications may do only if they are told so too."""

    APPLICATION = "application"
    ADMIN = "admin"


EVERYTHING: Final = frozenset(Permission)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One caller. `name` is shown in logs; "" is everybody, as long as nobody has to say who they are.

    `max_streams` and `max_prompt_tokens` are bounds of their own, within the server's; None means the server's.
    """

    name: str = ""
    permissions: frozenset[Permission] = EVERYTHING
    max_streams: int | None = None
    max_prompt_tokens: int | None = None


ANYBODY: Final = Caller()
