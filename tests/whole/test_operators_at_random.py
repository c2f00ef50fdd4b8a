"""What no operator would send, to the real engine: each request told apart, and the server as good as before."""

import grpc
import pytest

from engine.artifacts import catalogue
from engine.contracts.errors import MissingArtifactError
from mlxstream.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from service.offer import ADMIN_SERVICE
from tests.engine import tiny_model
from tests.engine.adapters import tiny_adapters
from tests.engine.models.tiny_llama import random_prompt
from tests.service.fuzzed_calls import send_fuzzed
from tests.whole.conftest import CONTEXT, serving

CODE = grpc.StatusCode
REQUESTS, MUTANTS_OF_EACH = 600, 14
ALLOWED = {
    CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION, CODE.RESOURCE_EXHAUSTED, CODE.UNAVAILABLE,
}  # fmt: skip


@pytest.fixture
def no_hub(monkeypatch):
    """Nothing is fetched from anywhere."""

    def pull(*_arguments, **_options):
        raise MissingArtifactError("the hub", "there is no such model")

    monkeypatch.setattr(catalogue, "pull", pull)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_hub")
async def test_an_engine_survives_whatever_operators_send_and_tells_each_request_apart(tmp_path):
    oracle = tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    tiny_adapters.write_mlx(tmp_path / "adapters" / "user", tiny_adapters.adapt(oracle.model))
    oracle = tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    methods = [method for method in ADMIN_SERVICE.methods if method.name != "Drain"]
    async with serving(tmp_path / "tiny", tmp_path / "state", adapters_dir=tmp_path / "adapters") as whole:
        seen = await send_fuzzed(methods, lambda _: whole.channel, requests=REQUESTS, mutants_of_each=MUTANTS_OF_EACH)
        assert {name for name, _ in seen} == {method.name for method in methods}
        assert {code for _, code in seen} <= ALLOWED, seen
        admin = admin_pb2_grpc.AdminServiceStub(whole.channel)
        [event async for event in admin.LoadModel(admin_pb2.LoadModelRequest())]
        asked = generation_pb2.GenerateRequest(
            tokens={"ids": random_prompt(1, 20)}, options={"max_tokens": 12, "eos_token_ids": {"ids": []}}
        )
        ids = [token.token async for response in whole.generation.Generate(asked) for token in response.chunk.tokens]
        assert ids == oracle.greedy(random_prompt(1, 20), 12)
        assert not whole.jobs
