"""Names of models, adapters and caches are names: none reaches a file, whatever it is made of."""

import asyncio
import sys
from contextlib import contextmanager

import grpc
import pytest

from mlxstream.v1 import generation_pb2, model_pb2
from tests.whole.calls import outcome, request
from tests.whole.conftest import serving

CODE = grpc.StatusCode
NAMES = (
    "../x",
    "/etc",
    "/etc/passwd",
    "/etc/none",
    "a/../../b",
    "..\\x",
    "a\0b",
    "%2e%2e/",
    ".",
    "..",
    "~",
    "x" * 5000,
)


class Files:
    """Paths that are opened while it watches. A hook of the interpreter cannot be taken off, so it falls silent."""

    def __init__(self):
        self.opened = []
        self.watching = False
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if self.watching and event in ("open", "os.listdir", "os.scandir"):
            self.opened.append(str(arguments[0]))

    @contextmanager
    def watched(self):
        self.opened.clear()
        self.watching = True
        try:
            yield self.opened
        finally:
            self.watching = False


@pytest.fixture(scope="module")
def files():
    return Files()


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_could_be_a_path_is_refused_and_opens_nothing(whole, files, name):
    await outcome(whole.generation.Generate(request(1, max_tokens=2)))  # everything that is imported late is there
    assert await asyncio.to_thread(whole.engine.durable_store.wait_idle, 60)  # the folder of its own has been tidied
    by_model, by_adapter = request(1, max_tokens=2), request(1, max_tokens=2, adapters=[{"id": name}])
    by_model.model = name
    with files.watched() as opened:
        for asked in (by_model, by_adapter):
            _, last, error = await outcome(whole.generation.Generate(asked))
            assert last is None
            assert error.code() in (CODE.NOT_FOUND, CODE.INVALID_ARGUMENT)
            assert "No such file" not in error.details()
        _, last, error = await outcome(whole.generation.Resume(generation_pb2.ResumeRequest(generation_id=name)))
        assert last is None
        assert error.code() in (CODE.NOT_FOUND, CODE.INVALID_ARGUMENT, CODE.UNIMPLEMENTED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await whole.models.GetModel(model_pb2.GetModelRequest(model=name))
        assert caught.value.code() in (CODE.NOT_FOUND, CODE.INVALID_ARGUMENT)
    assert opened == []


async def test_what_is_there_and_what_is_not_are_refused_in_the_same_words(whole):
    def words(name, error):
        return error.details().replace(name, "NAME")

    for build in (lambda name: {"adapters": [{"id": name}]}, lambda _name: {}):
        told = set()
        for name in ("/etc/passwd", "/etc/none"):
            asked = request(1, max_tokens=2, **build(name))
            asked.model = "" if build(name) else name
            _, _, error = await outcome(whole.generation.Generate(asked))
            told.add((error.code(), words(name, error)))
        assert len(told) == 1


async def test_salts_and_sessions_that_look_like_paths_stay_inside_the_folder_of_prefixes(whole_folder, tmp_path):
    home = tmp_path / "home"
    (home / "prefixes").mkdir(parents=True)
    async with serving(whole_folder, tmp_path / "state", prefix_cache_dir=home / "prefixes") as whole:
        for salt in ("../../escaped", "/tmp/escaped", "a\0b", ".."):
            asked = generation_pb2.GenerateRequest(
                tokens={"ids": [5] * 700}, options={"max_tokens": 2, "cache": {"salt": salt}}
            )
            _, _, error = await outcome(whole.generation.Generate(asked))
            assert error is None or error.code() is CODE.INVALID_ARGUMENT
    assert {path.name for path in home.iterdir()} == {"prefixes"}
    assert not list(tmp_path.rglob("*escaped*"))
    assert {path.name for path in tmp_path.iterdir()} == {"home", "state"}
