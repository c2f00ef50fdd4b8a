"""Lists in pages: how many entries one holds, and the token that says where the next begins. Pure.

A token names the last entry that was shown, so that entries which come and go between pages are neither lost nor seen
twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from engine.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

DEFAULT_PAGE_SIZE: Final = 50
LARGEST_PAGE_SIZE: Final = 1000
_AFTER: Final = "after-"
_LONGEST_TOKEN: Final = 256


def page_of(
    entries: Sequence[T], *, name: Callable[[T], str], page_size: int, page_token: str
) -> tuple[Sequence[T], str]:
    """One page of `entries`, which are in the order of their names, and the token of the next page ("" after the last).

    Raises:
        InvalidRequestError: `page_token` is not one that we give.
    """
    last = _last_shown(page_token)
    left = [entry for entry in entries if last is None or name(entry) > last]
    size = min(page_size or DEFAULT_PAGE_SIZE, LARGEST_PAGE_SIZE)
    page = left[:size]
    return page, f"{_AFTER}{name(page[-1])}" if len(left) > size else ""


def ordinal_name(number: int) -> str:
    """A name for entry `number` that sorts as numbers do."""
    return f"{number:020d}"


def _last_shown(page_token: str) -> str | None:
    if not page_token:
        return None
    last = page_token.removeprefix(_AFTER)
    if last == page_token or not last or len(page_token) > _LONGEST_TOKEN:
        raise InvalidRequestError.of("page_token", "is not one that this server has given")
    return last
