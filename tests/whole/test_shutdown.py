"""SIGTERM as callers feel it: what can end does, what cannot is told, nobody new comes in, and idle servers leave."""

import time

import grpc
import pytest

from mlxstream.v1 import admin_pb2, admin_pb2_grpc, error_pb2, generation_pb2, generation_pb2_grpc
from tests.engine import tiny_model
from tests.engine.models.tiny_llama import random_prompt
from tests.waiting import PATIENCE_SECONDS
from tests.whole.replicas import Replica


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write(folder, max_position_embeddings=200_000)
    return folder


@pytest.fixture
def server(model, tmp_path):
    replica = Replica(
        model, tmp_path / "state", "--max-rows", "3", "--shutdown-late-seconds", "0.2", "--shutdown-grace-seconds", "5"
    )
    replica.ready()
    yield replica
    replica.close()


def stream(stub, max_tokens):
    request = generation_pb2.GenerateRequest(
        tokens={"ids": random_prompt(1, 10)}, options={"max_tokens": max_tokens, "eos_token_ids": {"ids": []}}
    )
    return stub.Generate(request, timeout=60)


def look_until(channel, condition):
    """Wait until the server says of its load what is waited for."""
    admin, latest = admin_pb2_grpc.AdminServiceStub(channel), time.monotonic() + PATIENCE_SECONDS
    while not condition(admin.GetLoad(admin_pb2.GetLoadRequest())):
        assert time.monotonic() < latest, "it never came to that"
        time.sleep(0.01)


def end_of(call):
    """The last message, and the status."""
    last = None
    try:
        for response in call:
            last = response
    except grpc.RpcError as error:
        return last, error.code()
    return last, grpc.StatusCode.OK


def test_short_streams_end_well_and_long_slow_and_queued_ones_are_told(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        short, long, slow = stream(stub, 100), stream(stub, 150_000), stream(stub, 150_000)
        for call in (short, long, slow):
            assert next(call).HasField("started")
        queued = [stream(stub, 150_000) for _ in range(2)]
        look_until(channel, lambda load: load.queued == 2)
        server.terminate()
        look_until(channel, lambda load: load.draining)
        late = stream(stub, 5)
        assert end_of(late) == (None, grpc.StatusCode.UNAVAILABLE)
        last, code = end_of(short)
        assert code is grpc.StatusCode.OK
        assert last.finished.stats.generated_tokens == 100
        for call in (long, slow):
            last, code = end_of(call)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert last.finished.error.reason == error_pb2.ERROR_REASON_UNAVAILABLE
            assert last.finished.stats.generated_tokens > 0
        assert {end_of(call)[1] for call in queued} == {grpc.StatusCode.UNAVAILABLE}
    assert server.ended() == (0, "")


def test_an_idle_server_does_not_wait_for_its_grace_and_a_second_signal_cuts_it(model, tmp_path):
    server = Replica(model, tmp_path / "state", "--shutdown-grace-seconds", "3600")
    server.ready()
    server.terminate()
    assert server.ended() == (0, "")
    server.start()
    server.ready()
    with grpc.insecure_channel(server.address) as channel:
        call = stream(generation_pb2_grpc.GenerationServiceStub(channel), 150_000)
        next(call)
        server.terminate()
        look_until(channel, lambda load: load.draining)
        server.terminate()
        assert end_of(call)[1] is grpc.StatusCode.UNAVAILABLE
    assert server.ended()[0] == 0


def test_a_killed_server_is_an_error_and_never_a_clean_end(server):
    with grpc.insecure_channel(server.address) as channel:
        call = stream(generation_pb2_grpc.GenerationServiceStub(channel), 150_000)
        next(call)
        server.kill()
        last, code = end_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert last is None or not last.HasField("finished")
