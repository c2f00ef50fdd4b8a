"""Two replicas behind client-side balancing with health checking: one is drained and one killed under load."""

import asyncio
import contextlib

import grpc
import pytest

from mlxstream import AsyncClient, Durability, Resumption
from mlxstream.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.engine import tiny_model
from tests.engine.models.tiny_llama import random_prompt
from tests.waiting import PATIENCE_SECONDS, until
from tests.whole.replicas import Replica, balanced

pytestmark = pytest.mark.timeout(300)  # five processes begin here, on whatever else the machine does

CALLERS = 6
TOKENS = 60


def started(tmp_path, count, grace_seconds):
    """Replicas of one model over one state folder."""
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=4096)
    flags = ("--shutdown-grace-seconds", grace_seconds, "--shutdown-late-seconds", "0.3", "--max-rows", "8")
    replicas = [Replica(tmp_path / "tiny", tmp_path / "state", *flags) for _ in range(count)]
    for one in replicas:
        one.ready()
    return replicas


@pytest.fixture
def replicas(tmp_path):
    all_of_them = started(tmp_path, 2, "30")
    yield all_of_them
    for one in all_of_them:
        one.close()


@pytest.fixture
def hasty_replicas(tmp_path):
    """Three that let go of running streams soon."""
    all_of_them = started(tmp_path, 3, "0.2")
    yield all_of_them
    for one in all_of_them:
        one.close()


def request(seed, max_tokens=TOKENS):
    options = {"max_tokens": max_tokens, "eos_token_ids": {"ids": []}, "temperature": 0.9, "seed": seed}
    return generation_pb2.GenerateRequest(tokens={"ids": random_prompt(seed, 20)}, options=options)


class Load:
    """Callers who ask one thing after the other; what each got, and how it failed."""

    def __init__(self, channel):
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.answers = {}
        self.failures = []
        self.hosts = []
        self._ending = False

    async def caller(self, number):
        turn = 0
        while not self._ending:
            seed, turn = number + CALLERS * (turn % 3), turn + 1
            call = self.stub.Generate(request(seed), timeout=60)
            ids, finished = [], False
            try:
                async for response in call:
                    ids += [token.token for token in response.chunk.tokens]
                    finished |= response.HasField("finished") and not response.finished.HasField("error")
                assert finished, "a stream ended with OK and without its end"
                self.answers.setdefault(seed, set()).add(tuple(ids))
                self.hosts.append(call.peer() if hasattr(call, "peer") else "")
            except grpc.aio.AioRpcError as error:
                self.failures.append(error.code())

    @contextlib.asynccontextmanager
    async def running(self):
        tasks = [asyncio.create_task(self.caller(number)) for number in range(CALLERS)]
        try:
            yield self
        finally:
            self._ending = True
            await asyncio.gather(*tasks)

    async def more(self, count):
        """Wait for so many further answers."""
        wanted = len(self.hosts) + count
        await until(lambda: len(self.hosts) >= wanted)


async def generated(replica):
    """Tokens that this replica has generated."""
    async with grpc.aio.insecure_channel(replica.address) as channel:
        load = await admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest())
        return load.generated_tokens


async def has_generated(replica):
    """Wait until it has."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await generated(replica):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def test_draining_one_replica_loses_nothing_and_killing_one_is_never_a_clean_end(replicas):
    first, second = replicas
    async with balanced(replicas) as channel, Load(channel).running() as load:
        await load.more(2 * CALLERS)
        await has_generated(first)
        await has_generated(second)

        first.terminate()
        status, errors = await asyncio.to_thread(first.ended)
        assert (status, errors) == (0, "")
        await load.more(2 * CALLERS)
        assert load.failures == []

        first.start()
        await asyncio.to_thread(first.ready)
        await has_generated(first)

        second.kill()
        await load.more(2 * CALLERS)
        assert set(load.failures) <= {grpc.StatusCode.UNAVAILABLE}
        assert len(load.failures) <= CALLERS
    assert all(len(answers) == 1 for answers in load.answers.values())
    assert len(load.answers) >= CALLERS


async def test_no_durable_stream_is_lost_when_one_replica_is_drained_and_the_other_killed(hasty_replicas):
    first, second, _ = hasty_replicas
    options = {"max_tokens": 900, "eos_token_ids": [], "temperature": 0.9}
    async with AsyncClient([one.address for one in hasty_replicas], timeout_seconds=100) as client:
        wanted = {seed: (await client.generate(f"prompt {seed}", seed=seed, **options)).text for seed in range(4)}
        while not all([await generated(one) for one in hasty_replicas]):  # from now on each gets its share
            await client.generate("hello", max_tokens=1)
        told, texts = [], dict.fromkeys(wanted, "")

        async def follow(seed):
            durable = Durability(on_event=told.append)
            stream = client.stream(f"prompt {seed}", seed=seed, durable=durable, **options)
            async for text in stream:
                texts[seed] += text

        async def everybody_has(share):
            await until(lambda: all(len(texts[seed]) >= share * len(wanted[seed]) for seed in wanted))

        following = asyncio.gather(*(follow(seed) for seed in wanted))
        await everybody_has(0.05)
        second.kill()
        assert texts != wanted
        first.terminate()
        assert await asyncio.to_thread(first.ended) == (0, "")
        await following
    assert texts == wanted
    assert any(isinstance(event, Resumption) for event in told)
