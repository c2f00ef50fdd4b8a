"""Bounds that only the engine can check: tokens of a prompt, time in the queue, and whose queue it is."""

from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from mlxstream.v1 import generation_pb2
from service.access import Access
from service.limits import RequestLimits
from service.offer import Offer
from service.tokens import followed_tokens
from tests.service.harness import details_of, reason_of, violated_fields
from tests.waiting import until
from tests.whole.calls import nothing_is_left, outcome, request
from tests.whole.conftest import serving

CODE = grpc.StatusCode
ONE, TWO = "token-of-the-first-team", "token-of-the-second-team"


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


async def test_a_prompt_over_the_operators_bound_is_refused_with_both_numbers(whole_folder, tmp_path):
    offer = Offer(limits=RequestLimits(max_prompt_tokens=20))
    async with serving(whole_folder, tmp_path, offer=offer) as whole:
        _, last, error = await outcome(whole.generation.Generate(request(1, prompt=21, max_tokens=3)))
        assert last is None
        assert (error.code(), reason_of(error)) == (CODE.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
        assert violated_fields(error) == ["tokens.ids"]
        assert error.details() == "tokens.ids: at most 20 tokens are allowed here, got 21"
        ids, _, error = await outcome(whole.generation.Generate(request(1, prompt=20, max_tokens=3)))
        assert (len(ids), error) == (3, None)


async def test_a_text_far_over_the_bound_is_refused_before_all_of_it_is_tokenized(whole_folder, tmp_path):
    offer = Offer(limits=RequestLimits(max_prompt_tokens=20))
    async with serving(whole_folder, tmp_path, offer=offer) as whole:
        text = generation_pb2.GenerateRequest(text={"text": "a b c " * 500_000})
        _, _, error = await outcome(whole.generation.Generate(text))
        assert reason_of(error) == "PROMPT_TOO_LONG"
        told = dict(details_of(error)[error_details_pb2.ErrorInfo].metadata)
        assert told["context_length"] == "20"
        assert 20 < int(told["prompt_tokens"]) < 500_000


@pytest.mark.parametrize("kind", [generation_pb2.GenerateRequest, generation_pb2.CompleteRequest])
async def test_who_has_waited_as_long_as_anybody_may_is_told_when_to_come_back(whole_folder, tmp_path, kind):
    async with serving(whole_folder, tmp_path, max_rows=1, max_queue_seconds=0.2) as whole:
        holder = whole.generation.Generate(request(1, max_tokens=4000))
        assert (await holder.read()).HasField("started")
        asked = request(2, max_tokens=3, kind=kind)
        if kind is generation_pb2.GenerateRequest:
            _, last, error = await outcome(whole.generation.Generate(asked))
            assert last is None
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await whole.generation.Complete(asked)
            error = caught.value
        assert (error.code(), reason_of(error)) == (CODE.RESOURCE_EXHAUSTED, "OVERLOADED")
        details = details_of(error)
        assert details[error_details_pb2.ErrorInfo].metadata["resource"] == "the time in the queue"
        assert details[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() > 0
        holder.cancel()
        await until(lambda: nothing_is_left(whole))
        ids, _, error = await outcome(whole.generation.Generate(request(2, max_tokens=3)))
        assert (len(ids), error) == (3, None)


async def test_one_callers_names_are_not_anothers(whole_folder, tmp_path):
    tokens = Path(tmp_path) / "tokens.toml"
    tokens.write_text(f'[one]\ntoken = "{ONE}"\n[two]\ntoken = "{TWO}"\n')
    offer = Offer(access=Access(followed_tokens(tokens)))
    async with serving(whole_folder, tmp_path / "state", offer=offer) as whole:
        mine = whole.generation.Generate(request(1, max_tokens=4000, request_id="same"), metadata=bearer(ONE))
        theirs = whole.generation.Generate(request(2, max_tokens=300, request_id="same"), metadata=bearer(TWO))
        started = (await mine.read()).started
        again = whole.generation.Generate(request(3, request_id="same"), metadata=bearer(ONE))
        assert await again.code() is CODE.ALREADY_EXISTS
        for target in ({"request_id": "other"}, {"generation_id": started.generation_id}):
            answer = await whole.generation.Abort(generation_pb2.AbortRequest(**target), metadata=bearer(TWO))
            assert answer.status == generation_pb2.ABORT_STATUS_NOT_RUNNING
        answer = await whole.generation.Abort(generation_pb2.AbortRequest(request_id="same"), metadata=bearer(ONE))
        assert answer.status == generation_pb2.ABORT_STATUS_ABORTED
        assert (await outcome(mine))[2].code() is CODE.CANCELLED
        ids, _, error = await outcome(theirs)
        assert (len(ids), error) == (300, None)
