"""Rules that the schema states in words, each shown to hold, beside the words: a changed sentence fails its test."""

import json
import math
import re
from pathlib import Path

import mlx.core as mx
import pytest

from engine.contracts.hlg import HlgPipeline
from engine.sampling.sampler import sample
from mlxstream.v1 import generation_pb2, model_pb2, result_pb2
from tests.engine import tiny_model
from tests.engine.sampling.resolved import draw
from tests.service.harness import read_all, violated_fields
from tests.whole.conftest import serving

SCHEMA = Path(__file__).resolve().parents[2] / "proto" / "mlxstream" / "v1"
VOCAB = 12
A, B, C = 3, 7, 9
QUOTED = []


def states(*sentences):
    """Mark a test with what it shows."""

    def keep(test):
        QUOTED.extend((sentence, test.__name__) for sentence in sentences)
        return test

    return keep


def told_in_words():
    """All comments of the schema in one line each block."""
    return " ".join(
        re.sub(r"\n\s*//", "", path.read_text(encoding="utf-8").replace("\n  //", "\n//"))
        for path in sorted(SCHEMA.glob("*.proto"))
    )


def scores(**of):
    """Logits of one row: 0 but for the named tokens."""
    row = [0.0] * VOCAB
    for name, value in of.items():
        row[{"a": A, "b": B, "c": C}[name]] = value
    return row


def chosen(row, count=1, **options):
    """The ids of `count` draws from one row of logits, each at its own step."""
    rows = mx.array([row] * count)
    history = options.pop("history", ())
    read = sample(rows, [draw(step, history=history, **options) for step in range(count)]).read()
    return [token.token for token in read]


def told(row, **options):
    """The log-probabilities of one choice."""
    return sample(mx.array([row]), [draw(**options)]).read()[0].logprobs


def probabilities(*shares):
    """Logits whose first tokens have these probabilities, and the others none to speak of."""
    return [math.log(share) for share in shares] + [-100.0] * (VOCAB - len(shares))


# --- defaults


@states(
    "but `max_tokens`, `temperature`, `top_p`, `top_k` and `min_p` take the model's own where its files state one, "
    "which GetModel reports."
)
async def test_the_model_states_a_few_defaults_and_no_penalty(tmp_path):
    stated = {"max_new_tokens": 3, "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "do_sample": True}
    tiny_model.write(tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(stated | {"repetition_penalty": 1.5}))
    async with serving(tmp_path / "tiny", tmp_path) as whole:
        resolved = (await answer(whole, [1, 2])).started.options
        reported = (await whole.models.GetModel(model_pb2.GetModelRequest())).model.option_defaults
    told = {"max_tokens": 3} | {name: stated[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    assert {field.name: value for field, value in reported.ListFields()} == told
    assert {name: getattr(resolved, name) for name in told} == told
    assert resolved.repetition_penalty == 1


# --- scores and penalties


@states(
    "Its scores are changed by `logit_bias`, then by the penalties for repetition, presence and frequency, then by the "
    "constraint."
)
def test_bias_comes_before_repetition_and_repetition_before_presence():
    seen = {"history": (A,), "logit_bias": ((A, 100.0), (B, 90.0))}
    assert chosen(scores(), repetition_penalty=2.0, **seen) == [B]  # 100 / 2; the other way round 0 / 2 + 100
    seen = {"history": (A,), "logit_bias": ((A, 100.0), (B, 30.0))}
    assert chosen(scores(), repetition_penalty=2.0, presence_penalty=30.0, **seen) == [B]  # not (100 - 30) / 2


@states(
    "Divides the positive and multiplies the negative scores of tokens in its window, once however often they occur "
    "there.",
    "Subtracted once from the score of each token in its window; below 0 it encourages.",
    "Subtracted from a token's score once per occurrence in its window; below 0 it encourages.",
)
def test_only_the_frequency_penalty_counts_occurrences():
    seen = {"history": (A, A, A)}
    assert chosen(scores(a=100, b=90), repetition_penalty=1.05, **seen) == [A]
    assert chosen(scores(a=100, b=90), presence_penalty=6.0, **seen) == [A]
    assert chosen(scores(a=100, b=90), frequency_penalty=6.0, **seen) == [B]
    assert chosen([-1.0] * VOCAB, repetition_penalty=1.05, history=range(VOCAB - 1)) == [VOCAB - 1]
    assert chosen(scores(b=5), presence_penalty=-6.0, **seen) == [A]
    assert chosen(scores(b=5), frequency_penalty=-2.0, **seen) == [A]


@states(
    "so many newest tokens of the prompt and the completion taken together. 0 penalises nothing; more than there are "
    "means all of them. Default 20."
)
@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency"])
async def test_a_window_counts_prompt_and_completion_and_zero_sees_nothing(whole, kind):
    penalty = {f"{kind}_penalty": 1000.0}
    window = f"{kind}_context_size"
    lured = {"logit_bias": [{"token": A, "bias": 500}, {"token": B, "bias": 400}], "max_tokens": 2}
    fillers = [20 + index for index in range(19)]
    for ids, options, wanted in [
        ([A, *fillers], penalty, B),  # the twentieth is seen by default
        ([A, *fillers, 39], penalty, A),  # the one before it is not
        ([A, *fillers, 39], penalty | {window: 21}, B),
        ([A, *fillers, 39], penalty | {window: 2**32 - 1}, B),
        ([A, A, A, A], penalty | {window: 0}, A),
        ([1, 2, 4, 5], penalty, A),
    ]:
        found = await answer(whole, ids, **lured, **options)
        assert found.ids[0] == wanted, (ids, options)
    # The token that was generated first is in the window of the second, at the newest place.
    assert (await answer(whole, [1, 2, 4, 5], **lured, **penalty, **{window: 1})).ids == [A, B]
    assert (await answer(whole, [1, 2, 4, 5], **lured, **penalty, **{window: 0})).ids == [A, A]


# --- the choice


@states(
    "From 0; below 0.00001 the most likely token is taken, of equals the one with the lowest id, and `top_p`, `top_k`, "
    "`min_p`, XTC, `hlg` and `seed` have no effect.",
    "at temperature 0 the most likely token; `hlg`;",
    "It has no effect at temperature 0,",
)
@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-45, 9e-6])
def test_at_temperature_zero_only_scores_matter(temperature):
    row = scores(a=2, b=2, c=1)
    for options in (
        {},
        {"top_p": 0.01},
        {"top_k": 1},
        {"min_p": 1.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"hlg": HlgPipeline()},
        {"seed": 99},
    ):
        assert chosen(row, 20, temperature=temperature, **options) == [A] * 20
    assert len(set(chosen(row, 40, temperature=1e-5 + 2))) > 1


@states("0 and 1 mean off.")
def test_a_mass_of_zero_or_one_keeps_all():
    row = scores(a=2, b=1)
    plain = chosen(row, 60, temperature=1.0)
    assert chosen(row, 60, temperature=1.0, top_p=0.0) == chosen(row, 60, temperature=1.0, top_p=1.0) == plain
    assert set(chosen(row, 60, temperature=1.0, top_p=1e-9)) == {A}


@states("0 means off, as does the vocabulary size or more.")
def test_a_count_of_zero_or_of_the_vocabulary_keeps_all():
    row = scores(a=2, b=1)
    plain = chosen(row, 60, temperature=1.0)
    for count in (0, VOCAB, VOCAB + 1, 2**31 - 1, 2**32 - 1):
        assert chosen(row, 60, temperature=1.0, top_k=count) == plain
    assert set(chosen(row, 60, temperature=1.0, top_k=2)) == {A, B}


@states(
    "Keep tokens that are at least this probable relative to the most likely one.",
    "Tokens that `min_p` keeps in any case, most likely first.",
)
def test_min_p_keeps_what_is_near_the_best_and_its_minimum():
    row = probabilities(0.5, 0.3, 0.15, 0.05)
    assert set(chosen(row, 200, temperature=1.0, min_p=0.59)) == {0, 1}
    assert set(chosen(row, 200, temperature=1.0, min_p=0.61)) == {0}
    assert set(chosen(row, 200, temperature=1.0, min_p=0.61, min_tokens_to_keep=3)) == {0, 1, 2}


@states(
    "else a draw at `temperature` from what `top_p`, `min_p`, XTC and `top_k` leave, each working on what the one "
    "before it left.",
    "Probability above which a token counts as a top choice, among what `top_p` and `min_p` left.",
)
def test_filters_work_on_what_the_one_before_left():
    row = probabilities(0.5, 0.3, 0.1, 0.06, 0.04)
    drops = {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.35}
    assert 0 in chosen(row, 60, **drops)  # 0.3 alone is no top choice, so that none is dropped
    assert set(chosen(row, 60, top_p=0.8, **drops)) == {1}  # it is one among the two that are left
    assert set(chosen(row, 60, min_p=0.5, **drops)) == {1}
    assert set(chosen(row, 60, top_k=1, **(drops | {"xtc_threshold": 0.2}))) == {1}  # the best of what XTC left


@states(
    "Probability of dropping, at one position, all top choices (XTC) but the least likely.",
    "Where there are fewer than two top choices, none is dropped.",
)
def test_the_least_likely_top_choice_stays():
    always = {"temperature": 1.0, "xtc_probability": 1.0, "xtc_special_tokens": ()}
    assert set(chosen(probabilities(0.4, 0.35, 0.25), 60, **always)) == {2}
    assert 0 in chosen(probabilities(0.95, 0.05), 60, **always)


@states(
    "From 0 to 0.5; no effect while `xtc_probability` is 0. Default 0.1.",
    "Ids that XTC never drops, in place of the default ones; at most 2,048.",
    "Default: the end tokens and the line break.",
)
async def test_end_tokens_and_the_line_break_are_protected_by_default(whole):
    started = (await answer(whole, [1, 2], max_tokens=1)).started
    assert started.options.xtc_threshold == 0.1
    assert set(started.options.xtc_special_tokens) == {tiny_model.END_OF_TEXT, LINE_BREAK}
    started = (await answer(whole, [1, 2], max_tokens=1, xtc_special_tokens=[5])).started
    assert list(started.options.xtc_special_tokens) == [5]
    row = probabilities(0.6, 0.4)
    assert set(chosen(row, 40, temperature=1.0, xtc_probability=1.0, xtc_special_tokens=(0,))) == {0, 1}


@states("Refused beside `curve`.", "The curve (0, 0), (100, 100) changes nothing.")
async def test_a_curve_and_a_tone_curve_do_not_go_together(whole):
    options = {"curve": [{}, {"x_percent": 100, "y_percent": 100}], "hlg": {"oetf": {}}}
    _, error = await read_all(whole.generation.Generate(request([1, 2], **options)))
    assert violated_fields(error) == ["options.hlg"]
    row = scores(a=2, b=1)
    identity = ((0.0, 0.0), (100.0, 100.0))
    assert chosen(row, 60, curve=identity) == chosen(row, 60, temperature=1.0)


@states("Curve in place of `temperature` and of the filters, which are not applied, at temperature 0 too:")
def test_a_curve_draws_at_any_temperature():
    row = scores(a=2, b=1)
    points = ((0.0, 0.0), (100.0, 50.0))
    drawn = chosen(row, 40, curve=points, top_k=1, top_p=0.01)
    assert len(set(drawn)) > 1
    assert drawn == chosen(row, 40, curve=points, temperature=3.0)


@states("The whole range is valid, 0 too. Default: a fresh random seed, which `Started` reports.")
@pytest.mark.fresh_seeds
async def test_an_unset_seed_is_fresh_and_told(whole):
    drawn = {"temperature": 1.0, "max_tokens": 8, "eos_token_ids": {"ids": []}}
    runs = [await answer(whole, [1, 2], **drawn) for _ in range(3)]
    seeds = [run.started.options.seed for run in runs]
    assert len(set(seeds)) == 3
    assert [run.started.seed_was_explicit for run in runs] == [False] * 3
    assert (await answer(whole, [1, 2], **drawn, seed=seeds[0])).ids == runs[0].ids
    told = [(await answer(whole, [1, 2], **drawn, seed=seed)).ids for seed in (0, 2**32, 2**63, 2**64 - 1)]
    assert len({tuple(ids) for ids in told}) == 4


# --- log-probabilities


@states(
    "after bias, penalties and masks, before temperature, filters and curves, so that those change which token is "
    "chosen and not these numbers."
)
def test_log_probabilities_tell_the_scores_after_bias_and_before_temperature():
    row, asked = scores(a=2, b=1), {"logprobs": True, "top_logprobs": 3}
    plain = {one.token: one.logprob for one in told(row, **asked).top}
    for options in ({"temperature": 0.3}, {"temperature": 2.0, "top_k": 1}, {"temperature": 1.0, "hlg": HlgPipeline()}):
        found = {one.token: one.logprob for one in told(row, **asked, **options).top}
        assert {token: found[token] for token in (A, B)} == {token: plain[token] for token in (A, B)}
    biased = {one.token: one.logprob for one in told(row, **asked, logit_bias=((B, 1.0),)).top}
    assert biased[A] == pytest.approx(biased[B])
    penalised = {one.token: one.logprob for one in told(row, **asked, history=(A,), presence_penalty=1.0).top}
    assert penalised[A] == pytest.approx(penalised[B])


# --- ends


@states("Ids that end the completion; replaces the model's own set. Present but empty: no id ends it.")
async def test_end_tokens_are_replaced_and_may_be_none(whole):
    lured = {"logit_bias": [{"token": tiny_model.END_OF_TEXT, "bias": 1000}], "max_tokens": 4}
    assert (await answer(whole, [1, 2], **lured)).ids == []
    assert (await answer(whole, [1, 2], **lured, eos_token_ids={"ids": []})).ids == [tiny_model.END_OF_TEXT] * 4
    assert len((await answer(whole, [1, 2], **lured, eos_token_ids={"ids": [5]})).ids) == 4


@states("Most tokens to generate, a terminating end token included.", "End tokens are counted but never sent.")
async def test_the_end_token_counts(whole):
    lured = {"logit_bias": [{"token": tiny_model.END_OF_TEXT, "bias": 1000}]}
    ended = await answer(whole, [1, 2], **lured, max_tokens=1)
    assert (ended.ids, ended.finished.stats.generated_tokens) == ([], 1)
    assert ended.finished.finish_reason == result_pb2.FINISH_REASON_STOP


@states(
    "Texts that end the completion; the output holds exactly what precedes the earliest match.",
    "one that is given twice counts once.",
)
async def test_the_output_ends_before_the_earliest_stop(whole):
    plain = await answer(whole, [1, 2], max_tokens=30, eos_token_ids={"ids": []})
    stop = plain.text[4:6]
    for stops in ([stop], [stop, stop, plain.text[8:10]]):
        found = await answer(whole, [1, 2], max_tokens=30, eos_token_ids={"ids": []}, stop_sequences=stops)
        assert found.text == plain.text[: plain.text.index(stop)]
        assert found.finished.matched_stop == stop


class Answer:
    """What one call gave."""

    def __init__(self, responses):
        self.started = responses[0].started
        self.ids = [token.token for response in responses for token in response.chunk.tokens]
        self.text = "".join(response.chunk.text for response in responses)
        self.finished = responses[-1].finished


def request(ids, **options):
    return generation_pb2.GenerateRequest(tokens={"ids": ids}, options=options)


async def answer(whole, ids, **options):
    responses, error = await read_all(whole.generation.Generate(request(ids, **options)))
    assert error is None
    return Answer(responses)


LINE_BREAK = tiny_model.byte_tokenizer().encode("\n").ids[0]


@pytest.mark.parametrize(("sentence", "test"), QUOTED, ids=[sentence[:40] for sentence, _ in QUOTED])
def test_the_sentence_stands_in_the_schema(sentence, test):
    assert sentence in told_in_words(), test


def test_sentences_are_quoted():
    assert len(QUOTED) > 20
