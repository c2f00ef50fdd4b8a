"""A real K-quant file: Gemma 3 270M as Q4_K_M (Q4_K, Q5_0, Q6_K and Q8_0 in one), against mlx-lm on the same weights.

Off unless its file is named: `make test-gemma3` fetches it, 250 MB under Google's terms, and names it.
"""

import asyncio
import functools
import hashlib
from pathlib import Path

import gguf
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import EngineError
from engine.contracts.prompt import ChatMessage, ChatPrompt, TextPart, TextPrompt, TokenPrompt
from engine.execution.engine import Engine
from engine.execution.resident import EngineSettings
from tests.engine.execution import driving

pytestmark = pytest.mark.timeout(900)
run = functools.partial(driving.run, event_seconds=300)

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WINDOW = 512


@pytest.fixture(scope="module")
def path(request):
    named = request.config.getoption("--gemma3")
    if named is None:
        pytest.skip("no Gemma 3 file is named: make test-gemma3 fetches one")
    with Path(named).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return Path(named)


@pytest.fixture(scope="module")
def oracle(path):
    """mlx-lm's gemma3, holding what the gguf package makes of the file."""
    config = open_artifact(path).config
    model = gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            vocab_size=config.vocab_size,
            sliding_window=WINDOW,
            sliding_window_pattern=6,
            query_pre_attn_scalar=config.head_dim,
        )
    )
    canonical = {header.offset_bytes: name for name, header in open_artifact(path).tensors.items()}
    weights = []
    for tensor in gguf.GGUFReader(path).tensors:
        values = mx.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        name = canonical[int(tensor.data_offset)]
        weights.append((name, values - 1 if "norm" in name else values))
        mx.eval(weights[-1][1])
    model.load_weights(list(model.sanitize(dict(weights)).items()))
    mx.eval(model.parameters())
    return model


@pytest.fixture
async def engine(path, tmp_path):
    engine = Engine(EngineSettings(model=str(path), state_dir=tmp_path, device="cpu", max_rows=4))
    await engine.start()
    yield engine
    await engine.stop()


async def test_greedy_ids_equal_mlx_lms_within_the_window_and_beyond_it(engine, oracle):
    tale = "Once upon a time there was a small house by the sea. " * 60
    ids = await engine.tokenize(tale, model="", add_special_tokens=True, parse_special_tokens=True)
    prompts = [ids[:5], ids[:60], ids[: WINDOW + 40]]
    found = await asyncio.gather(
        *(run(engine, TokenPrompt(tuple(prompt)), max_tokens=12, eos_token_ids=()) for prompt in prompts)
    )
    for prompt, (_, own, _, _) in zip(prompts, found, strict=True):
        steps = generate_step(mx.array(prompt), oracle, max_tokens=12)
        assert own == [token for token, _ in steps], f"prompt of {len(prompt)} tokens"


async def test_text_becomes_the_published_ids_and_is_continued_with_sense(engine):
    prompt = "The capital of France is"
    ids = await engine.tokenize(prompt, model="", add_special_tokens=True, parse_special_tokens=True)
    assert ids == [2, 818, 5279, 529, 7001, 563]
    _, _, text, _ = await run(engine, TextPrompt(prompt), max_tokens=16)
    assert "France" in text


async def test_the_files_facts_are_told_and_a_base_model_has_no_conversation(engine):
    info = engine.model
    assert (info.model_type, info.geometry.layers, info.geometry.kv_heads) == ("gemma3", 18, 1)
    assert info.geometry.sliding_window == WINDOW
    assert info.parameters == 268_098_176
    assert not info.has_chat_template
    with pytest.raises(EngineError, match="template"):
        await run(engine, ChatPrompt(messages=(ChatMessage("user", (TextPart("Hello"),)),)))
