"""Whatever is wrong with a model's files: a refusal of ours that names the file, or a model that makes sense."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.artifacts.artifact import open_artifact
from engine.artifacts.huggingface import model_config
from engine.artifacts.weights import WeightStore
from engine.contracts.errors import ArtifactError
from tests.engine.artifacts.test_weights import FOUR_BITS, quantized
from tests.engine.artifacts.tiny_files import CONFIG, llama_tensors, write_folder, write_index, write_shards
from tests.engine.models import tiny_foreign
from tests.engine.models.tiny_families import FAMILIES

# Of every kind that a field may not have, and numbers at the edges of what it may.
VALUES = [None, True, False, 0, 1, 2, 3, -1, 7, 2**31, 2**70, 0.5, -0.5, float("nan"), float("inf"), "", "llama", "x"]
VALUES += [[], [1], [0, 1], ["full_attention"] * 2, ["x"], {}, {"type": "yarn"}, {"rope_type": "longrope"}, {"bits": 4}]
EXTRA = ["rope_scaling", "rope_parameters", "quantization", "layer_types", "sliding_window", "head_dim", "text_config"]
EXTRA += [
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "attention_bias",
    "partial_rotary_factor",
    "rope_theta",
]


def outcome(call, *arguments):
    """What `call` returns, and the text of our refusal where it has one; nothing else may be raised."""
    try:
        return call(*arguments), None
    except ArtifactError as error:
        return None, str(error)


def require_sense(config):
    geometry = config.geometry()
    assert geometry.layers >= 1
    assert geometry.heads % geometry.kv_heads == 0
    assert len(geometry.layer_types) == geometry.layers
    assert all(0 <= token < geometry.vocab_size for token in config.eos_token_ids)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_configuration_of_any_family_escapes_as_anything_but_our_errors(family, data):
    plain = {"model_type": family} | FAMILIES[family].plain
    require_sense(model_config(plain))
    fields = st.sampled_from(sorted({*plain, *EXTRA}))
    changes = data.draw(st.dictionaries(fields, st.sampled_from(VALUES), min_size=1, max_size=2))
    config, refused = outcome(model_config, plain | changes)
    if refused is None:
        require_sense(config)
    else:
        assert refused.startswith("config.json: ")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_folder(folder / "plain")
    packed = quantized(llama_tensors(), {}, FOUR_BITS)
    write_folder(folder / "packed", packed, config={"quantization": FOUR_BITS})
    tiny_foreign.write(folder / "foreign", tiny_foreign.STABLELM)
    return folder


@pytest.mark.parametrize("kind", ["plain", "packed", "foreign"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_configuration_of_a_folder_escapes_as_anything_but_our_errors(folders, kind, data):
    path = folders / kind / "config.json"
    whole = path.read_text()
    stated = json.loads(whole)
    fields = st.sampled_from(sorted({*stated, *EXTRA}))
    changes = data.draw(st.dictionaries(fields, st.sampled_from(VALUES), min_size=1, max_size=2))
    path.write_text(json.dumps(stated | changes))
    try:
        artifact, refused = outcome(open_artifact, folders / kind)
    finally:
        path.write_text(whole)
    if refused is None:
        assert artifact.parameters > 0
        assert kind == "foreign" or require_sense(artifact.config) is None
    else:
        assert refused.startswith((f"{kind}/", f"{kind}: "))
        assert str(folders) not in refused


def load(folder):
    """Take what a llama takes, and audit."""
    artifact = open_artifact(folder)
    store = WeightStore(artifact)
    for known in NAMES:
        store.take(known)
    store.audit()
    return artifact


NAMES = sorted(llama_tensors())


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    damage=st.sampled_from(["gone", "renamed", "transposed", "longer", "flat", "whole numbers", "half", "doubled"]),
)
def test_no_damage_to_a_tensor_is_loaded(tmp_path_factory, name, damage):
    folder = tmp_path_factory.mktemp("damaged") / "m"
    tensors = llama_tensors()
    values = tensors.pop(name)
    changed = {
        "gone": {},
        "renamed": {f"{name}x": values},
        "transposed": {name: np.ascontiguousarray(values.T)},
        "longer": {name: np.concatenate([values, values])},
        "flat": {name: values.reshape(-1, 1)},
        "whole numbers": {name: values.astype(np.int32)},
        "half": {name: values.astype(np.float16)},
        "doubled": {name: values, f"{name}.again": values},
    }[damage]
    write_folder(folder, tensors | changed)
    harmless = damage == "half" or (damage == "transposed" and values.shape == values.T.shape)
    _, refused = outcome(load, folder)
    assert (refused is None) is harmless
    if refused is not None:
        assert name.removesuffix(".weight") in refused
        assert str(folder) not in refused


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_disagreement_between_index_and_shards_is_loaded(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("sharded") / "m"
    write_folder(folder, {})
    (folder / "model.safetensors").unlink()
    weight_map = write_shards(folder, llama_tensors())
    shards = sorted(set(weight_map.values()))
    name = data.draw(st.sampled_from(sorted(weight_map)))
    damage = data.draw(st.sampled_from(["moved", "unknown", "gone", "outside", "twice", "emptied"]))
    if damage == "moved":
        write_index(folder, weight_map | {name: next(shard for shard in shards if shard != weight_map[name])})
    elif damage == "unknown":
        write_index(folder, weight_map | {"model.more.weight": weight_map[name]})
    elif damage == "gone":
        (folder / weight_map[name]).unlink()
    elif damage == "outside":
        write_index(folder, weight_map | {name: f"../{weight_map[name]}"})
    elif damage == "twice":
        other = next(shard for shard in shards if shard != weight_map[name])
        held = {key: llama_tensors()[key] for key, shard in weight_map.items() if shard == other}
        save_file(held | {name: llama_tensors()[name]}, folder / other)
        write_index(folder, {key: shard for key, shard in weight_map.items() if key != name})
    else:
        (folder / weight_map[name]).write_bytes(b"")
    with pytest.raises(ArtifactError) as refusal:
        open_artifact(folder)
    named = str(refusal.value)
    assert named.startswith("m/")
    assert any(part in named for part in (name, *shards, "model.more.weight", "model.safetensors.index.json"))
    assert str(folder) not in named


def test_the_folders_are_whole_before_they_are_damaged(folders):
    for kind in ("plain", "packed", "foreign"):
        assert open_artifact(folders / kind).parameters > 0
    assert CONFIG["model_type"] == "llama"
