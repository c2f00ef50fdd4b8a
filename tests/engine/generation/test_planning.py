"""What a request becomes: defaults in order, refusals by name, ids and lengths checked before admission."""

import dataclasses

import pytest

from engine.contracts.adapters import AdapterInfo
from engine.contracts.composition import COMPOSITION_DEFAULTS, Composition, PagedKvComposition
from engine.contracts.errors import InvalidRequestError, NotFoundError, PromptTooLongError, UnsupportedOptionError
from engine.contracts.graph import GraphDeclaration, GraphDescriptor, GraphGeometry
from engine.contracts.hlg import HlgOetf
from engine.contracts.kv_scheme import AffineKv
from engine.contracts.model import ModelInfo, RuntimeInfo
from engine.contracts.option_groups import (
    AdapterSelection,
    CacheOptions,
    Constraint,
    DenoisingOptions,
    SpeculationOptions,
)
from engine.contracts.options import GenerateOptions, OptionDefaults
from engine.generation.bindings.prefill_policy import FixedChunk
from engine.generation.planning import (
    check_prompt,
    refuse_for_autoregression,
    refuse_unavailable,
    resolve_execution,
    resolve_options,
    resolve_prefix,
)

VALUES = {
    "constraint": Constraint(kind="json_object"),
    "speculation": SpeculationOptions(draft_tokens=2),
    "fill": "echo",
}
OF_ANOTHER_METHOD = {"denoising": DenoisingOptions(max_denoising_steps=3)}
HONOURED = {
    "max_tokens": 3,
    "eos_token_ids": (1,),
    "stop_sequences": ("x",),
    "prefill_chunk_size": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens_to_keep": 2,
    "seed": 9,
    "hlg": HlgOetf(),
    "curve": ((1.0, 1.0), (50.0, 50.0)),
    "logit_bias": ((1, 2.0),),
    "repetition_penalty": 1.2,
    "repetition_context_size": 5,
    "presence_penalty": 0.5,
    "presence_context_size": 5,
    "frequency_penalty": -0.5,
    "frequency_context_size": 5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.3,
    "xtc_special_tokens": (1,),
    "logprobs": True,
    "top_logprobs": 3,
    "adapters": (AdapterSelection(id="a"), AdapterSelection(id="b", scale=0.5)),
}
SHARING = {"cache_session_id": "s", "cache": CacheOptions(bypass=True)}
KEEPING = {"checkpoint_every_tokens": 16}
"""Heard where a generation is durable; see `tests/engine/execution/test_durable_generations.py`."""


def adapter(name, revision="1"):
    return AdapterInfo(
        id=name,
        revision=revision,
        rank=4,
        scale=1.0,
        mounted_layers=1,
        applied_tensors=2,
        skipped_tensors=(),
        file_bytes=1,
        resident_bytes=1,
    )


def model(**changes):
    info = ModelInfo(
        name="tiny",
        fingerprint="f",
        model_type="llama",
        descriptor=GraphDescriptor(id="i", backend="mlx", graph_abi="g", state_abi="s", artifact="a"),
        declaration=GraphDeclaration(),
        geometry=GraphGeometry(
            vocab_size=100,
            hidden_size=8,
            layers=1,
            heads=1,
            kv_heads=1,
            head_dim=8,
            context_length=64,
            layer_types=("full_attention",),
        ),
        composition=COMPOSITION_DEFAULTS,
        runtime=RuntimeInfo(device="cpu", device_name="", mlx_version=""),
        eos_token_ids=(2, 3),
        bos_token_id=None,
        option_defaults=OptionDefaults(),
        weights_bytes=0,
        parameters=0,
        stored_quantization="",
        has_chat_template=False,
        load_seconds=0.0,
        adapters=(adapter("a"), adapter("b")),
    )
    return dataclasses.replace(info, **changes)


def resolve(options, *, prompt_tokens=4, info=None):
    return resolve_options(
        options, info or model(), FixedChunk(32), prompt_tokens=prompt_tokens, fresh_seed=77, line_break_ids=(10,)
    )


def test_every_option_is_either_honoured_or_refused():
    known = {*VALUES, *OF_ANOTHER_METHOD, *HONOURED, *SHARING, *KEEPING}
    assert known == {field.name for field in dataclasses.fields(GenerateOptions)}


def test_options_of_another_method_are_refused_by_name():
    refuse_for_autoregression(GenerateOptions())
    for name, value in OF_ANOTHER_METHOD.items():
        with pytest.raises(UnsupportedOptionError, match=f"^options.{name} is not supported: this model"):
            refuse_for_autoregression(GenerateOptions(**{name: value}))


@pytest.mark.parametrize("name", VALUES)
def test_an_option_that_is_not_offered_yet_is_refused_by_name(name):
    with pytest.raises(UnsupportedOptionError, match=f"^options.{name} is not supported") as caught:
        refuse_unavailable(GenerateOptions(**{name: VALUES[name]}))
    assert caught.value.option == f"options.{name}"


def test_every_honoured_option_changes_what_runs():
    plain = resolve(GenerateOptions())
    for name, value in HONOURED.items():
        asked = GenerateOptions(**{name: value})
        refuse_unavailable(asked)
        changed = resolve(asked)
        assert getattr(changed, name) == value
        assert changed != plain


def test_values_that_ask_for_nothing_are_accepted():
    refuse_unavailable(
        GenerateOptions(
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            xtc_probability=0.0,
            logprobs=False,
            top_logprobs=0,
            fill="off",
        )
    )


def test_defaults_are_the_callers_then_the_models_then_ours():
    info = model(option_defaults=OptionDefaults(temperature=0.6, top_k=40))
    resolved = resolve(GenerateOptions(top_k=3), info=info)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.6, 3, 0.0)
    assert resolve(GenerateOptions(temperature=0.0), info=info).temperature == 0.0
    assert resolve(GenerateOptions(), prompt_tokens=1).max_tokens == 63
    assert resolve(GenerateOptions()).eos_token_ids == (2, 3)


def test_xtc_protects_the_end_tokens_and_the_line_break_unless_told_otherwise():
    assert resolve(GenerateOptions()).xtc_special_tokens == (2, 3, 10)
    assert resolve(GenerateOptions(eos_token_ids=(7,))).xtc_special_tokens == (7, 10)
    assert resolve(GenerateOptions(xtc_special_tokens=(4,))).xtc_special_tokens == (4,)
    assert resolve(GenerateOptions(eos_token_ids=(7, 10, 7))).xtc_special_tokens == (7, 10)


def test_what_xtc_protects_by_default_can_be_asked_for_however_many_end_tokens_there_are():
    info = model()
    info = model(geometry=dataclasses.replace(info.geometry, vocab_size=5000))
    protected = resolve(GenerateOptions(eos_token_ids=tuple(range(100, 1124))), info=info).xtc_special_tokens
    assert len(protected) == 1025
    assert resolve(GenerateOptions(xtc_special_tokens=protected), info=info).xtc_special_tokens == protected


def test_the_threshold_of_xtc_is_a_tenth_unless_it_is_set():
    assert resolve(GenerateOptions(xtc_probability=1.0)).xtc_threshold == 0.1
    assert resolve(GenerateOptions(xtc_probability=1.0, xtc_threshold=0.0)).xtc_threshold == 0.0


def test_an_empty_eos_set_replaces_the_models():
    assert resolve(GenerateOptions(eos_token_ids=())).eos_token_ids == ()


def test_an_unset_seed_is_fresh_and_zero_is_a_seed():
    unset, zero = resolve(GenerateOptions()), resolve(GenerateOptions(seed=0))
    assert (unset.seed, unset.seed_was_explicit) == (77, False)
    assert (zero.seed, zero.seed_was_explicit) == (0, True)


def test_output_is_cut_to_the_room_that_the_context_leaves():
    assert resolve(GenerateOptions(max_tokens=100), prompt_tokens=60).max_tokens == 4


@pytest.mark.parametrize("length", [64, 65, 10_000])
def test_a_prompt_without_room_for_output_is_refused_with_both_numbers(length):
    with pytest.raises(PromptTooLongError, match=f"{length} tokens .* 64 tokens"):
        check_prompt([1] * length, vocab_size=100, context_length=64, field="prompt.text")


def test_a_prompt_one_short_of_the_context_is_accepted():
    check_prompt([1] * 63, vocab_size=100, context_length=64, field="prompt.text")


@pytest.mark.parametrize(
    ("ids", "position"), [([-1], 0), ([100], 0), ([2**31], 0), ([1, 2, 2**32 + 5, 3], 2), ([1, -1, 100], 1)]
)
def test_the_first_id_outside_the_vocabulary_is_named(ids, position):
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt(ids, vocab_size=100, context_length=64, field="prompt.tokens.ids")
    assert caught.value.violations[0].field == f"prompt.tokens.ids[{position}]"


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        check_prompt([], vocab_size=100, context_length=64, field="prompt.tokens.ids")


@pytest.mark.parametrize("token", [100, 2**31, 2**32 - 1])
def test_eos_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(InvalidRequestError, match=str(token)):
        resolve(GenerateOptions(eos_token_ids=(1, token)))


@pytest.mark.parametrize("token", [100, 2**31, 2**32 - 1])
def test_protected_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(InvalidRequestError, match=str(token)):
        resolve(GenerateOptions(xtc_special_tokens=(1, token)))


@pytest.mark.parametrize("token", [100, 999_999, 2**32 - 1])
def test_a_bias_of_an_id_outside_the_vocabulary_is_refused_with_the_id(token):
    with pytest.raises(InvalidRequestError, match=str(token)) as caught:
        resolve(GenerateOptions(logit_bias=((99, 1.0), (token, 5.0))))
    assert caught.value.violations[0].field == "options.logit_bias[1].token"


@pytest.mark.parametrize("tile", [None, 8])
def test_the_plan_tells_whether_company_can_change_a_rows_bits(tile):
    found = resolve_execution(Composition(row_tile_tokens=tile), GraphDeclaration(), prompt_cache=False)
    assert found.row_tile_tokens == tile


MOUNTED = (adapter("a"), adapter("b"))


def prefix_of(composition=COMPOSITION_DEFAULTS, *, store_is_on=True, adapters=MOUNTED, adapters_asked=(), **options):
    asked = GenerateOptions(adapters=tuple(adapters_asked), **options)
    refuse_unavailable(asked)
    info = model(composition=composition, adapters=adapters)
    return resolve_prefix(asked, resolve(asked, info=info), info, store_is_on=store_is_on)


def test_an_adapter_that_is_not_mounted_is_not_found_by_its_name():
    with pytest.raises(NotFoundError, match="no adapter named 'c'; known: a, b") as caught:
        resolve(GenerateOptions(adapters=(AdapterSelection(id="a"), AdapterSelection(id="c"))))
    assert (caught.value.kind, caught.value.name) == ("adapter", "c")


def test_every_set_of_adapters_has_a_namespace_of_its_own_and_so_has_a_new_file_under_an_old_name():
    sets = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]
    uses = [prefix_of(adapters_asked=[AdapterSelection(id=name) for name in names]) for names in sets]
    uses.append(prefix_of(adapters_asked=[AdapterSelection(id="a", scale=0.5)]))
    uses.append(prefix_of(adapters=(adapter("a", "2"),), adapters_asked=[AdapterSelection(id="a")]))
    assert len({use.namespace for use in uses}) == len(uses)
    assert prefix_of(adapters=()).namespace == prefix_of().namespace


def test_the_prefix_store_is_shared_unless_it_is_bypassed_or_off():
    assert prefix_of() == prefix_of(cache=CacheOptions(), temperature=1.0, seed=4, max_tokens=9)
    assert prefix_of(cache=CacheOptions(bypass=True)) is None
    assert prefix_of(store_is_on=False) is None
    assert not prefix_of().of_session
    assert prefix_of(cache_session_id="s").of_session
    assert prefix_of(cache_session_id="s").namespace == prefix_of().namespace


def test_a_salt_and_the_cuts_of_exact_rows_have_namespaces_of_their_own():
    exact = Composition(row_tile_tokens=8)
    uses = [
        prefix_of(),
        prefix_of(cache=CacheOptions(salt="a")),
        prefix_of(cache=CacheOptions(salt="b")),
        prefix_of(exact),
        prefix_of(exact, prefill_chunk_size=16),
    ]
    assert len({use.namespace for use in uses}) == len(uses)
    assert [use.cut_tokens for use in uses] == [1, 1, 1, 32, 16]
    assert "secret" not in prefix_of(cache=CacheOptions(salt="secret")).namespace


def test_states_that_are_quantized_after_a_first_chunk_are_shared_by_prompts_with_the_same_one():
    early, late = (Composition(kv=AffineKv(bits=4, start=start)) for start in (0, 99))
    uses = [prefix_of(early, prefill_chunk_size=16), prefix_of(early)]
    assert [use.least_tokens for use in uses] == [16, 32]
    assert uses[0].namespace != uses[1].namespace
    assert prefix_of(late, prefill_chunk_size=16) == prefix_of(late)
    assert prefix_of(late).least_tokens == 0


def test_how_keys_and_values_are_stored_is_told():
    assert resolve_execution(Composition(), GraphDeclaration(), prompt_cache=False).kv_storage == "bf16"
    quantized = Composition(kv=AffineKv(bits=4, group_size=32))
    assert resolve_execution(quantized, GraphDeclaration(), prompt_cache=False).kv_storage == "kv4-g32"
    paged = resolve_execution(Composition(paged_kv=PagedKvComposition()), GraphDeclaration(), prompt_cache=False)
    assert (paged.kv_storage, paged.paged_kv) == ("bf16-b256", True)
