"""The tales' model: what is trained is what is served, and the shipped one makes sense."""

import json

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.tales import corpus, measure
from benchmarks.tales.batches import CUTS, Lessons, encoded
from benchmarks.tales.measure import Letters
from benchmarks.tales.network import Sizes, canvas_logits, initial_weights, soft_embeddings
from benchmarks.tales.vocabulary import CONTROL, END, VOCAB_SIZE, learn_tokenizer, write_tokenizer
from engine.artifacts.artifact import open_artifact
from engine.contracts.prompt import ChatMessage, ChatPrompt, TextPart
from engine.execution.text_model import open_text_model
from tests.engine.models.packed import relative_difference

MODEL = measure.MODEL


@pytest.fixture(scope="module")
def texts():
    return corpus.tales(300, seed=3)


@pytest.fixture(scope="module")
def tokenizer(texts):
    return learn_tokenizer(texts)


def test_the_network_that_is_trained_gives_the_logits_of_the_graph_that_is_served(tmp_path):
    sizes = Sizes(window=5)
    weights = initial_weights(sizes, seed=1)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(sizes.document()))
    graph = measure.open_graph(tmp_path)
    source = np.random.default_rng(5)
    prompts, canvases = (mx.array(source.integers(0, VOCAB_SIZE, (2, length))) for length in (9, 12))
    feedback = soft_embeddings(weights, sizes, mx.softmax(mx.random.normal((2, 12, VOCAB_SIZE)), axis=-1))
    for signal in (None, feedback):
        trained = canvas_logits(weights, sizes, prompts, canvases, signal)
        for row in range(2):
            state = graph.prefill(prompts[row : row + 1])
            served = graph.decoder_logits(
                canvases[row : row + 1], state, None if signal is None else signal[row : row + 1]
            )
            assert relative_difference(served[0], trained[row]) < 1e-4


def test_tales_are_different_and_those_of_some_pairs_are_never_learned():
    learned, held_out = corpus.tales(400, seed=1), corpus.tales(60, seed=1, held_out=True)
    assert len(set(learned)) == 400
    assert not set(learned) & set(held_out)
    assert corpus.tales(5, seed=2) == corpus.tales(5, seed=2) != corpus.tales(5, seed=3)


def test_no_piece_of_text_has_an_id_that_the_method_reserves(tokenizer, texts):
    assert {tokenizer.token_to_id(name) for name in CONTROL} == {0, 1, 2, 106}
    used = {id_ for text in texts for id_ in tokenizer.encode(text, add_special_tokens=False).ids}
    assert not used & set(CONTROL.values())
    assert max(used) < VOCAB_SIZE
    for text in (*texts[:20], "Ünïcödé bytes ☃ are kept"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_lesson_is_a_cut_tale_of_which_some_positions_are_noise(tokenizer, texts):
    rows = encoded(tokenizer, texts)
    lessons = Lessons(rows, canvas=64, vocab_size=VOCAB_SIZE, size=4, seed=1)
    batch = next(iter(lessons))
    cut = batch.prompt.shape[1]
    assert cut in CUTS
    whole = [tuple(row) for row in rows]
    for prompt, canvas in zip(batch.prompt, batch.canvas, strict=True):
        joined = (*prompt.tolist(), *canvas.tolist())
        assert any(joined[: len(row)] == row[: len(joined)] for row in whole)
    clean, noisy = (lessons.batch(rows[:4], 8, np.full((4, 1), share)) for share in (0.0, 1.0))
    assert (clean.noisy == clean.canvas).all()
    assert (noisy.noisy != noisy.canvas).mean() > 0.95
    assert (clean.canvas[:, -1] == END).sum() < 4


def test_letters_find_a_text_like_those_that_they_have_seen_likelier_than_another(texts):
    letters = Letters(texts[:100])
    assert letters.bits_per_byte(texts[150]) < 1.0 < letters.bits_per_byte("zq#%!vv kjh") / 4
    assert letters.bits_per_byte("") == 0.0


def test_written_text_files_are_read_by_the_product(tmp_path, tokenizer):
    write_tokenizer(tokenizer, tmp_path)
    sizes = Sizes()
    (tmp_path / "config.json").write_text(json.dumps(sizes.document()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), initial_weights(sizes, seed=1))
    text = open_text_model(open_artifact(tmp_path))
    ids = text.tokenizer.encode("Once there was", add_special_tokens=True, parse_special_tokens=True)
    chat = ChatPrompt(messages=(ChatMessage("user", (TextPart("Once there was"),)),))
    assert ids[0] == CONTROL["<bos>"] != ids[1]
    assert text.encode_chat(chat) == ("<bos>Once there was", ids)


@pytest.fixture(scope="module")
def shipped():
    return measure.open_graph(MODEL), Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_the_shipped_model_is_small_and_reserves_what_the_method_does(shipped):
    graph, tokenizer = shipped
    assert (MODEL / "model.safetensors").stat().st_size < 8e6
    assert (graph.graph_capabilities.method, graph.canvas_length) == ("denoising", 64)
    assert {tokenizer.token_to_id(name) for name in CONTROL} == {0, 1, 2, 106}


def test_the_shipped_model_tells_held_out_tales_far_better_than_an_untrained_one(shipped, tmp_path):
    graph, tokenizer = shipped
    texts = corpus.tales(4, seed=measure.HELD_OUT_SEED, held_out=True)
    untrained = measure.open_graph(measure.write_untrained(tmp_path / "untrained", MODEL))
    found, before = (measure.held_out_bits(one, tokenizer, texts) for one in (graph, untrained))
    assert found < before / 2


def test_the_shipped_model_denoises_text_that_looks_like_the_tales(shipped):
    graph, tokenizer = shipped
    letters = Letters(corpus.tales(300, seed=3))
    text = corpus.tales(1, seed=measure.HELD_OUT_SEED, held_out=True)[0]
    answer = measure.tell(graph, tokenizer, text, seed=1)
    noise = tokenizer.decode(np.random.default_rng(1).integers(3, VOCAB_SIZE, 60).tolist())
    assert len(answer.text) > 40
    assert letters.bits_per_byte(answer.text) < letters.bits_per_byte(noise) / 2
