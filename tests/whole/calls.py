"""What tests of the whole product share: requests that end by their length, and streams read to their end."""

import grpc

from mlxstream.v1 import generation_pb2, options_pb2
from tests.engine.models.tiny_llama import random_prompt


def request(number, *, prompt=8, max_tokens=4000, kind=generation_pb2.GenerateRequest, request_id="", **options):
    """A request of random tokens that no end of sequence cuts short."""
    delivery = options.pop("delivery", None)
    return kind(
        tokens={"ids": random_prompt(number, prompt)},
        options=options_pb2.GenerateOptions(max_tokens=max_tokens, eos_token_ids={"ids": []}, **options),
        delivery=delivery,
        request_id=request_id,
    )


async def outcome(call):
    """Ids, the last message, and the error that the call ended with."""
    ids, last = [], None
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            ids += [token.token for token in response.chunk.tokens]
            last = response
    except grpc.aio.AioRpcError as error:
        return ids, last, error
    return ids, last, None


async def started(call):
    """The call, once the server has said that it has begun."""
    assert (await call.read()).HasField("started")
    return call


def nothing_is_left(whole):
    """Whether no row, no queue entry and no byte of state remains."""
    pool = whole.engine._thread._batch._stepper._method._binding.cache_builder._pool
    return whole.jobs == 0 and not whole.engine._live and pool.nbytes == 0
