"""JSON in one form only, so that equal values have equal digests: RFC 8785, with whole numbers of any size.

Keys are sorted by UTF-16 code units, arrays keep their order, nothing is spaced, and numbers are written as ECMAScript
writes them. What JSON cannot say (NaN, infinities, text that is no Unicode) is refused, not replaced. Two things differ
from the specification: an integer is written with all its digits, where ECMAScript would round it to a double, and a
double that is whole is written as that integer, so that 1 and 1.0 are one value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

FIXED_DIGITS: Final = 21
"""Numbers up to 10^21 are written without an exponent. Source: ECMA-262, Number::toString."""
FIXED_ZEROS: Final = 6
"""So are those from 10^-6 on."""


def canonical_json(value: object) -> bytes:
    """`value`, of mappings, sequences, texts, numbers, truths and None, in UTF-8.

    Raises:
        ValueError: it holds a number that is not finite, a text that is no Unicode, or something else.
    """
    return _written(value).encode("utf-8")


def _written(value: object) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return _text(value)
        case int():
            return str(int(value))
        case float():
            return _number(value)
        case Mapping():
            return "{" + ",".join(f"{_text(key)}:{_written(value[key])}" for key in sorted(value, key=_order)) + "}"
        case Sequence():
            return "[" + ",".join(map(_written, value)) + "]"
    raise ValueError(f"{type(value).__name__} has no canonical form")


def _order(key: object) -> bytes:
    if not isinstance(key, str):
        raise ValueError(f"a key must be a text, got {type(key).__name__}")
    return key.encode("utf-16-be", "surrogatepass")


def _text(text: str) -> str:
    """Quoted; only what must be escaped is."""
    if not text.isascii():
        text.encode("utf-8")  # raises what says that it is no Unicode
    return json.dumps(text, ensure_ascii=False)


def _number(number: float) -> str:
    """The shortest digits that read back as `number`. Source: ECMA-262, Number::toString."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is no number that can be written")
    if number == 0:
        return "0"
    mantissa, _, exponent_text = f"{abs(number)!r}e0".partition("e")
    whole, _, fraction = mantissa.partition(".")
    exponent = int(exponent_text.partition("e")[0]) + len(whole)
    digits = (whole + fraction).lstrip("0")
    exponent -= len(whole + fraction) - len(digits)
    return ("-" if number < 0 else "") + _placed(digits.rstrip("0"), exponent)


def _placed(digits: str, exponent: int) -> str:
    """0.DIGITS times 10 to `exponent`."""
    count = len(digits)
    if count <= exponent <= FIXED_DIGITS:
        return digits + "0" * (exponent - count)
    if 0 < exponent <= FIXED_DIGITS:
        return f"{digits[:exponent]}.{digits[exponent:]}"
    if -FIXED_ZEROS < exponent <= 0:
        return f"0.{'0' * -exponent}{digits}"
    sign = "+" if exponent > 0 else "-"
    tail = f".{digits[1:]}" if count > 1 else ""
    return f"{digits[0]}{tail}e{sign}{abs(exponent - 1)}"
