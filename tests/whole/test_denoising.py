"""A block-diffusion model as a client sees it: blocks as they are committed, canvases, memory, refusals."""

import pytest

from mlxstream import MlxStreamError
from mlxstream.v1 import graph_pb2, model_pb2
from mlxstream.v1.generation_pb2 import CompleteRequest
from tests.engine import tiny_denoiser
from tests.engine.models import tiny_diffusion

PROMPT = list(range(20, 32))
FEW = {"denoising": {"max_denoising_steps": 4}, "max_tokens": 40, "seed": 5}


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "denoiser"
    tiny_denoiser.write(folder)
    return folder


async def events(client, **delivery):
    return [one async for one in client.stream(PROMPT, delivery=delivery, **FEW).events()]


def kinds(responses):
    return [response.WhichOneof("event") for response in responses]


async def test_tokens_come_block_by_block_and_the_account_says_how_many_passes_they_took(client):
    responses = await events(client)
    chunks = [list(one.chunk.tokens) for one in responses if one.WhichOneof("event") == "chunk"]
    finished = responses[-1].finished
    assert kinds(responses) == ["started", *["chunk"] * len(chunks), "finished"]
    assert [token.index for chunk in chunks for token in chunk] == list(range(finished.stats.generated_tokens))
    done = finished.stats.denoising
    assert done.canvas_tokens == done.blocks * tiny_diffusion.CANVAS
    assert done.blocks <= done.steps <= 4 * done.blocks
    assert finished.stats.prefill_ms == 0


async def test_canvases_come_between_the_chunks_for_those_who_ask(client):
    without = await events(client)
    responses = await events(client, draft_blocks=True)
    updates = [one.block for one in responses if one.WhichOneof("event") == "block"]
    assert updates
    for index in {one.block_index for one in updates}:
        own = [one for one in updates if one.block_index == index]
        assert [one.revision for one in own] == list(range(len(own)))
        assert [one.committed for one in own] == [False] * (len(own) - 1) + [True]
    assert [one.chunk.text for one in responses if one.chunk.text] == [
        one.chunk.text for one in without if one.chunk.text
    ]
    tokens = [token.token for one in responses for token in one.chunk.tokens]
    assert tokens == [token for one in updates if one.committed for token in one.tokens][: len(tokens)]


async def test_the_options_of_started_can_be_sent_again(whole, client):
    first = await client.generate(PROMPT, denoising={"max_denoising_steps": 4}, max_tokens=20)
    request = CompleteRequest(tokens={"ids": PROMPT}, options=first.started.options)
    again = await whole.generation.Complete(request)
    assert [token.token for token in again.tokens] == [token.token for token in first.tokens]
    assert again.started.options == first.started.options


async def test_the_model_says_how_it_generates(whole):
    info = (await whole.models.GetModel(model_pb2.GetModelRequest())).model
    assert info.declaration.method == graph_pb2.GENERATION_METHOD_DENOISING
    assert info.graph.graph_abi == "mlx-denoising-v1"


async def test_a_raw_id_in_the_prompt_never_becomes_part_of_a_canvas(client):
    """There is no mask token: whatever ids a prompt holds are read as they are, and only canvases are denoised."""
    for token in (0, 1, 106, 256, 258):
        answer = await client.generate([token, *PROMPT, token, token], **FEW)
        assert answer.stats.prompt_tokens == len(PROMPT) + 3
        assert answer.stats.generated_tokens == len(answer.tokens)


async def test_what_cannot_be_honoured_is_refused_by_name(client):
    for options in ({"temperature": 0.5}, {"top_k": 3}, {"logprobs": True}, {"json_object": True}):
        with pytest.raises(MlxStreamError, match=f"options.{next(iter(options))} is not supported"):
            await client.generate(PROMPT, **options)


async def test_a_load_that_is_said_to_fit_is_admitted(client):
    found = await client.estimate_memory(prompt_tokens=100, max_tokens=40, rows=2)
    assert found.fits
    assert found.kv_bytes > 0
    assert (await client.generate([5] * 100, **FEW)).stats.prompt_tokens == 100


async def test_a_client_that_leaves_frees_its_row_between_two_passes(whole, client):
    stream = client.stream(
        PROMPT, denoising={"max_denoising_steps": 100_000, "sampler": "DENOISING_SAMPLER_ENTROPY_BOUND"},
        delivery={"draft_blocks": True},
    )  # fmt: skip
    async for response in stream.events():
        if response.WhichOneof("event") == "block":
            break
    stream.cancel()
    while whole.jobs:
        assert (await client.generate(PROMPT, **FEW)).stats.generated_tokens > 0
