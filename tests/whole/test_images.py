"""Images as a client sends them: an answer, the prompt that they become, refusals with a status, and memory."""

import grpc
import pytest

from mlxstream import MlxStreamError
from mlxstream.requests import chat_prompt
from mlxstream.v1 import graph_pb2
from mlxstream.v1.model_pb2 import RenderChatRequest
from tests.engine import tiny_seer
from tests.engine.models import tiny_vision

FEW = {"denoising": {"max_denoising_steps": 4, "min_canvas_length": 4}, "max_tokens": 20, "seed": 5}


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "seer"
    tiny_seer.write(folder)
    return folder


def asked(*pieces):
    return [{"role": "user", "content": list(pieces)}]


async def test_an_image_changes_the_answer_and_the_account_counts_its_tokens(client):
    photographs = [tiny_vision.encoded(tiny_vision.picture(seed, 60, 40), "JPEG") for seed in range(2)]
    answers = [await client.generate(asked("What is it?", photograph), **FEW) for photograph in photographs]
    again = await client.generate(asked("What is it?", photographs[0]), **FEW)
    assert answers[0].text == again.text != answers[1].text
    assert answers[0].stats.prompt_tokens == answers[1].stats.prompt_tokens


async def test_the_model_declares_pixels_and_the_length_of_its_canvas(client):
    info = await client.model()
    assert info.declaration.media.input == graph_pb2.MEDIA_INPUT_PIXELS
    assert not info.declaration.media.video
    assert info.geometry.canvas_length == 16


async def test_a_rendered_conversation_has_room_for_every_token_of_an_image(whole):
    chat = chat_prompt(asked(tiny_vision.encoded(tiny_vision.picture(1)), "a"))
    rendered = await whole.models.RenderChat(RenderChatRequest(chat=chat))
    assert list(rendered.ids).count(tiny_seer.IMAGE) == 6
    assert rendered.text.count("<|image|>") == 1


@pytest.mark.parametrize("data", [b"", b"no image", tiny_vision.encoded(tiny_vision.picture(1), "WEBP")[:-20]])
async def test_what_is_no_image_is_an_invalid_argument_that_names_it(client, data):
    with pytest.raises(MlxStreamError, match=r"chat\.messages\[0\]\.content\[1\]\.image") as caught:
        await client.generate(asked("Look:", data), **FEW)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_estimate_counts_images(client):
    sizes = [await client.estimate_memory(prompt_tokens=60, max_tokens=8, images=count) for count in (0, 1)]
    assert sizes[0].kv_bytes < sizes[1].kv_bytes
    assert sizes[0].max_context_tokens >= sizes[1].max_context_tokens


@pytest.mark.parametrize(
    ("images", "prompt_tokens", "told"),
    [
        (17, 60, "at most 16 are taken in a request, got 17"),
        (2**32 - 1, 60, "at most 16 are taken in a request, got 4294967295"),
        (16, 47, "16 images take at least 48 of a prompt's tokens, and prompt_tokens is 47"),
    ],
)
async def test_an_estimate_of_images_that_no_prompt_has_is_refused(client, images, prompt_tokens, told):
    with pytest.raises(MlxStreamError, match=f"images.*{told}") as caught:
        await client.estimate_memory(prompt_tokens=prompt_tokens, max_tokens=8, images=images)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
