"""Bad options cost nothing: each is refused by name while another caller's stream runs on, unharmed."""

import grpc
import pytest

from mlxstream.v1 import generation_pb2
from tests.engine import tiny_model
from tests.engine.models.tiny_llama import random_prompt
from tests.option_values import BAD
from tests.service.harness import read_all, violated_fields
from tests.whole.conftest import CONTEXT

PAST = tiny_model.VOCAB
BEYOND = (PAST, 999_999, 2**31)
IDS_PAST_THE_VOCABULARY = [
    *(({"eos_token_ids": {"ids": [3, token]}}, "options.eos_token_ids.ids[1]") for token in BEYOND),
    *(
        ({"logit_bias": [{"token": 3}, {"token": token, "bias": -100}]}, "options.logit_bias[1].token")
        for token in BEYOND
    ),
    *(({"xtc_special_tokens": [3, token]}, "options.xtc_special_tokens[1]") for token in BEYOND),
]


def request(options, *, max_tokens=3):
    built = generation_pb2.GenerateRequest(tokens={"ids": random_prompt(3, 9)}, options=options)
    if not built.options.HasField("max_tokens"):
        built.options.max_tokens = max_tokens
    return built


def sampled(**options):
    return {"temperature": 0.9, "top_p": 0.95, "seed": 11, "eos_token_ids": {"ids": []}} | options


async def test_no_bad_value_is_admitted_and_the_neighbour_keeps_its_tokens(whole):
    neighbour = whole.generation.Generate(request(sampled(), max_tokens=4000))
    said = [token.token async for token in _tokens(neighbour, until=1)]
    for options, path in [*BAD, *IDS_PAST_THE_VOCABULARY]:
        responses, error = await read_all(whole.generation.Generate(request(options)))
        assert error is not None, options
        assert (responses, error.code()) == ([], grpc.StatusCode.INVALID_ARGUMENT), options
        assert violated_fields(error) == [path]
        assert (whole.jobs, len(whole.engine._live)) == (1, 1), options
    said += [token.token async for token in _tokens(neighbour, until=200)]
    neighbour.cancel()
    alone, error = await read_all(whole.generation.Generate(request(sampled(), max_tokens=len(said))))
    assert error is None
    assert [token.token for response in alone for token in response.chunk.tokens] == said


async def _tokens(call, *, until):
    """Tokens of the stream, until at least so many have come."""
    count = 0
    while count < until:
        response = await call.read()
        assert response is not grpc.aio.EOF
        for token in response.chunk.tokens:
            count += 1
            yield token


@pytest.mark.parametrize(("options", "path"), IDS_PAST_THE_VOCABULARY)
async def test_an_id_outside_the_vocabulary_is_told_with_its_number(whole, options, path):
    _, error = await read_all(whole.generation.Generate(request(options)))
    assert f"outside the vocabulary of {PAST}" in error.details()


async def test_biases_of_every_size_are_defined(whole):
    plain = await _ids(whole, {})
    every = [{"token": token, "bias": -100} for token in range(PAST)]
    assert await _ids(whole, {"logit_bias": every}) == plain
    for bias in (1e30, 1e308):
        assert await _ids(whole, {"logit_bias": [{"token": 5, "bias": bias}]}) == [5, 5, 5]
        lowered = await _ids(whole, {"logit_bias": [{"token": plain[0], "bias": -bias}], "logprobs": True})
        assert lowered[0] != plain[0]


async def test_the_largest_counts_end_at_the_room_that_there_is(whole):
    """They are accepted, alone and beside a normal request, and mean as many as fit."""
    for max_tokens in (2**31, 2**32 - 1):
        long = request({"max_tokens": max_tokens, "logprobs": True})
        call = whole.generation.Generate(long)
        started = (await call.read()).started
        assert started.options.max_tokens == CONTEXT - started.prompt_tokens
        assert await _ids(whole, {"max_tokens": 2}) == (await _ids(whole, {}))[:2]
        call.cancel()


async def _ids(whole, options):
    responses, error = await read_all(whole.generation.Generate(request({"eos_token_ids": {"ids": []}} | options)))
    assert error is None
    return [token.token for response in responses for token in response.chunk.tokens]
