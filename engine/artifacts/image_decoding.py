"""Encoded images, opened and decoded within bounds: what is no image, or too large a one, is refused by name.

A file is walked first and its header read, so that a refusal costs little; pixels are decoded once all else of a
request is known to be good. The library sees no metadata. Works on any thread. Units: pixels.
"""

from __future__ import annotations

import io
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image, UnidentifiedImageError

from engine.artifacts.image_structure import DAMAGED, NO_IMAGE, bare_image
from engine.contracts.errors import InvalidRequestError
from engine.contracts.vision import MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from PIL.ImageFile import ImageFile

_FORMATS: Final = ("PNG", "JPEG", "WEBP")
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image upright, for each orientation that is not."""
_BOUNDS: Final = f"at most {MAX_IMAGE_PIXELS} pixels are taken, and {MAX_IMAGE_SIDE_PIXELS} on a side"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An image whose header was read. `field` is its path in the request, `data` its file without metadata."""

    field: str
    data: bytes
    width: int
    height: int
    orientation: int

    @property
    def pixels(self) -> int:
        """How many there are."""
        return self.width * self.height


def open_image(data: bytes, field: str) -> EncodedImage:
    """Read the header of an encoded image.

    Raises:
        InvalidRequestError: it is no still PNG, JPEG or WebP image, or has more pixels, bytes or parts than are taken.
    """
    if not data:
        raise InvalidRequestError.of(field, "is empty")
    bare = bare_image(data, field)
    with _opened(bare.data, field) as image:
        width, height = image.size
    if not (width and height):
        raise InvalidRequestError.of(field, "has no pixels")
    if width * height > MAX_IMAGE_PIXELS or max(width, height) > MAX_IMAGE_SIDE_PIXELS:
        raise InvalidRequestError.of(field, f"has {width} by {height} pixels; {_BOUNDS}")
    return EncodedImage(field=field, data=bare.data, width=width, height=height, orientation=bare.orientation)


def decode_image(encoded: EncodedImage, fitted: Callable[[int, int], tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """The pixels [H, W, 3] of an image, upright, in 8 bits, scaled bicubically to what `fitted` makes of height, width.

    Raises:
        InvalidRequestError: it cannot be decoded.
    """
    with _opened(encoded.data, encoded.field) as image:
        turn = _TURNS.get(encoded.orientation)
        upright = (image if turn is None else image.transpose(turn)).convert("RGB")
        height, width = fitted(upright.height, upright.width)
        if upright.size != (width, height):
            upright = upright.resize((width, height), resample=Image.Resampling.BICUBIC)
        return np.asarray(upright)


def keep_library_quiet() -> None:
    """Print none of the library's warnings, which tell of callers' files: what matters in them is refused by name."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


@contextmanager
def _opened(data: bytes, field: str) -> Iterator[ImageFile]:
    """The image of which only the header has been read; any failure of the library is a refusal."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except InvalidRequestError:
        raise
    except UnidentifiedImageError:
        raise InvalidRequestError.of(field, NO_IMAGE) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequestError.of(field, f"has too many pixels; {_BOUNDS}") from None
    except Exception:  # a hostile file can make the library fail in any way
        raise InvalidRequestError.of(field, DAMAGED) from None
