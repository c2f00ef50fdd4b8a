"""Durable generations that meet another server than they were made on: adapters, tokenizers, defaults, methods."""

import json

import pytest

from mlxstream import AsyncClient, FailedPreconditionError, UnsupportedError
from mlxstream.v1 import admin_pb2, admin_pb2_grpc
from mlxstream.v1.generation_pb2 import CompleteRequest
from tests.engine import tiny_denoiser, tiny_model
from tests.engine.adapters import tiny_adapters
from tests.whole.conftest import CONTEXT, serving
from tests.whole.durable_runs import LENGTH, asked, begun, life, ordinary, raw_stream, read

CUT_TOKENS = 30


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model's folder beside a folder of two adapters, which fit it alike."""
    root = tmp_path_factory.mktemp("adapted")
    for seed, name in enumerate("ab", 1):
        oracle = tiny_model.write(root / "tiny", max_position_embeddings=CONTEXT)
        tiny_adapters.write_mlx(root / "adapters" / name, tiny_adapters.adapt(oracle.model, seed=seed))
    tiny_model.write(root / "tiny", max_position_embeddings=CONTEXT)
    return root


async def refused(client, seen, name):
    with pytest.raises(FailedPreconditionError, match=f"it was made with other {name}$") as failure:
        await read(client.resume(seen.generation_id, after_sequence=seen.sequence))
    assert (failure.value.reason, failure.value.metadata["differences"]) == ("CHECKPOINT_MISMATCH", name)


async def test_an_adapter_that_is_gone_or_another_one_is_a_failed_precondition_until_it_is_back(adapted, tmp_path):
    """The same id with other bytes is another adapter; nothing of a generation is lost by a refusal."""
    request = {**asked("seeded"), "adapters": [{"id": "x"}]}
    mine = {"adapters": (("x", adapted / "adapters" / "a"),)}
    async with life(adapted / "tiny", tmp_path / "apart", **mine) as (_, client):
        expected = await read(client.stream(**ordinary(request)))
    seen = await begun(adapted / "tiny", tmp_path, request, CUT_TOKENS, **mine)
    async with life(adapted / "tiny", tmp_path, adapters_dir=adapted / "adapters") as (whole, client):
        admin = admin_pb2_grpc.AdminServiceStub(whole.channel)
        await refused(client, seen, "adapters")
        await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="x", source="b"))
        await refused(client, seen, "adapters")
        other = await read(raw_stream(client, request), 3)
        assert other.generation_id != seen.generation_id
        assert other.resumed_tokens == 0
    async with life(adapted / "tiny", tmp_path, adapters_dir=adapted / "adapters") as (whole, client):
        admin = admin_pb2_grpc.AdminServiceStub(whole.channel)
        await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="x", source="a"))
        await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="other", source="b"))
        seen = seen.then(await read(client.resume(seen.generation_id, after_sequence=seen.sequence)))
    assert (seen.ids, seen.text) == (expected.ids, expected.text)


async def test_an_adapter_that_leaves_while_nobody_reads_ends_nothing_for_good(adapted, tmp_path):
    request = {**asked("seeded"), "adapters": [{"id": "x"}]}
    settings = {"adapters_dir": adapted / "adapters", "grace_seconds": 0.0}
    async with life(adapted / "tiny", tmp_path, **settings) as (whole, client):
        admin = admin_pb2_grpc.AdminServiceStub(whole.channel)
        await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="x", source="a"))
        expected = await read(client.stream(**ordinary(request)))
        stream = raw_stream(client, request | {"max_tokens": 3000})
        seen = await read(stream, CUT_TOKENS)
        stream._reader._call.cancel()
        await admin.UnmountAdapter(admin_pb2.UnmountAdapterRequest(id="x"))  # waits for the row
        await refused(client, seen, "adapters")
        await admin.MountAdapter(admin_pb2.MountAdapterRequest(id="x", source="a"))
        rest = client.resume(seen.generation_id, after_sequence=seen.sequence, durable=False)
        seen = seen.then(await read(rest, LENGTH - len(seen.tokens)))
    assert seen.ids[:LENGTH] == expected.ids


def with_another_tokenizer(folder):
    """The very weights, and a tokenizer that cuts the same prompt alike but calls one token otherwise."""
    tiny_model.write(folder, max_position_embeddings=CONTEXT)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_start|>", "<|im_begin|>"))
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|im_start|>", "<|im_begin|>"))


def with_other_defaults(folder):
    """The very weights, and another temperature where the request does not say."""
    tiny_model.write(folder, max_position_embeddings=CONTEXT)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.5}))


@pytest.mark.parametrize(("change", "name"), [(with_another_tokenizer, "tokenizer"), (with_other_defaults, "defaults")])
async def test_the_same_weights_with_another_tokenizer_or_other_defaults_are_refused_by_name(
    whole_folder, tmp_path, change, name
):
    request = asked("greedy", seed=3)
    seen = await begun(whole_folder, tmp_path, request, CUT_TOKENS)
    change(tmp_path / "tiny")
    async with life(tmp_path / "tiny", tmp_path) as (_, client):
        await refused(client, seen, name)
        other = await read(raw_stream(client, request), 3)
        assert (other.generation_id != seen.generation_id, other.resumed_tokens) == (True, 0)
    async with life(whole_folder, tmp_path) as (_, client):
        expected = await read(client.stream(**ordinary(request)))
        seen = seen.then(await read(client.resume(seen.generation_id, after_sequence=seen.sequence)))
    assert (seen.ids, seen.text) == (expected.ids, expected.text)


async def test_a_model_that_denoises_refuses_durability_by_name_and_holds_nothing_for_it(whole_folder, tmp_path):
    """What an autoregressive model has left in the same folder stays for it."""
    seen = await begun(whole_folder, tmp_path, asked("greedy"), CUT_TOKENS)
    kept = sorted((tmp_path / "durable").iterdir())
    tiny_denoiser.write(tmp_path / "denoiser")
    refusal = r"delivery\.durable is not supported: a model that denoises blocks keeps no checkpoints"
    async with (
        serving(tmp_path / "denoiser", tmp_path) as whole,
        AsyncClient(str(whole.address), timeout_seconds=60) as client,
    ):
        with pytest.raises(UnsupportedError, match=refusal) as failure:
            await read(client.stream([20, 21, 22], durable=True, max_tokens=8))
        assert (failure.value.reason, failure.value.metadata["option"]) == ("UNSUPPORTED_OPTION", "delivery.durable")
        with pytest.raises(UnsupportedError, match=refusal):
            await read(client.resume(seen.generation_id, after_sequence=seen.sequence))
        with pytest.raises(Exception, match="keeps no checkpoints"):
            await whole.generation.Complete(CompleteRequest(tokens={"ids": [20, 21]}, delivery={"durable": True}))
        assert whole.jobs == 0
        assert sorted((tmp_path / "durable").iterdir()) == kept
        assert (await client.generate([20, 21, 22], max_tokens=8, seed=1)).stats.generated_tokens > 0
    async with life(whole_folder, tmp_path) as (_, client):
        rest = await read(client.resume(seen.generation_id, after_sequence=seen.sequence))
        assert len(seen.then(rest).tokens) == LENGTH
