"""Adapters as callers meet them: chosen by request, in company, over the network; and refused by name."""

import asyncio

import pytest

from mlxstream import AsyncClient, NotFoundError
from tests.engine import tiny_model
from tests.engine.adapters import tiny_adapters
from tests.whole.conftest import serving

PROMPT = [5 + 7 * place % 200 for place in range(40)]
TOKENS = 12


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model's folder, those of its adapters a and b, and mlx-lm's own ids for each and for neither."""
    root = tmp_path_factory.mktemp("adapted")
    ids = {(): tiny_model.write(root / "model").greedy(PROMPT, TOKENS)}
    for seed, (name, write) in enumerate({"a": tiny_adapters.write_mlx, "b": tiny_adapters.write_peft}.items(), 1):
        oracle = tiny_model.write(root / "model")
        write(root / name, tiny_adapters.adapt(oracle.model, seed=seed))
        ids[name,] = oracle.greedy(PROMPT, TOKENS)
    assert len({tuple(found) for found in ids.values()}) == 3
    return root, ids


async def answered(client, *names, **selection):
    adapters = [{"id": name} | selection for name in names]
    found = await client.generate(PROMPT, max_tokens=TOKENS, eos_token_ids=[], adapters=adapters)
    assert [one.id for one in found.started.options.adapters] == list(names)
    return [token.token for token in found.tokens]


async def test_callers_choose_adapters_by_request_and_share_the_engine(adapted, tmp_path):
    root, ids = adapted
    adapters = tuple((name, root / name) for name in "ab")
    async with (
        serving(root / "model", tmp_path, adapters=adapters) as whole,
        AsyncClient(str(whole.address)) as client,
    ):
        wanted = [(), ("a",), ("b",), ("a",), (), ("b",)]
        found = await asyncio.gather(*(answered(client, *names) for names in wanted))
        assert found == [ids[names] for names in wanted]
        assert await answered(client, "a", scale=0.0) == ids[()]
        stacked = await answered(client, "a", "b")
        assert stacked not in ids.values()
        assert await answered(client, "a", "b") == stacked
        with pytest.raises(NotFoundError, match="'c'"):
            await answered(client, "a", "c")
        assert await answered(client, "b") == ids["b",]
        assert whole.jobs == 0
