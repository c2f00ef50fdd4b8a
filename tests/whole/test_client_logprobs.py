"""Log-probabilities from the model to the Python client: the right numbers at the right tokens."""

import mlx.core as mx
import numpy as np
import pytest

import mlxstream
from tests.engine import tiny_model
from tests.engine.models.tiny_llama import random_prompt
from tests.whole.conftest import serving

PROMPT = random_prompt(4, 9)
ASKED = {
    "max_tokens": 14,
    "eos_token_ids": [],
    "temperature": 0.9,
    "top_p": 0.7,
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 4,
}


@pytest.fixture
async def served(tmp_path):
    """A client of a tiny model, and mlx-lm's model with the same weights."""
    oracle = tiny_model.write(tmp_path / "tiny")
    async with serving(tmp_path / "tiny", tmp_path) as whole, mlxstream.AsyncClient(str(whole.address)) as client:
        yield client, oracle


def oracle_logprobs(oracle, ids):
    """Log-probabilities [L, V] of the token that follows each of the ids."""
    logits = np.array(oracle.logits([*PROMPT, *ids]).astype(mx.float32)).astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return (logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))[len(PROMPT) - 1 :]


async def test_each_token_carries_the_log_probabilities_of_its_own_place(served):
    client, oracle = served
    result = await client.generate(PROMPT, **ASKED, delivery={"include_token_bytes": True})
    assert [token.index for token in result.tokens] == list(range(14))
    assert b"".join(token.text_bytes for token in result.tokens).decode(errors="replace") == result.text
    wanted = oracle_logprobs(oracle, result.token_ids)
    for row, token in zip(wanted, result.tokens, strict=False):
        assert token.logprobs.logprob == pytest.approx(row[token.token], abs=1e-4)
        best = np.argsort(-row)[:4].tolist()
        assert [one.token for one in token.logprobs.top[:4]] == best
        assert [one.logprob for one in token.logprobs.top[:4]] == pytest.approx(row[best].tolist(), abs=1e-4)
        assert {one.token: one.logprob for one in token.logprobs.top}[token.token] == token.logprobs.logprob


async def test_a_stream_and_a_finished_result_tell_the_same(served):
    client, _ = served
    result = await client.generate(PROMPT, **ASKED)
    events = [event async for event in client.stream(PROMPT, **ASKED).events()]
    assert [token for event in events for token in event.chunk.tokens] == list(result.tokens)


async def test_both_ways_of_asking_are_independent(served):
    client, _ = served
    chosen = await client.generate(PROMPT, **(ASKED | {"top_logprobs": None}))
    candidates = await client.generate(PROMPT, **(ASKED | {"logprobs": None}))
    neither = await client.generate(PROMPT, **(ASKED | {"logprobs": None, "top_logprobs": None}))
    assert chosen.token_ids == candidates.token_ids == neither.token_ids
    for one, other, silent in zip(chosen.tokens, candidates.tokens, neither.tokens, strict=True):
        assert one.logprobs.HasField("logprob")
        assert not one.logprobs.top
        assert not other.logprobs.HasField("logprob")
        assert len(other.logprobs.top) >= 4
        assert not silent.HasField("logprobs")
