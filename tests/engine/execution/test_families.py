"""Families through the whole engine: streams in company, long and short, against mlx-lm's ids.

One for each way in which a family's rows are stored or scored; that each family's graph is right is shown with graphs.
"""

import asyncio

import pytest

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
