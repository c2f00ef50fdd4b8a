"""Models with recurrent layers: the forms in which they are stored, wrong guesses, and what is refused by name.

That their logits are mlx-lm's is proven with all families.
"""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.generation.memory import row_bytes
from tests.engine.models import tiny_families, tiny_llama
from tests.engine.models.packed import forward, logits_of, relative_difference

CONFIG = tiny_families.config_of("qwen3_5", {"num_hidden_layers": 3})
SHIFTED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    ".norm.weight",
)
PROMPT = tiny_llama.random_prompt(1, 40)


@pytest.fixture
def model():
    return tiny_families.build("qwen3_5", CONFIG)


def write(folder, tensors, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def tensors_of(model):
    return dict(tree_flatten(model.parameters()))


def original(tensors):
    """As the authors store a model: other names, gains less one, convolutions turned, and parts beside the text."""
    found = {"mtp.fc.weight": mx.zeros((64, 128)), "model.visual.patch_embed.proj.weight": mx.zeros((4, 4))}
    for name, tensor in tensors.items():
        stored = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        if name.endswith("conv1d.weight"):
            tensor = tensor.swapaxes(1, 2)
        if name.endswith(SHIFTED) and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor - 1.0
        found[stored] = tensor
    return found


def test_original_files_and_converted_ones_give_the_same_logits(tmp_path, model):
    oracle, tensors = tiny_llama.Oracle(model), tensors_of(model)
    converted = logits_of(tiny_llama.bind(write(tmp_path / "converted", tensors)), PROMPT)
    text = {**CONFIG, "model_type": "qwen3_5_text"}
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    folder = write(tmp_path / "original", original(tensors), config)
    found = logits_of(tiny_llama.bind(folder), PROMPT)
    assert relative_difference(converted, oracle.logits(PROMPT)) < 1e-5
    assert relative_difference(found, converted) < 1e-5


def test_listed_layer_types_say_the_same_as_the_interval(tmp_path, model):
    listed = CONFIG | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    del listed["full_attention_interval"]
    found = logits_of(tiny_llama.bind(write(tmp_path / "listed", tensors_of(model), listed)), PROMPT)
    wanted = logits_of(tiny_llama.bind(write(tmp_path / "interval", tensors_of(model))), PROMPT)
    assert mx.array_equal(found, wanted).item()


@pytest.mark.parametrize("library_arithmetic", [False, True], ids=["pooled", "alone"])
def test_a_row_that_was_fed_a_wrong_guess_goes_on_as_if_it_had_not_been(tmp_path, model, library_arithmetic):
    binding = tiny_llama.bind(write(tmp_path, tensors_of(model)), library_arithmetic=library_arithmetic)
    misled, twin = binding.make_cache(), binding.make_cache()
    for caches in (misled, twin):
        forward(binding, [PROMPT], [caches])
    for guess in ([3], [5]):
        forward(binding, [guess], [misled])
        for cache in misled:
            cache.trim(1)
        for token in (7, 11):
            found = forward(binding, [[token]], [misled])[0]
            assert mx.array_equal(found, forward(binding, [[token]], [twin])[0]).item()


def test_a_rows_state_is_as_large_as_was_predicted_however_long(tmp_path, model):
    binding = tiny_llama.bind(write(tmp_path, tensors_of(model)))
    assert binding.geometry.layer_key_values == (0, 32, 0)
    assert binding.geometry.recurrent_layers == 2
    caches = binding.make_cache()
    forward(binding, [PROMPT], [caches])
    forward(binding, [[1]], [caches])
    forward(binding, [[1]], [caches])
    mx.eval([cache.arrays() for cache in caches])
    assert sum(cache.nbytes for cache in caches) == row_bytes(binding.geometry, 42, 4)


def test_a_warm_row_equals_a_cold_one(tmp_path, model):
    binding = tiny_llama.bind(write(tmp_path, tensors_of(model)))
    donor, cold = binding.make_cache(), binding.make_cache()
    for caches in (donor, cold):
        forward(binding, [PROMPT], [caches])
    warm = binding.cache_builder.restore([cache.snapshot() for cache in donor], len(PROMPT))
    forward(binding, [[9]], [donor])
    assert mx.array_equal(forward(binding, [[4, 5]], [warm])[0], forward(binding, [[4, 5]], [cold])[0]).item()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"linear_num_value_heads": 3}, CorruptArtifactError, "3 linear value heads cannot share 2 key heads"),
        ({"linear_num_value_heads": 8}, CorruptArtifactError, "has the shape .*, the configuration needs"),
        ({"linear_key_head_dim": None}, MissingArtifactError, "has no linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 1}, CorruptArtifactError, "linear_conv_kernel_dim must be at least 2"),
        ({"linear_conv_kernel_dim": 5}, CorruptArtifactError, r"conv1d\.weight has the shape \[96, 4, 1\]"),
        ({"output_gate_type": "sigmoid"}, UnsupportedArtifactError, "output_gate_type 'sigmoid' is not supported"),
        ({"attn_output_gate": False}, UnsupportedArtifactError, "attn_output_gate false is not supported"),
        ({"full_attention_interval": 1}, MissingArtifactError, r"has no model\.layers\.0\.self_attn\.q_proj\.weight"),
        ({"layer_types": ["linear_attention", "sparse", "full_attention"]}, UnsupportedArtifactError, "type 'sparse'"),
    ],
    ids=str,
)
def test_contradictory_configurations_are_refused_by_name(tmp_path, model, changes, error, message):
    folder = write(tmp_path, tensors_of(model), CONFIG | changes)
    with pytest.raises(error, match=message):
        open_artifact(folder)


def test_linear_layers_are_refused_in_families_that_have_none(tmp_path):
    tiny_llama.write(tmp_path, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedArtifactError, match="layer type 'linear_attention' is not supported"):
        open_artifact(tmp_path)


def test_a_missing_part_is_named(tmp_path, model):
    tensors = tensors_of(model)
    del tensors["language_model.model.layers.2.linear_attn.A_log"]
    with pytest.raises(MissingArtifactError, match=r"has no model\.layers\.2\.linear_attn\.A_log"):
        open_artifact(write(tmp_path, tensors))
