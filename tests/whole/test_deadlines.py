"""A deadline holds wherever it finds the generation: in the queue, in its prompt, between its tokens."""

import grpc
import pytest

from mlxstream.v1 import delivery_pb2, generation_pb2, result_pb2
from tests.engine.execution.holding import held, held_after
from tests.waiting import until
from tests.whole.calls import nothing_is_left, outcome, request, started
from tests.whole.conftest import serving

CODE = grpc.StatusCode
PARTIAL = {"deadline_policy": delivery_pb2.DEADLINE_POLICY_PARTIAL_RESULT}
LONG_PROMPT = {"prompt": 3900, "max_tokens": 5, "prefill_chunk_size": 1}
SECONDS = 0.4
PARTIAL_SECONDS = 20.0


@pytest.fixture
async def narrow(whole_folder, tmp_path):
    """A server with one row, which a first generation holds, and what lets that one go on."""
    with held_after(3) as let_go:
        async with serving(whole_folder, tmp_path, max_rows=1) as whole:
            holder = await started(whole.generation.Generate(request(1, max_tokens=4000)))
            yield whole, let_go
            holder.cancel()


@pytest.mark.parametrize("delivery", [None, PARTIAL], ids=["fail", "partial"])
async def test_in_the_queue_there_is_no_result_under_any_policy(narrow, delivery):
    whole, let_go = narrow
    ids, last, error = await outcome(whole.generation.Generate(request(2, delivery=delivery), timeout=SECONDS))
    assert (ids, last, error.code()) == ([], None, CODE.DEADLINE_EXCEEDED)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await whole.generation.Complete(
            request(2, delivery=delivery, kind=generation_pb2.CompleteRequest), timeout=SECONDS
        )
    assert unary.value.code() is CODE.DEADLINE_EXCEEDED
    let_go.set()
    await until(lambda: whole.jobs == 1)


async def test_in_the_prompt_a_partial_result_is_an_account_without_tokens(whole, wide_margin):
    with held(lambda row: row.prefilled_tokens > 9):
        ids, last, error = await outcome(
            whole.generation.Generate(request(1, delivery=PARTIAL, **LONG_PROMPT), timeout=PARTIAL_SECONDS)
        )
    assert error is None
    assert ids == []
    assert last.finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE
    assert last.finished.stats.prompt_tokens == 3900
    await until(lambda: nothing_is_left(whole))


@pytest.mark.parametrize("shape", ["prompt", "tokens"])
async def test_without_a_partial_result_the_call_fails_and_its_row_is_free(whole, shape):
    asked = request(1, **LONG_PROMPT) if shape == "prompt" else request(1)
    with held_after(9):
        _, _, error = await outcome(whole.generation.Generate(asked, timeout=SECONDS))
        assert error.code() is CODE.DEADLINE_EXCEEDED
    await until(lambda: nothing_is_left(whole))


async def test_between_tokens_a_partial_result_is_what_there_is(whole, wide_margin):
    wanted, _, _ = await outcome(whole.generation.Generate(request(1, max_tokens=50)))
    with held_after(40):
        ids, last, error = await outcome(
            whole.generation.Generate(request(1, delivery=PARTIAL), timeout=PARTIAL_SECONDS)
        )
    assert error is None
    assert 0 < len(ids) < 50
    assert ids == wanted[: len(ids)]
    assert last.finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE
    assert last.finished.stats.generated_tokens == len(ids)
    with held_after(40):
        answer = await whole.generation.Complete(
            request(1, delivery=PARTIAL, kind=generation_pb2.CompleteRequest), timeout=PARTIAL_SECONDS
        )
    assert answer.finished.finish_reason == result_pb2.FINISH_REASON_DEADLINE
    assert [token.token for token in answer.tokens] == wanted[: len(answer.tokens)]
    await until(lambda: nothing_is_left(whole))
