"""Adapters that come and go while the model serves: right ids, whole or not at all, and no way out of the folder."""

import asyncio
import threading

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.errors import (
    ConfigurationError,
    EngineError,
    InvalidRequestError,
    MismatchedArtifactError,
    NotFoundError,
    UnsupportedArtifactError,
)
from engine.contracts.events import GenerationRequest
from engine.contracts.option_groups import AdapterSelection
from engine.contracts.options import GenerateOptions
from engine.execution import residency
from engine.execution.adapter_folders import adapter_folder
from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.adapters import tiny_adapters
from tests.engine.execution.driving import collect, run, settings, tokens
from tests.engine.execution.holding import held_after
from tests.engine.models import tiny_llama
from tests.waiting import until

OPTIONS = {"max_tokens": 12, "eos_token_ids": ()}
PROMPT = tokens(3, 40)


def selected(name):
    return (AdapterSelection(id=name),)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model, a folder of adapters a and b for it, one that does not fit, and mlx-lm's ids by adapter."""
    root = tmp_path_factory.mktemp("adapted")
    size = {"max_position_embeddings": 4096}
    ids = {"": tiny_model.write(root / "model", **size).greedy(list(PROMPT.ids), 12)}
    for seed, name in enumerate("ab", 1):
        oracle = tiny_model.write(root / "model", **size)
        tiny_adapters.write_mlx(root / "adapters" / name, tiny_adapters.adapt(oracle.model, seed=seed))
        ids[name] = oracle.greedy(list(PROMPT.ids), 12)
    other = tiny_llama.write(root / "other", hidden_size=32)
    tiny_adapters.write_mlx(root / "adapters" / "bad", tiny_adapters.adapt(other.model))
    return root, ids


@pytest.fixture
async def engine(adapted, tmp_path):
    root, _ = adapted
    engine = Engine(settings(root / "model", tmp_path, adapters_dir=root / "adapters"))
    await engine.start()
    yield engine
    await engine.stop()


async def test_an_adapter_mounted_while_a_stream_runs_serves_the_next_request_and_not_that_stream(adapted, engine):
    _, ids = adapted
    request = GenerationRequest(prompt=PROMPT, options=GenerateOptions(max_tokens=300, eos_token_ids=()))
    running = await engine.generate(request)
    info = await engine.mount_adapter("x", "a", model="")
    assert (info.id, info.mounted_layers) == ("x", 2)
    assert [one.id for one in engine.model.adapters] == ["x"]
    assert (await run(engine, PROMPT, adapters=selected("x"), **OPTIONS))[1] == ids["a"]
    assert (await run(engine, PROMPT, **OPTIONS))[1] == ids[""]
    assert (await collect(running))[1][:12] == ids[""]


async def test_mounting_the_same_bytes_again_is_no_change_and_other_bytes_need_another_name(adapted, engine):
    first = await engine.mount_adapter("x", "a", model="tiny" if engine.model.name == "tiny" else "")
    assert await engine.mount_adapter("x", "a", model="") == first
    with pytest.raises(ConfigurationError, match="'x' is mounted with other bytes"):
        await engine.mount_adapter("x", "b", model="")


async def test_unmounting_waits_for_those_who_use_it_and_refuses_new_ones_at_once(adapted, engine):
    _, ids = adapted
    info = await engine.mount_adapter("x", "a", model="")
    options = GenerateOptions(max_tokens=300, eos_token_ids=(), adapters=selected("x"))
    with held_after(2):
        user = await engine.generate(GenerationRequest(prompt=PROMPT, options=options))
        await user.next_event()
        unmounting = asyncio.create_task(engine.unmount_adapter("x", model=""))
        await until(lambda: not engine.model.adapters)
        with pytest.raises(NotFoundError, match="no adapter named 'x'"):
            await run(engine, PROMPT, adapters=selected("x"), **OPTIONS)
        assert not unmounting.done()
    assert (await run(engine, PROMPT, **OPTIONS))[1] == ids[""]
    assert (await collect(user))[1][:12] == ids["a"]
    assert await asyncio.wait_for(unmounting, 60) == info.resident_bytes
    assert engine.model.adapters == ()
    assert engine._thread._batch.stepper.adapters.sites.nbytes == 0


async def test_what_is_promised_to_rows_shrinks_and_grows_with_mounts(adapted, tmp_path):
    root, _ = adapted
    engine = Engine(settings(root / "model", tmp_path, adapters_dir=root / "adapters"))
    await engine.start()
    try:
        before = engine.load().state_limit_bytes
        info = await engine.mount_adapter("x", "a", model="")
        assert engine.load().state_limit_bytes == before - info.resident_bytes
        assert engine.load().prefix_limit_bytes == 0
        await engine.unmount_adapter("x", model="")
        assert before - info.resident_bytes < engine.load().state_limit_bytes <= before
    finally:
        await engine.stop()


async def test_room_that_comes_while_an_adapter_is_mounted_is_kept(adapted, tmp_path, monkeypatch):
    root, _ = adapted
    engine = Engine(settings(root / "model", tmp_path, adapters_dir=root / "adapters"))
    await engine.start()
    try:
        options = GenerateOptions(max_tokens=2000, eos_token_ids=())
        running = await engine.generate(GenerationRequest(prompt=PROMPT, options=options))
        await running.next_event()
        await engine.load_model("")
        before = engine.load().state_limit_bytes
        reading, go_on, real = asyncio.Event(), threading.Event(), residency.open_adapter
        loop = asyncio.get_running_loop()

        def slow(*arguments):
            loop.call_soon_threadsafe(reading.set)
            assert go_on.wait(60)
            return real(*arguments)

        monkeypatch.setattr(residency, "open_adapter", slow)
        mounting = asyncio.create_task(engine.mount_adapter("x", "a", model=""))
        await reading.wait()
        running.abort(AbortReason.REQUESTED)
        await asyncio.wait_for(asyncio.gather(*engine._residency._retirements), 60)
        assert engine.load().state_limit_bytes > before
        go_on.set()
        await mounting
        assert engine._residency.current.state_bytes == engine.load().state_limit_bytes
    finally:
        await engine.stop()


async def test_an_adapter_that_does_not_fit_changes_nothing(adapted, engine):
    _, ids = adapted
    with pytest.raises(MismatchedArtifactError, match="does not fit the model"):
        await engine.mount_adapter("x", "bad", model="")
    assert engine.model.adapters == ()
    assert (await run(engine, PROMPT, **OPTIONS))[1] == ids[""]


async def test_unmounting_what_is_not_mounted_names_what_is(engine):
    await engine.mount_adapter("x", "a", model="")
    with pytest.raises(NotFoundError, match="no adapter named 'y'; known: x"):
        await engine.unmount_adapter("y", model="")


async def test_without_a_directory_nothing_can_be_mounted(adapted, tmp_path):
    root, _ = adapted
    engine = Engine(settings(root / "model", tmp_path))
    await engine.start()
    try:
        with pytest.raises(ConfigurationError, match="adapters_dir: is not set"):
            await engine.mount_adapter("x", "a", model="")
    finally:
        await engine.stop()


@pytest.mark.parametrize("adapter_id", ["", "a/b", "a b", "x" * 129, "ä", "a\0"])
async def test_an_id_is_an_id(engine, adapter_id):
    with pytest.raises(InvalidRequestError, match="id"):
        await engine.mount_adapter(adapter_id, "a", model="")


@pytest.fixture
def directory(tmp_path):
    inside = tmp_path / "adapters"
    (inside / "good" / "deep").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "inner").symlink_to(inside / "good")
    (inside / "file").write_text("")
    return inside


HOSTILE = (
    "../secret", "/etc", "a/../../secret", "..\\secret", "a\0b", "", ".", "./good", "good/", "good//deep", "~", "~root",
    "good/..", "x" * 5000, "good\n", "/", "//good",
)  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE)
def test_a_source_that_could_reach_outside_is_refused_as_such(directory, source):
    with pytest.raises(InvalidRequestError, match="inside the adapter directory") as failure:
        adapter_folder(directory, source)
    assert str(directory) not in str(failure.value)


@pytest.mark.parametrize("source", ["link", "link/x", "missing", "loop", "file", "%2e%2e", "good/missing"])
def test_what_leads_outside_and_what_is_not_there_are_refused_in_the_same_words(directory, source):
    with pytest.raises(NotFoundError) as failure:
        adapter_folder(directory, source)
    assert str(failure.value) == f"no adapter folder named {source!r}"


@pytest.mark.parametrize(("source", "found"), [("good", "good"), ("good/deep", "good/deep"), ("inner", "good")])
def test_folders_inside_are_found_links_that_stay_inside_too(directory, source, found):
    assert adapter_folder(directory, source) == (directory / found).resolve()


@pytest.mark.parametrize("file", ["adapter_config.json", "optiq_lora_config.json", "adapters.safetensors"])
@pytest.mark.parametrize("target", ["secret/file", "missing"])
def test_a_file_that_is_a_link_to_outside_is_refused_whether_or_not_it_leads_anywhere(directory, file, target):
    (directory.parent / "secret" / "file").write_text("{}")
    (directory / "good" / file).symlink_to(directory.parent / target)
    with pytest.raises(UnsupportedArtifactError) as failure:
        adapter_folder(directory, "good")
    assert str(failure.value) == f"good/{file}: is a link to outside the adapter directory"


def test_a_file_that_is_a_link_within_the_directory_is_as_good_as_a_file(directory):
    (directory / "good" / "adapters.safetensors").symlink_to(directory / "file")
    assert adapter_folder(directory, "good") == directory.resolve() / "good"


async def test_no_mount_of_a_missing_folder_or_directory_tells_a_path(adapted, tmp_path):
    root, _ = adapted
    engine = Engine(settings(root / "model", tmp_path, adapters_dir=tmp_path / "gone"))
    await engine.start()
    try:
        with pytest.raises(EngineError) as failure:
            await engine.mount_adapter("x", "a", model="")
        assert str(tmp_path) not in str(failure.value)
    finally:
        await engine.stop()
