"""The whole product in one process: the real service over the real engine, serving a tiny model on a free port."""

import contextlib

import grpc
import pytest

from engine.execution.engine import Engine
from engine.execution.resident import EngineSettings
from mlxstream import AsyncClient
from mlxstream.v1 import generation_pb2_grpc, model_pb2_grpc
from service.address import Address
from service.durable.generations import DurableGenerations
from service.health import Health
from service.live import LiveGenerations
from service.offer import Offer
from service.server import bind, build_server
from tests.engine import tiny_model

CONTEXT = 4096


class Whole:
    """A server, its engine, and stubs on one channel."""

    def __init__(self, engine, channel, address, health):
        self.engine = engine
        self.channel = channel
        self.address = address
        self.health = health
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)

    @property
    def jobs(self):
        return len(self.engine._thread._batch) + len(self.engine._thread._incoming)


@contextlib.asynccontextmanager
async def serving(folder, state_dir, *, offer=None, grace_seconds=60.0, **changes):
    """Serve `folder`; `changes` are engine settings."""
    offer = offer or Offer()
    engine = Engine(EngineSettings(**({"model": str(folder), "state_dir": state_dir, "device": "cpu"} | changes)))
    live, health = LiveGenerations(), Health(offer.service_names)
    durable = DurableGenerations(engine, live, grace_seconds=grace_seconds)
    server = build_server(engine, live, health, durable, offer)
    address = bind(server, Address(host="127.0.0.1", port=0))
    await server.start()
    options = (("grpc.use_local_subchannel_pool", 1),)
    try:
        await engine.start()
        health.report(None)
        async with grpc.aio.insecure_channel(str(address), options=options) as channel:
            yield Whole(engine, channel, address, health)
    finally:
        health.close()
        await engine.stop()
        await live.wait_idle()
        durable.close()
        await server.stop(None)


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "tiny"
    tiny_model.write(folder, max_position_embeddings=CONTEXT)
    return folder


@pytest.fixture
async def whole(whole_folder, tmp_path):
    async with serving(whole_folder, tmp_path) as whole:
        yield whole


@pytest.fixture
async def client(whole):
    async with AsyncClient(str(whole.address)) as client:
        yield client
