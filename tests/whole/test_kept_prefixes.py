"""Kept prefixes and predicted memory, as a client sees them."""

import pytest

from mlxstream import AsyncClient, OverloadedError
from tests.engine.models.tiny_llama import random_prompt
from tests.whole.conftest import serving

GREEDY = {"max_tokens": 8, "eos_token_ids": []}


async def answer(client, prompt, **options):
    found = await client.generate(prompt, **GREEDY, **options)
    assert found.started.cached_tokens == found.stats.cached_tokens
    return found.stats.cached_tokens, [token.token for token in found.tokens]


async def test_a_client_is_told_how_much_of_its_prompt_was_kept_and_can_stay_apart(client):
    prompt = random_prompt(1, 400)
    cold = await answer(client, prompt)
    assert cold[0] == 0
    assert await answer(client, prompt) == (399, cold[1])
    assert await answer(client, [*prompt, *cold[1], 5], cache_session_id="talk") == (
        407,
        (await answer(client, [*prompt, *cold[1], 5], cache={"bypass": True}))[1],
    )
    assert await answer(client, prompt, cache={"bypass": True}) == cold
    assert await answer(client, prompt, cache={"salt": "mine"}) == cold
    assert await answer(client, prompt, cache={"salt": "mine"}) == (399, cold[1])


async def test_a_load_that_is_said_to_fit_runs_and_one_that_is_not_is_refused(whole_folder, tmp_path):
    async with serving(whole_folder, tmp_path, state_bytes=10**6) as whole, AsyncClient(str(whole.address)) as client:
        most = (await client.estimate_memory(prompt_tokens=1)).max_context_tokens
        assert (await client.estimate_memory(prompt_tokens=most)).fits
        assert not (await client.estimate_memory(prompt_tokens=most + 1)).fits
        assert len((await answer(client, random_prompt(1, most - 8)))[1]) == 8
        with pytest.raises(OverloadedError, match="bytes of state"):
            await answer(client, random_prompt(1, most - 7))
