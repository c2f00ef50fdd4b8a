"""An adapter that does not fit in every tensor is refused by the name of what is wrong, before a tensor is read."""

import json

import mlx.core as mx
import pytest

from engine.adapters.config import read_scale_rule
from engine.adapters.files import canonical_module, open_adapters
from engine.adapters.plan import plan_mount
from engine.contracts.adapters import AdapterTarget
from engine.contracts.errors import (
    ArtifactError,
    ConfigurationError,
    CorruptArtifactError,
    MismatchedArtifactError,
    MissingArtifactError,
    UnsupportedArtifactError,
)
from tests.engine.adapters import tiny_adapters

MODULES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"]
TARGETS = {module: AdapterTarget(module=module, in_features=16, out_features=8) for module in MODULES}
STORED = {f"{module}.weight" for module in (*MODULES, "lm_head", "model.embed_tokens")}


def tensors(modules=tuple(MODULES), rank=4, in_features=16, out_features=8):
    return {
        f"{module}.lora_{half}": mx.ones(shape)
        for module in modules
        for half, shape in (("a", (in_features, rank)), ("b", (rank, out_features)))
    }


def planned(folder):
    (files,) = open_adapters([("a", folder)])
    return plan_mount(files, TARGETS, STORED)


def test_both_layouts_are_read_alike(tmp_path):
    mlx = planned(tiny_adapters.write_mlx(tmp_path / "mlx", tensors()))
    peft = planned(tiny_adapters.write_peft(tmp_path / "peft", tensors()))
    assert [pair.stored.module for pair in mlx.pairs] == [pair.stored.module for pair in peft.pairs] == MODULES
    assert not any(pair.is_transposed for pair in mlx.pairs)
    assert all(pair.is_transposed for pair in peft.pairs)
    assert {pair.scale for pair in (*mlx.pairs, *peft.pairs)} == {tiny_adapters.SCALE}


def test_squares_that_fit_both_ways_are_read_as_they_are_spelled(tmp_path):
    targets = {"model.layers.0.m_proj": AdapterTarget(module="model.layers.0.m_proj", in_features=4, out_features=4)}
    square = tensors(tuple(targets), in_features=4, out_features=4)
    for write, is_transposed in ((tiny_adapters.write_mlx, False), (tiny_adapters.write_peft, True)):
        (files,) = open_adapters([("a", write(tmp_path / write.__name__, square))])
        (pair,) = plan_mount(files, targets, ()).pairs
        assert pair.is_transposed is is_transposed


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj",
        "layers.0.self_attn.q_proj",
        "base_model.model.model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.self_attn.q_proj",
        "base_model.model.language_model.model.layers.0.self_attn.q_proj",
        "base_model.model.model.language_model.layers.0.self_attn.q_proj",
    ],
)
def test_prefixes_of_tuners_are_stripped(name):
    assert canonical_module(name) == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({"lora_parameters": {"rank": 4, "scale": 1.5}}, 4, 1.5),
        ({"lora_parameters": {}}, 4, 20.0),
        ({"r": 4, "lora_alpha": 6}, 4, 1.5),
        ({"rank": 4, "alpha": 6}, 4, 1.5),
        ({}, 8, 2.0),
        ({"r": 4, "lora_alpha": 6, "use_rslora": True}, 4, 3.0),
        ({"lora_alpha": 6, "use_rslora": True}, 9, 2.0),
    ],
)
def test_the_strength_is_what_the_configuration_says(tmp_path, config, rank, scale):
    plan = planned(tiny_adapters.write(tmp_path / "a", tensors(rank=rank), config, "adapters.safetensors"))
    assert {pair.scale for pair in plan.pairs} == {scale}


def test_the_first_configuration_of_the_list_counts(tmp_path):
    folder = tiny_adapters.write_mlx(tmp_path / "a", tensors())
    (folder / "optiq_lora_config.json").write_text('{"lora_parameters": {"scale": 7}}')
    assert read_scale_rule(folder).scale == 7.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora asks for DoRA"),
        ({"fine_tune_type": "dora"}, "fine_tune_type is 'dora'"),
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 8}, "rank 4; the configuration states 8"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": 4, "lora_alpha": 0}, "lora_alpha must not be 0"),
        ({"r": 4, "lora_alpha": float("nan")}, "lora_alpha must be a finite number"),
        ({"lora_parameters": {"scale": 0}}, "scale must not be 0"),
        ({"lora_parameters": {"scale": 1e300}}, r"lora_parameters.scale must be from -3.40282e\+38 to 3.40282e\+38"),
        ({"r": 4, "lora_alpha": -1e39}, "lora_alpha must be from"),
        ({"lora_parameters": {"scale": "2"}}, "scale must be a finite number"),
        ({"lora_parameters": {"alpha": 16}}, "alpha and no scale"),
        ({"lora_parameters": {"rank": 2}}, "rank 4; the configuration states 2"),
    ],
)
def test_another_kind_or_a_bad_strength_is_refused_by_name(tmp_path, config, message):
    folder = tiny_adapters.write(tmp_path / "a", tensors(), config, "adapters.safetensors")
    with pytest.raises(ArtifactError, match=message) as refused:
        planned(folder)
    assert refused.value.file.startswith("a/") or "states" in message


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        (lambda t: t.pop(f"{MODULES[1]}.lora_b"), MissingArtifactError, f"missing are {MODULES[1]}.lora_b"),
        (lambda t: t.pop(f"{MODULES[1]}.lora_a"), MissingArtifactError, f"missing are {MODULES[1]}.lora_a"),
        (lambda t: t.update({"model.layers.0.x.weight": mx.ones((2,))}), UnsupportedArtifactError, "no half"),
        (lambda t: t.update({f"{MODULES[0]}.m": mx.ones((8,))}), UnsupportedArtifactError, "belongs to DoRA"),
        (
            lambda t: t.update({f"{MODULES[0]}.lora_magnitude_vector": mx.ones((8,))}),
            UnsupportedArtifactError,
            "belongs to DoRA",
        ),
        (lambda t: t.update({f"base_model.model.{MODULES[0]}.lora_A.weight": mx.ones((4, 16))}),
         CorruptArtifactError, "twice"),
        (lambda t: t.update(tensors(("model.layers.2.self_attn.q_proj",))),
         MismatchedArtifactError, "layers.2.*no such module"),
        (lambda t: t.update(tensors(("model.layers.0.self_attn.q_porj",))),
         MismatchedArtifactError, "q_porj.*no such module"),
        (lambda t: t.update({f"{MODULES[0]}.lora_a": mx.ones((15, 4))}), MismatchedArtifactError, "takes 16 to 8"),
        (lambda t: t.update({f"{MODULES[0]}.lora_a": mx.ones((16, 3))}), MismatchedArtifactError, "takes 16 to 8"),
        (lambda t: t.update({f"{MODULES[0]}.lora_a": mx.ones((16, 4), dtype=mx.int32)}),
         UnsupportedArtifactError, "holds I32"),
        (lambda t: t.update({f"{MODULES[0]}.lora_a": mx.ones((16,))}), MismatchedArtifactError, "matrices are needed"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(tmp_path, changed, kind, message):
    damaged = tensors()
    changed(damaged)
    with pytest.raises(kind, match=message):
        planned(tiny_adapters.write_mlx(tmp_path / "a", damaged))


def test_every_bad_pair_is_named_at_once(tmp_path):
    damaged = tensors(MODULES[:1]) | tensors(MODULES[1:3], in_features=5)
    with pytest.raises(MismatchedArtifactError) as refused:
        planned(tiny_adapters.write_mlx(tmp_path / "a", damaged))
    assert all(module in str(refused.value) for module in MODULES[1:3])
    assert MODULES[0] not in str(refused.value)


def test_modules_that_take_no_adapters_are_skipped_and_told(tmp_path):
    plan = planned(tiny_adapters.write_mlx(tmp_path / "a", tensors() | tensors(("lm_head", "model.embed_tokens"))))
    assert len(plan.pairs) == len(MODULES)
    assert sorted(plan.skipped) == sorted(tensors(("lm_head", "model.embed_tokens")))


def test_an_adapter_that_would_change_nothing_is_refused(tmp_path):
    with pytest.raises(MismatchedArtifactError, match=r"changes no projection of the model; skipped: lm_head.lora_a"):
        planned(tiny_adapters.write_mlx(tmp_path / "a", tensors(("lm_head",))))
    with pytest.raises(MissingArtifactError, match="no LoRA pair"):
        planned(tiny_adapters.write_mlx(tmp_path / "b", {}))


def test_a_revision_changes_with_the_bytes_and_with_the_strength_alone(tmp_path):
    def revision(name, values, **changes):
        return open_adapters([(name, tiny_adapters.write_mlx(tmp_path / name, values, **changes))])[0].revision

    first = revision("a", tensors())
    assert revision("b", tensors()) == first
    assert revision("c", tensors(), num_layers=9) == first
    assert len({first, revision("d", tensors(rank=2), rank=2), revision("e", tensors(), scale=2.0)}) == 3


def test_missing_and_cut_files_are_named(tmp_path):
    folder = tiny_adapters.write_mlx(tmp_path / "a", tensors())
    weights = folder / "adapters.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-3])
    with pytest.raises(CorruptArtifactError, match=r"^a/adapters.safetensors: "):
        planned(folder)
    weights.unlink()
    with pytest.raises(MissingArtifactError, match=r"^a: holds no weights"):
        planned(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(MissingArtifactError, match=r"^a: holds no configuration"):
        planned(folder)
    with pytest.raises(MissingArtifactError, match=r"^nowhere: is no folder"):
        planned(tmp_path / "nowhere")
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(CorruptArtifactError, match=r"^a/adapter_config.json: "):
        planned(folder)


@pytest.mark.parametrize("bad", ["", "a+b", "a,b", "a/b", "a b", "x" * 129, "a\n"])
def test_an_id_that_could_not_be_selected_is_refused(tmp_path, bad):
    with pytest.raises(ConfigurationError, match="1 to 128 letters"):
        open_adapters([(bad, tmp_path)])


def test_an_id_is_given_once(tmp_path):
    folder = tiny_adapters.write_mlx(tmp_path / "a", tensors())
    with pytest.raises(ConfigurationError, match="'a' is given twice"):
        open_adapters([("a", folder), ("a", folder)])
