"""Finds stored prefixes of a prompt: an ordered table of token lists for each namespace. Pure; units are tokens.

Lists are kept as big-endian bytes, so that byte order is token order: whoever shares most with a prompt then stands
next to its place, and shares less the further away it stands. A look-up is a binary search and a short walk.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ValueT = TypeVar("ValueT")

TOKEN_BYTES = 4


def token_key(tokens: Sequence[int]) -> bytes:
    """The key of a token list: its ids as unsigned 32-bit big-endian numbers."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def key_tokens(key: bytes) -> tuple[int, ...]:
    """The token list of a key."""
    return tuple(np.frombuffer(key, dtype=">u4").tolist())


def length_of(key: bytes) -> int:
    """Tokens of a key."""
    return len(key) // TOKEN_BYTES


def shared_tokens(one: bytes, other: bytes) -> int:
    """Length of the common prefix of two keys."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    if one[: high * TOKEN_BYTES] == other[: high * TOKEN_BYTES]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        piece = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if one[piece] == other[piece]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex(Generic[ValueT]):
    """Values under (namespace, key). Holds no arrays and no lock."""

    def __init__(self) -> None:
        """Start empty."""
        self._keys: dict[str, list[bytes]] = {}
        self._values: dict[tuple[str, bytes], ValueT] = {}

    def __len__(self) -> int:
        """Values held."""
        return len(self._values)

    def __iter__(self) -> Iterator[ValueT]:
        """Every value, in no order that means anything."""
        return iter(self._values.values())

    def get(self, namespace: str, key: bytes) -> ValueT | None:
        """The value under exactly this key."""
        return self._values.get((namespace, key))

    def put(self, namespace: str, key: bytes, value: ValueT) -> None:
        """Add a value, or replace the one under the same key."""
        if (namespace, key) not in self._values:
            keys = self._keys.setdefault(namespace, [])
            keys.insert(bisect_left(keys, key), key)
        self._values[namespace, key] = value

    def remove(self, namespace: str, key: bytes) -> None:
        """Forget a key that is held."""
        del self._values[namespace, key]
        keys = self._keys[namespace]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._keys[namespace]

    def longest(self, namespace: str, key: bytes, usable: Callable[[ValueT, int], int]) -> tuple[ValueT, int] | None:
        """The value of which most tokens can be used for `key`, and how many.

        `usable` says how many of the shared tokens (the second argument) a value really serves; 0 for none.
        """
        best: tuple[ValueT, int] | None = None
        for found, shared in self._nearest(namespace, key):
            if shared <= (0 if best is None else best[1]):
                break
            value = self._values[namespace, found]
            tokens = usable(value, shared)
            if tokens > (0 if best is None else best[1]):
                best = value, tokens
        return best

    def ancestors(self, namespace: str, key: bytes) -> Iterator[ValueT]:
        """Values whose keys are shorter prefixes of `key`, longest first."""
        keys = self._keys.get(namespace, [])
        rest = key[:-TOKEN_BYTES]
        while rest:
            place = bisect_left(keys, rest + b"\0")
            if not place:
                return
            shared = shared_tokens(keys[place - 1], rest)
            rest = rest[: shared * TOKEN_BYTES]
            if keys[place - 1] == rest:
                yield self._values[namespace, rest]
                rest = rest[:-TOKEN_BYTES]

    def descendants(self, namespace: str, key: bytes) -> Iterator[ValueT]:
        """Values whose keys begin with `key`, itself included."""
        keys = self._keys.get(namespace, [])
        for place in range(bisect_left(keys, key), len(keys)):
            if not keys[place].startswith(key):
                return
            yield self._values[namespace, keys[place]]

    def _nearest(self, namespace: str, key: bytes) -> Iterator[tuple[bytes, int]]:
        """Keys by falling number of tokens shared with `key`, and that number."""
        keys = self._keys.get(namespace, [])
        place = bisect_left(keys, key)
        below, above = _outward(keys, key, range(place - 1, -1, -1)), _outward(keys, key, range(place, len(keys)))
        left, right = next(below, None), next(above, None)
        while left is not None or right is not None:
            if right is None or (left is not None and left[1] > right[1]):
                if left is not None:
                    yield left
                left = next(below, None)
            else:
                yield right
                right = next(above, None)


def _outward(keys: Sequence[bytes], key: bytes, places: range) -> Iterator[tuple[bytes, int]]:
    """Keys at `places`, walking away from the place of `key`, and the falling number of tokens that each shares."""
    prefix = key
    for place in places:
        if not keys[place].startswith(prefix):
            prefix = key[: shared_tokens(keys[place], prefix) * TOKEN_BYTES]
        yield keys[place], length_of(prefix)
