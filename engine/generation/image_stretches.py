"""How a prompt with images is cut into units: an image is never cut, since its tokens see each other both ways.

Pure arithmetic. Units: tokens, counted from the start of the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.vision import PromptImage


def unit_end(images: Sequence[PromptImage], start: int, limit: int) -> int:
    """Where a unit from `start` ends that should not pass `limit`: before an image that would be cut there.

    An image at the very start is taken whole, however long. No unit may have begun within an image.
    """
    for image in images:
        if image.start < limit < image.end:
            return image.start if image.start > start else image.end
    return limit


def images_within(images: Sequence[PromptImage], start: int, end: int) -> tuple[PromptImage, ...]:
    """The images of a unit, with their places counted from its start."""
    return tuple(replace(image, start=image.start - start) for image in images if start <= image.start < end)


def widest_unit(images: Sequence[int], chunk_tokens: int) -> int:
    """Tokens of the widest unit of a prompt whose images have so many tokens each."""
    return max(chunk_tokens, *images) if images else chunk_tokens
