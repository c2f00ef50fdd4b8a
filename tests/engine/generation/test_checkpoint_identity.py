"""Which requests continue each other: what changes the key, what must not, and vectors that may never move."""

import dataclasses
import math

import pytest

from engine.contracts.denoising import DenoisingPlan
from engine.contracts.execution import ResolvedExecution
from engine.contracts.hlg import HlgOetf, HlgParametric
from engine.contracts.option_groups import AdapterSelection
from engine.contracts.options import ResolvedOptions
from engine.generation.canonical_json import canonical_json
from engine.generation.checkpoint_identity import checkpoint_policy, generation_checkpoint_key

PROMPT = (3, 1, 2)
OPTIONS = ResolvedOptions(
    max_tokens=40,
    eos_token_ids=(0, 7),
    stop_sequences=("END", "\n\n"),
    prefill_chunk_size=64,
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    min_tokens_to_keep=1,
    seed=5,
    seed_was_explicit=True,
)
GIVEN = {
    "cache_namespace": "ns",
    "execution": ResolvedExecution(),
    "binding_identity": {"artifact": "f" * 8, "implementation": "llama", "stateAbi": "s", "codec": "c 1"},
}


def key(prompt=PROMPT, *, given=GIVEN, **changes):
    return generation_checkpoint_key(prompt, dataclasses.replace(OPTIONS, **changes), **given)


LISTED = {
    "version",
    "execution",
    "bindingIdentity",
    "stopSequences",
    "cacheNs",
    "promptIds",
    "maxTokens",
    "eosTokenIds",
    "temperature",
    "topP",
    "topK",
    "minP",
    "minTokensToKeep",
    "xtcProbability",
    "xtcThreshold",
    "xtcSpecialTokens",
    "seedMode",
    "seed",
    "hlg",
    "curve",
    "logitBias",
    "repetitionPenalty",
    "repetitionContextSize",
    "presencePenalty",
    "presenceContextSize",
    "frequencyPenalty",
    "frequencyContextSize",
}
"""Every field of the source document's version 5, and no other."""
CHANGES = {
    "max_tokens": 41,
    "eos_token_ids": (7, 0),
    "stop_sequences": ("\n\n", "END"),
    "temperature": 0.71,
    "top_p": 0.91,
    "top_k": 21,
    "min_p": 0.06,
    "min_tokens_to_keep": 2,
    "seed": 6,
    "seed_was_explicit": False,
    "logit_bias": ((4, 1.5),),
    "repetition_penalty": 1.1,
    "repetition_context_size": 21,
    "presence_penalty": 0.1,
    "presence_context_size": 21,
    "frequency_penalty": 0.1,
    "frequency_context_size": 21,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
    "xtc_special_tokens": (9,),
    "hlg": HlgOetf(),
    "curve": ((1.0, 1.0), (50.0, 50.0)),
}
UNHEARD = {"prefill_chunk_size": 32, "logprobs": True, "top_logprobs": 3, "adapters": (AdapterSelection(id="a"),)}
"""Adapters are heard through the namespace, which holds their revisions."""
REFUSED = {"denoising": DenoisingPlan(max_canvas_length=8, min_canvas_length=1)}
"""What decides tokens and is not in version 5: no key is made with it."""


def test_every_option_is_known_to_change_the_key_or_not():
    known = CHANGES.keys() | UNHEARD.keys() | REFUSED.keys()
    assert known == {field.name for field in dataclasses.fields(ResolvedOptions)}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_key_cannot_hold_gets_none(name):
    with pytest.raises(ValueError, match=name):
        key(**{name: REFUSED[name]})


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_decides_the_tokens_changes_the_key(name):
    assert key(**{name: CHANGES[name]}) != key()


def test_no_two_changes_have_one_key():
    keys = [key(), *(key(**{name: value}) for name, value in CHANGES.items())]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", UNHEARD)
def test_an_option_that_does_not_leaves_it(name):
    assert key(**{name: UNHEARD[name]}) == key()


@pytest.mark.parametrize("prompt", [(3, 1), (3, 2, 1), (3, 1, 2, 0), (31, 2)])
def test_the_prompt_is_heard_id_by_id(prompt):
    assert key(prompt) != key()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "denoising"),
        ("mechanism", "unsupported"),
        ("fill", True),
        ("compiled_decode", True),
        ("grammar_jump", True),
    ],
)
def test_how_it_is_computed_is_heard(field, value):
    execution = dataclasses.replace(ResolvedExecution(), **{field: value})
    assert key(given=GIVEN | {"execution": execution}) != key()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("paged_kv", True),
        ("kv_storage", "kv8"),
        ("prompt_cache", True),
        ("checkpoint", True),
        ("reasons", ("because",)),
        ("row_tile_tokens", 8),
    ],
)
def test_how_its_state_is_kept_is_not(field, value):
    execution = dataclasses.replace(ResolvedExecution(), **{field: value})
    assert key(given=GIVEN | {"execution": execution}) == key()


@pytest.mark.parametrize("part", ["artifact", "implementation", "stateAbi", "codec"])
def test_what_computes_it_is_heard(part):
    assert key(given=GIVEN | {"binding_identity": GIVEN["binding_identity"] | {part: "other"}}) != key()


def test_the_namespace_is_heard():
    assert key(given=GIVEN | {"cache_namespace": "other"}) != key()


def test_a_seed_that_the_server_chose_is_not_in_the_key():
    assert key(seed_was_explicit=False, seed=1) == key(seed_was_explicit=False, seed=2)
    assert key(seed=1) != key(seed=2)
    assert key(seed=5) != key(seed=5, seed_was_explicit=False)


def test_the_order_of_biases_and_the_kind_of_a_number_make_no_difference():
    assert key(logit_bias=((4, 1.5), (2, -1.0))) == key(logit_bias=((2, -1), (4, 1.5)))
    assert key(temperature=1) == key(temperature=1.0)
    assert key(frequency_penalty=-0.0) == key(frequency_penalty=0)


def test_the_key_is_made_of_exactly_the_fields_that_are_listed():
    full = dataclasses.replace(OPTIONS, **{name: CHANGES[name] for name in ("hlg", "logit_bias", "curve")})
    assert checkpoint_policy(PROMPT, full, **GIVEN).keys() == LISTED
    bare = checkpoint_policy(PROMPT, dataclasses.replace(OPTIONS, seed_was_explicit=False))
    assert bare.keys() == LISTED - {"execution", "bindingIdentity", "hlg", "curve", "logitBias", "seed"}
    assert bare["version"] == 5


def test_what_a_curve_leaves_unset_is_left_out():
    policy = checkpoint_policy(PROMPT, dataclasses.replace(OPTIONS, hlg=HlgParametric(shoulder=0.5)))
    assert policy["hlg"] == {
        "mode": "parametric",
        "shoulder": 0.5,
        "toe": 0.0,
        "pivot": "top",
        "pivot_offset": 0.0,
    }


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_a_number_that_is_none_has_no_key(name, number):
    """Options refuse it long before; see `tests/engine/contracts/test_options.py`."""
    with pytest.raises(ValueError, match="no number"):
        key(**{name: number})


def test_vectors_that_may_never_move():
    """Another form of these bytes loses every checkpoint that was written before it."""
    bare = checkpoint_policy((1,), dataclasses.replace(OPTIONS, stop_sequences=(), seed_was_explicit=False))
    assert canonical_json(bare) == (
        b'{"cacheNs":"","eosTokenIds":[0,7],"frequencyContextSize":20,"frequencyPenalty":0,"maxTokens":40,"minP":0.05,'
        b'"minTokensToKeep":1,"presenceContextSize":20,"presencePenalty":0,"promptIds":[1],"repetitionContextSize":20,'
        b'"repetitionPenalty":1,"seedMode":"server-default","stopSequences":[],"temperature":0.7,"topK":20,"topP":0.9,'
        b'"version":5,"xtcProbability":0,"xtcSpecialTokens":[],"xtcThreshold":0.1}'
    )
    assert key() == "b9082af0853d8c05bf6d57bf38e936f682e12f078cee80e3d7dd14e3a7f7755e"
