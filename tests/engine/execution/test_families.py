"""Families through the whole engine: streams in company, long and short, against mlx-lm's ids.

One for each way in which a family's rows are stored or scored; that each family's graph is right is shown with graphs.
"""

import asyncio

import pytest

from engine.contracts.prompt import TokenPrompt
from engine.execution.engine import Engine
from tests.engine import tiny_model
from tests.engine.execution.driving import run, settings, tokens
from tests.engine.models import tiny_families, tiny_llama


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("gemma2", 0),
        ("gemma3_text", 0),
        ("phi3", 0),
        ("olmo2", 0),
        ("qwen3_5", 0),
        ("qwen3_5", 5),
        ("mixtral", 0),
        ("qwen3_moe", 2),
        ("gemma4_text", 1),
        ("gemma4_text", 4),
    ],
)
async def test_streams_in_company_are_mlx_lms_greedy_ids(tmp_path, family, case):
    changes = list(tiny_families.FAMILIES[family].cases.values())[case]
    rows = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), tiny_model.VOCAB)
    config = tiny_families.config_of(family, {**changes, **rows})
    model = tiny_families.build(family, config)
    tiny_families.save(tmp_path / family, model, config)
    tiny_model.byte_tokenizer().save(str(tmp_path / family / "tokenizer.json"))
    engine = Engine(settings(tmp_path / family, tmp_path))
    await engine.start()
    try:
        prompts = [tokens(seed, length) for seed, length in ((1, 2), (2, 33), (3, 70))]
        found = await asyncio.gather(*(run(engine, prompt, max_tokens=24, eos_token_ids=()) for prompt in prompts))
    finally:
        await engine.stop()
    oracle = tiny_llama.Oracle(model)
    assert [ids for _, ids, _, _ in found] == [oracle.greedy(list(prompt.ids), 24) for prompt in prompts]


@pytest.mark.parametrize(("family", "case"), [("qwen3_5", 0), ("gemma4_text", 1)])
async def test_states_that_cannot_be_cut_are_begun_with_where_they_end(tmp_path, family, case):
    """A conversation goes on from its last state; a prompt that leaves it earlier is computed anew."""
    changes = list(tiny_families.FAMILIES[family].cases.values())[case]
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), tiny_model.VOCAB)
    config = tiny_families.config_of(family, {**changes, **sizes, "max_position_embeddings": 2048})
    model = tiny_families.build(family, config)
    tiny_families.save(tmp_path / family, model, config)
    tiny_model.byte_tokenizer().save(str(tmp_path / family / "tokenizer.json"))
    engine = Engine(settings(tmp_path / family, tmp_path, prefix_cache_bytes=10**9))
    first = tiny_llama.random_prompt(1, 400)
    prompts = [first, [*first, 5, 6, 7], [*first[:300], 9, 9], [*first, 5, 6, 7, *first[:40]]]
    await engine.start()
    try:
        found = [await run(engine, TokenPrompt(tuple(prompt)), max_tokens=8, eos_token_ids=()) for prompt in prompts]
    finally:
        await engine.stop()
    oracle = tiny_llama.Oracle(model)
    assert [ids for _, ids, _, _ in found] == [oracle.greedy(prompt, 8) for prompt in prompts]
    assert [started.cached_tokens > 0 for started, _, _, _ in found] == [False, True, False, True]
