"""What callers say in metadata rather than in a message, because proxies read it: priority, and the session's key.

A balancer that hashes the session's key sends a conversation to the replica that keeps its state; the same key tells
that replica that it is one, as `GenerateOptions.cache_session_id` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from service.rpc import Context

PRIORITY_KEY: Final = "mlx-stream-priority"
SESSION_KEY: Final = "mlx-stream-session"
LONGEST_SESSION: Final = 256
LOWEST_PRIORITY: Final = -100
HIGHEST_PRIORITY: Final = 100


def priority_of(context: Context) -> int:
    """The priority that the call asks for; 0 without one.

    Raises:
        InvalidRequestError: it is no whole number from `LOWEST_PRIORITY` to `HIGHEST_PRIORITY`.
    """
    values = [value for key, value in context.invocation_metadata() or () if key == PRIORITY_KEY]
    if not values:
        return 0
    text = values[-1]
    digits = text.removeprefix("-") if isinstance(text, str) else ""
    if digits.isascii() and digits.isdigit() and len(digits) <= 3:
        priority = int(text)
        if LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
            return priority
    raise InvalidRequestError.of(
        f"metadata[{PRIORITY_KEY}]", f"must be a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}"
    )


def session_of(context: Context) -> str:
    """The session that the call belongs to; "" without one.

    Raises:
        InvalidRequestError: it is longer than `LONGEST_SESSION` characters, or not text.
    """
    values = [value for key, value in context.invocation_metadata() or () if key == SESSION_KEY]
    session = values[-1] if values else ""
    if not isinstance(session, str) or len(session) > LONGEST_SESSION:
        raise InvalidRequestError.of(f"metadata[{SESSION_KEY}]", f"must be at most {LONGEST_SESSION} characters")
    return session
