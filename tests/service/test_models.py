"""ModelService: the model as it is, and its text layer."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from engine.contracts.errors import NotFoundError
from engine.execution.engine import EngineState
from mlxstream.v1 import generation_pb2, model_pb2
from service.revision import MINIMUM_CLIENT_REVISION, SCHEMA_REVISION
from tests.service.fake_engine import MODEL
from tests.service.harness import Serving, read_all, reason_of, text_request, violated_fields

CHAT = {"messages": [{"role": "system", "content": [{"text": "a"}]}, {"role": "user", "content": [{"text": "b"}]}]}
REQUESTS: dict[str, Any] = {
    "GetModel": model_pb2.GetModelRequest,
    "Tokenize": model_pb2.TokenizeRequest,
    "Detokenize": model_pb2.DetokenizeRequest,
    "RenderChat": lambda **fields: model_pb2.RenderChatRequest(chat=CHAT, **fields),
    "EstimateMemory": model_pb2.EstimateMemoryRequest,
}


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value


@pytest.mark.parametrize("name", ["", "tiny"])
async def test_get_model_describes_the_served_model(serving: Serving, name: str) -> None:
    answer = await serving.models.GetModel(model_pb2.GetModelRequest(model=name))
    assert answer.model.name == MODEL.name
    assert answer.model.context_length == 128
    assert answer.model.vocab_size == 64
    assert list(answer.model.eos_token_ids) == [2, 3]
    assert answer.model.bos_token_id == 1
    assert answer.model.runtime.blas == "openblas"
    assert answer.model.runtime.blas_optimized
    assert answer.model.option_defaults.temperature == 0.5
    assert not answer.model.option_defaults.HasField("top_p")
    assert answer.model.load_time.ToMilliseconds() == 250
    assert answer.schema_revision == SCHEMA_REVISION
    assert answer.minimum_client_revision == MINIMUM_CLIENT_REVISION
    assert answer.server_version


async def test_the_one_model_is_listed_on_one_page(serving: Serving) -> None:
    answer = await serving.models.ListModels(model_pb2.ListModelsRequest(page_size=1))
    assert [(model.name, model.state) for model in answer.models] == [("tiny", model_pb2.MODEL_STATE_READY)]
    assert answer.next_page_token == ""
    failure = await failure_of(serving.models.ListModels(model_pb2.ListModelsRequest(page_token="x")))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(failure) == ["page_token"]


@pytest.mark.parametrize("name", ["other", "TINY", "tiny ", "../tiny"])
@pytest.mark.parametrize("rpc", REQUESTS)
async def test_a_name_that_is_not_served_is_not_found_on_every_rpc(serving: Serving, rpc: str, name: str) -> None:
    failure = await failure_of(getattr(serving.models, rpc)(REQUESTS[rpc](model=name)))
    assert failure.code() is grpc.StatusCode.NOT_FOUND
    assert reason_of(failure) == "NOT_FOUND"


async def test_generate_passes_the_engines_word_on_an_unknown_model(serving: Serving) -> None:
    serving.engine.refusal = NotFoundError("model", "other")
    _, error = await read_all(serving.generation.Generate(text_request(model="other")))
    assert error is not None
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'other'" in error.details()


@pytest.mark.parametrize("rpc", REQUESTS)
async def test_everything_is_unavailable_while_the_model_loads(serving: Serving, rpc: str) -> None:
    serving.engine.state = EngineState.LOADING
    failure = await failure_of(getattr(serving.models, rpc)(REQUESTS[rpc]()))
    assert failure.code() is grpc.StatusCode.UNAVAILABLE
    complete = serving.generation.Complete(generation_pb2.CompleteRequest(text={"text": "hi"}))
    assert (await failure_of(complete)).code() is grpc.StatusCode.UNAVAILABLE


async def test_tokenize_adds_and_parses_special_tokens_unless_told_otherwise(serving: Serving) -> None:
    answer = await serving.models.Tokenize(model_pb2.TokenizeRequest(text="ab"))
    assert list(answer.ids) == [1, 1, 97, 98]
    assert answer.model == "tiny"
    plain = {"add_special_tokens": False, "parse_special_tokens": False}
    answer = await serving.models.Tokenize(model_pb2.TokenizeRequest(text="", **plain))
    assert list(answer.ids) == [0, 0]


async def test_detokenize_skips_special_tokens_unless_told_otherwise(serving: Serving) -> None:
    answer = await serving.models.Detokenize(model_pb2.DetokenizeRequest(ids=[5, 63]))
    assert answer.text == "[5, 63] True"
    answer = await serving.models.Detokenize(model_pb2.DetokenizeRequest(skip_special_tokens=False))
    assert answer.text == "[] False"


@pytest.mark.parametrize("bad", [64, 2**31, 2**32 - 1])
async def test_detokenize_names_the_first_id_outside_the_vocabulary(serving: Serving, bad: int) -> None:
    failure = await failure_of(serving.models.Detokenize(model_pb2.DetokenizeRequest(ids=[5, bad, bad])))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(failure) == ["ids[1]"]


async def test_render_chat_gives_the_prompt_and_its_ids(serving: Serving) -> None:
    answer = await serving.models.RenderChat(model_pb2.RenderChatRequest(chat=CHAT))
    assert (answer.text, list(answer.ids), answer.model) == ("system|user", [2], "tiny")
    failure = await failure_of(serving.models.RenderChat(model_pb2.RenderChatRequest()))
    assert violated_fields(failure) == ["chat.messages"]


async def test_a_memory_estimate_counts_every_row_and_says_whether_they_fit(serving: Serving) -> None:
    answer = await serving.models.EstimateMemory(model_pb2.EstimateMemoryRequest(prompt_tokens=30, max_tokens=10))
    assert (answer.weights_bytes, answer.kv_bytes, answer.workspace_bytes) == (1000, 40, 10)
    assert (answer.total_bytes, answer.budget_bytes, answer.fits) == (1050, 1110, True)
    assert answer.max_context_tokens == 77
    request = model_pb2.EstimateMemoryRequest(prompt_tokens=30, max_tokens=10, rows=3)
    answer = await serving.models.EstimateMemory(request)
    assert (answer.kv_bytes, answer.fits) == (120, False)
    most = 2**32 - 1
    request = model_pb2.EstimateMemoryRequest(prompt_tokens=most, max_tokens=most, rows=most)
    answer = await serving.models.EstimateMemory(request)
    assert (answer.kv_bytes, answer.total_bytes, answer.fits) == (2**64 - 1, 2**64 - 1, False)
    failure = await failure_of(serving.models.EstimateMemory(model_pb2.EstimateMemoryRequest(rows=0)))
    assert violated_fields(failure) == ["rows"]
