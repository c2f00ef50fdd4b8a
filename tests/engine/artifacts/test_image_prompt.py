"""How large images become, and where their tokens stand: as mlx-vlm says, or refused by name."""

import itertools

import pytest
from mlx_vlm.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

from engine.artifacts import image_prompt
from engine.artifacts.image_prompt import ImageReader, fitted_size
from engine.artifacts.vision_fields import ImageTokenIds
from engine.contracts.errors import ChatTemplateError, InvalidRequestError
from engine.contracts.prompt import ChatMessage, ChatPrompt, ImagePart, TextPart
from engine.contracts.vision import MAX_IMAGES, VisionGeometry
from tests.engine.models.tiny_vision import encoded, picture

PUBLISHED = VisionGeometry(
    hidden_size=1152, intermediate_size=4304, layers=27, heads=16, kv_heads=16, head_dim=72, patch_pixels=16, pooling=3,
    most_tokens=280,
)  # fmt: skip
READER = ImageReader(geometry=PUBLISHED, ids=ImageTokenIds(begin=90, image=91, end=92))
LENGTHS = (1, 2, 7, 16, 47, 48, 49, 97, 480, 801, 1000, 1365, 4000, 30_000)


def test_every_size_becomes_what_it_becomes_in_mlx_vlm():
    seen = set()
    for height, width in itertools.product(LENGTHS, LENGTHS):
        found = fitted_size(PUBLISHED, height, width)
        assert found == get_aspect_ratio_preserving_size(height, width, 16, 2520, 3)
        seen.add((found[0] // 48) * (found[1] // 48))
    assert max(seen) <= 280
    assert len(seen) > 20


def test_an_image_takes_as_many_tokens_on_its_side():
    for height, width in itertools.combinations(LENGTHS, 2):
        one, other = fitted_size(PUBLISHED, height, width), fitted_size(PUBLISHED, width, height)
        assert one == other[::-1]


def test_a_single_token_is_enough_for_any_size():
    small = VisionGeometry(
        hidden_size=8, intermediate_size=8, layers=1, heads=1, kv_heads=1, head_dim=8, patch_pixels=3, pooling=1,
        most_tokens=1,
    )  # fmt: skip
    assert {fitted_size(small, *size) for size in itertools.product(LENGTHS, LENGTHS)} == {(3, 3)}


def chat(*contents):
    return ChatPrompt(messages=tuple(ChatMessage("user", content) for content in contents))


def part(seed, width, height):
    return ImagePart(encoded(picture(seed, width, height)))


def test_each_token_of_an_image_becomes_its_whole_stretch_in_order():
    images = READER.open(chat((TextPart("a"), part(1, 480, 480)), (part(2, 96, 20), part(3, 10, 2000))))
    ids, places = READER.placed([1, 91, 2, 91, 91, 3], images)
    sizes = [place.tokens for place in places]
    assert sizes == [256, 252, 236]
    wanted = [1, 90, *[91] * 256, 92, 2, 90, *[91] * 252, 92, 90, *[91] * 236, 92, 3]
    assert ids == wanted
    assert [ids[place.start - 1] for place in places] == [90] * 3
    assert all(ids[place.start : place.start + place.tokens] == [91] * place.tokens for place in places)
    for place in places:
        rows, columns = (side // 48 for side in place.decoded().pixels.shape[:2])
        assert (rows * columns, place.decoded().start) == (place.tokens, place.start)


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_template_that_makes_room_for_other_images_than_there_are_is_refused(written):
    images = READER.open(chat((part(1, 48, 48), part(2, 48, 48))))
    with pytest.raises(ChatTemplateError, match=f"makes room for {written} of 2 images"):
        READER.placed([1, *[91] * written, 2], images)


def test_without_images_a_prompt_stays_as_it_is():
    assert READER.placed([1, 91, 2], READER.open(chat((TextPart("a"),)))) == ([1, 91, 2], ())


def test_more_images_than_are_taken_are_refused_before_one_is_looked_at():
    many = [ImagePart(b"no image")] * (MAX_IMAGES + 1)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_IMAGES} images are taken in a request, got 17"):
        READER.open(chat(many[:9], many[9:]))


def test_images_that_are_too_large_together_are_refused(monkeypatch):
    monkeypatch.setattr(image_prompt, "MAX_IMAGES_PIXELS", 1000)
    READER.open(chat((part(1, 20, 50),)))
    with pytest.raises(InvalidRequestError, match="at most 1000 pixels are taken in all images of a request, got 1020"):
        READER.open(chat((part(1, 20, 50),), (part(1, 20, 1),)))


def test_the_image_that_cannot_be_used_is_named():
    with pytest.raises(InvalidRequestError) as caught:
        READER.open(chat((TextPart("a"),), (TextPart("b"), part(1, 9, 9), ImagePart(b"?"))))
    assert caught.value.violations[0].field == "prompt.chat.messages[1].content[2].image"
