"""Images of a conversation: how large each becomes, and where its tokens stand in the prompt.

A chat template writes one token for each image. It is replaced by a beginning, as many tokens of the image as it is
large, and an end. Source: reference, denoising-and-models §2.6 and §5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.artifacts.image_decoding import decode_image, open_image
from engine.contracts.errors import ChatTemplateError, InvalidRequestError
from engine.contracts.prompt import ImagePart
from engine.contracts.vision import MAX_IMAGES, MAX_IMAGES_PIXELS, PromptImage, VisionGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.artifacts.image_decoding import EncodedImage
    from engine.artifacts.vision_fields import ImageTokenIds
    from engine.contracts.prompt import ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlace:
    """Where the tokens of an image stand. Its pixels have not been looked at."""

    start: int
    tokens: int
    encoded: EncodedImage
    geometry: VisionGeometry

    def decoded(self) -> PromptImage:
        """The image with its pixels; raises `InvalidRequestError` when there are none to be had."""
        pixels = decode_image(self.encoded, lambda height, width: fitted_size(self.geometry, height, width))
        return PromptImage(start=self.start, tokens=self.tokens, pixels=pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """Reads the images of conversations for one model. Holds sizes and ids alone."""

    geometry: VisionGeometry
    ids: ImageTokenIds

    def open(self, chat: ChatPrompt) -> list[EncodedImage]:
        """The images of `chat`, in order, with their headers read.

        Raises:
            InvalidRequestError: one cannot be used, or they are too many or too large together.
        """
        parts = [
            (f"prompt.chat.messages[{turn}].content[{at}].image", part.data)
            for turn, message in enumerate(chat.messages)
            for at, part in enumerate(message.content)
            if isinstance(part, ImagePart)
        ]
        if len(parts) > MAX_IMAGES:
            raise InvalidRequestError.of(
                "prompt.chat.messages", f"at most {MAX_IMAGES} images are taken in a request, got {len(parts)}"
            )
        images = [open_image(data, field) for field, data in parts]
        pixels = sum(image.pixels for image in images)
        if pixels > MAX_IMAGES_PIXELS:
            raise InvalidRequestError.of(
                "prompt.chat.messages",
                f"at most {MAX_IMAGES_PIXELS} pixels are taken in all images of a request, got {pixels}",
            )
        return images

    def placed(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> tuple[list[int], tuple[ImagePlace, ...]]:
        """`ids` with room for each of `images` where the template wrote its token, and where that is.

        Raises:
            ChatTemplateError: the template wrote more or fewer such tokens than there are images.
        """
        if not images:
            return list(ids), ()
        written = list(ids).count(self.ids.image)
        if written != len(images):
            raise ChatTemplateError(f"the model's chat template makes room for {written} of {len(images)} images")
        waiting = iter(images)
        spliced: list[int] = []
        places = []
        for token in ids:
            if token != self.ids.image:
                spliced.append(token)
                continue
            image = next(waiting)
            tokens = self._tokens(image)
            place = ImagePlace(start=len(spliced) + 1, tokens=tokens, encoded=image, geometry=self.geometry)
            spliced += [self.ids.begin, *[self.ids.image] * tokens, self.ids.end]
            places.append(place)
        return spliced, tuple(places)

    def _tokens(self, image: EncodedImage) -> int:
        """How many tokens `image` becomes, on whichever side it lies."""
        height, width = fitted_size(self.geometry, image.height, image.width)
        return (height // self.geometry.token_pixels) * (width // self.geometry.token_pixels)


def fitted_size(geometry: VisionGeometry, height: int, width: int) -> tuple[int, int]:
    """The height and width that an image is scaled to: whole tokens, at most as many as it may have.

    The ratio of its sides is kept as far as that goes; a side never becomes shorter than a token.
    Source: reference, denoising-and-models §2.6.
    """
    side, most = geometry.token_pixels, geometry.most_tokens
    factor = math.sqrt(geometry.patches(most) * geometry.patch_pixels**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not rows:
        rows, columns = 1, min(max(1, width // height), most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * side, columns * side
