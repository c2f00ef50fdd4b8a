"""What callers say in metadata rather than in a message, because proxies read it: the priority of a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from service.rpc import Context

PRIORITY_KEY: Final = "mlx-stream-priority"
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
