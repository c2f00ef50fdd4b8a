"""Packs small numbers into 32-bit words: 32 numbers of b bits take b words.

A width that does not divide 32 is split into widths that do: 3 bits are 2 and 1, 5 bits are 4 and 1.
"""

from __future__ import annotations

from types import MappingProxyType

import mlx.core as mx

NUMBERS = 32
"""So many numbers are packed together; the last axis is a multiple of it."""

_FIELDS = MappingProxyType({2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 8: (8,)})


def pack(numbers: mx.array, bits: int) -> mx.array:
    """Words [.., G·bits] of `numbers` [.., G·32] uint32, each below 2**bits; bits is 2, 3, 4, 5 or 8."""
    words, shift = [], 0
    for width in _FIELDS[bits]:
        field = (numbers >> shift) & (2**width - 1)
        fields = field.reshape(*numbers.shape[:-1], -1, width, NUMBERS // width)
        words.append(mx.sum(fields << _shifts(width), axis=-1))
        shift += width
    return mx.concatenate(words, axis=-1).flatten(-2)


def unpack(words: mx.array, bits: int) -> mx.array:
    """Numbers [.., G·32] uint32 of `words` [.., G·bits]."""
    groups = words.reshape(*words.shape[:-1], -1, bits)
    numbers = mx.zeros((1,), dtype=mx.uint32)
    shift = start = 0
    for width in _FIELDS[bits]:
        fields = (groups[..., start : start + width, None] >> _shifts(width)) & (2**width - 1)
        field = fields.flatten(-2)
        numbers = numbers | (field << shift) if shift else field
        start, shift = start + width, shift + width
    return numbers.flatten(-2)


def _shifts(width: int) -> mx.array:
    return mx.arange(0, NUMBERS, width, dtype=mx.uint32)
