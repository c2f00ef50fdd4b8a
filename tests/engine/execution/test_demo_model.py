"""The real model: SmolLM2-135M-Instruct from its GGUF file, against mlx-lm on the same float32 weights."""

import asyncio
import functools
import math

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from engine.artifacts.artifact import open_artifact
from engine.artifacts.weights import WeightStore, dense
from engine.contracts.graph import PackedSegment
from engine.contracts.prompt import ChatMessage, ChatPrompt, TextPart, TokenPrompt
from engine.contracts.results import FinishReason
from engine.execution.engine import Engine
from engine.execution.resident import EngineSettings
from tests.engine.execution import driving
from tests.engine.models import tiny_llama

pytestmark = pytest.mark.timeout(900)
run = functools.partial(driving.run, event_seconds=300)

PARAGRAPH = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed the stairs, cleaned the "
    "lamp, and wrote the weather into a heavy book. When the fog came in from the sea, the ships listened for the "
    "bell, and the bell rang until the morning. Nobody in the village could remember a night without it. "
)
PROMPT_TOKENS = (20, 45, 70, 96, 129, 180, 257, 350, 480, 700)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def oracle(demo_model_path):
    """mlx-lm's llama, holding the file's weights in float32."""
    artifact = open_artifact(demo_model_path)
    config = artifact.config
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            vocab_size=config.vocab_size,
            rope_theta=config.layer_ropes[0].theta,
            rope_traditional=True,
            tie_word_embeddings=True,
        )
    )
    store = WeightStore(artifact)
    model.load_weights([(name, dense(store.take(name))) for name in artifact.tensors if name.endswith("weight")])
    mx.eval(model.parameters())
    return model


def greedy(model, prompt, count):
    cache = make_prompt_cache(model)
    logits, ids = model(mx.array([prompt]), cache)[0, -1], []
    for _ in range(count):
        ids.append(mx.argmax(logits).item())
        logits = model(mx.array([[ids[-1]]]), cache)[0, -1]
    return ids


@pytest.fixture
async def engine(demo_model_path, tmp_path):
    engine = Engine(EngineSettings(model=str(demo_model_path), state_dir=tmp_path, device="cpu", max_rows=8))
    await engine.start()
    yield engine
    await engine.stop()


async def paragraph_ids(engine, count):
    ids = await engine.tokenize(PARAGRAPH * 12, model="", add_special_tokens=True, parse_special_tokens=True)
    assert len(ids) >= count
    return ids[:count]


async def test_greedy_ids_of_ten_prompts_equal_mlx_lms(engine, oracle):
    for count in PROMPT_TOKENS:
        prompt = (await paragraph_ids(engine, count + 7))[7:]
        _, ids, _, _ = await run(engine, TokenPrompt(tuple(prompt)), max_tokens=NEW_TOKENS, eos_token_ids=())
        assert ids == greedy(oracle, prompt, NEW_TOKENS), f"prompt of {count} tokens"


async def test_a_question_through_the_chat_template_is_answered(engine):
    chat = ChatPrompt(messages=(ChatMessage("user", (TextPart("What is the capital of France?"),)),))
    _, _, text, end = await run(engine, chat, max_tokens=40)
    assert text == "The capital of France is Paris."
    assert end.finish_reason is FinishReason.STOP


async def test_eight_seeded_streams_in_company_equal_each_alone(engine):
    prompt = await paragraph_ids(engine, 60)
    requests = [
        (
            TokenPrompt(tuple(prompt[: 12 + 6 * seed])),
            {"temperature": 0.8, "top_p": 0.95, "seed": seed, "max_tokens": 12},
        )
        for seed in range(8)
    ]
    alone = [(await run(engine, prompt, **options))[1] for prompt, options in requests]
    together = await asyncio.gather(*(run(engine, prompt, **options) for prompt, options in requests))
    assert [ids for _, ids, _, _ in together] == alone


async def test_perplexity_of_plain_english_is_low_and_logits_equal_mlx_lms(engine, oracle, demo_model_path):
    ids = (await paragraph_ids(engine, 100))[:75]
    binding = tiny_llama.bind(demo_model_path)
    hidden = binding.hidden(mx.array([ids], dtype=mx.uint32), [PackedSegment(len(ids), binding.make_cache())])
    logits = binding.project(hidden)[0]
    chosen = mx.take_along_axis(logits[:-1], mx.array(ids[1:])[:, None], 1)[:, 0]
    losses = mx.logsumexp(logits[:-1], axis=-1) - chosen
    assert 5 < math.exp(losses.mean().item()) < 30  # about 96 when rope rotates halves instead of neighbours
    assert mx.abs(logits - oracle(mx.array([ids]))[0]).max().item() < 1e-3


async def test_the_files_facts_are_told(engine):
    info = engine.model
    assert (info.geometry.layers, info.geometry.heads, info.geometry.kv_heads) == (30, 9, 3)
    assert info.stored_quantization == "Q4_1"
    assert info.composition.compute_dtype == "float32"
    assert 2 in info.eos_token_ids
    assert info.has_chat_template
