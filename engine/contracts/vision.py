"""Images on their way into a prompt: the sizes of the tower that reads them, and what stands where.

An image is scaled to a whole number of squares, each of which becomes one token. Importing this module never imports
mlx. Units: pixels, tokens, and patches, of which `pooling` by `pooling` become one token.
Source: reference, denoising-and-models §2.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_IMAGES: Final = 16
"""Most images of one request."""
MAX_IMAGE_PIXELS: Final = 2**25
"""Most pixels of one image, as it is sent."""
MAX_IMAGES_PIXELS: Final = 2**27
"""Most pixels of all images of one request."""
MAX_IMAGE_BYTES: Final = 2**26
"""Most bytes of the file of one image."""
MAX_IMAGE_SIDE_PIXELS: Final = 2**15
"""Longest side of an image: what scaling holds grows with it."""
LEAST_IMAGE_TOKENS: Final = 3
"""What the smallest image takes of a prompt: one token, its beginning and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionGeometry:
    """Sizes of a vision tower. An image has at most `most_tokens`, and its patches are squares of `patch_pixels`."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    patch_pixels: int
    pooling: int
    most_tokens: int

    @property
    def token_pixels(self) -> int:
        """The side of the square that becomes one token."""
        return self.patch_pixels * self.pooling

    def patches(self, tokens: int) -> int:
        """Patches of an image that becomes `tokens`."""
        return tokens * self.pooling**2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """An image whose tokens are those from `start` on: `pixels` [H, W, 3] of 8 bits, scaled to whole tokens."""

    start: int
    tokens: int
    pixels: npt.NDArray[np.uint8]

    @property
    def end(self) -> int:
        """Where its tokens end."""
        return self.start + self.tokens
