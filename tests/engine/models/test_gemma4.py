"""Gemma 4: the forms in which it is stored, layers that share keys and values, and what is refused by name.

That its logits are mlx-lm's is proven with all families.
"""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import PagedKvComposition
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.kv_scheme import AffineKv, PlainKv
from engine.generation.memory import row_bytes
from tests.engine.models import tiny_families, tiny_llama
from tests.engine.models.packed import forward, logits_of, relative_difference

SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
MIXED = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 0,
}
PROMPT = tiny_llama.random_prompt(1, 40)


def write(folder, changes, *, form=lambda tensors: tensors, nested=False):
    """A seeded model; returns its oracle, its tensors as written, and its configuration."""
    config = tiny_families.config_of("gemma4_text", changes)
    model = tiny_families.build("gemma4_text", config)
    tensors = form(dict(tree_flatten(model.parameters())))
    document = {"model_type": "gemma4", "text_config": config} if nested else config
    save(folder, document, tensors)
    return tiny_llama.Oracle(model), tensors, document


def save(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def original(tensors):
    """As the authors store a model: other names, towers beside the text, and experts' gate and up in one tensor."""
    found = {
        "model.vision_tower.patch.weight": mx.zeros((4, 4)),
        "model.embed_audio.projection.weight": mx.zeros((4, 4)),
    }
    for name, tensor in tensors.items():
        stored = name.replace("model.", "model.language_model.", 1)
        if "switch_glu.up_proj" in name:
            continue
        if "switch_glu.gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            stored = stored.replace("switch_glu.gate_proj.weight", "gate_up_proj")
            tensor = mx.concatenate([tensor, up], axis=1)
        found[stored.replace("switch_glu.down_proj.weight", "down_proj")] = tensor
    return found


def with_unused_projections(tensors):
    """As the authors store layers that share: with projections that nothing uses."""
    found = dict(tensors)
    for layer in (3, 4, 5):
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            found[f"model.layers.{layer}.self_attn.{name}"] = mx.zeros((4, 4))
    return found


@pytest.mark.parametrize("changes", [SHARED, MIXED], ids=["shared keys", "experts"])
def test_original_files_and_converted_ones_give_the_same_bits(tmp_path, changes):
    oracle, _, _ = write(tmp_path / "converted", changes)
    write(tmp_path / "original", changes, form=original, nested=True)
    converted, found = (logits_of(tiny_llama.bind(tmp_path / name), PROMPT) for name in ("converted", "original"))
    assert relative_difference(converted, oracle.logits(PROMPT)) < 1e-5
    assert mx.array_equal(found, converted).item()


def test_projections_that_sharing_layers_do_not_use_are_dropped_by_rule(tmp_path):
    oracle, _, _ = write(tmp_path, SHARED, form=with_unused_projections)
    assert relative_difference(logits_of(tiny_llama.bind(tmp_path), PROMPT), oracle.logits(PROMPT)) < 1e-5


def test_only_donors_keep_keys_and_values(tmp_path):
    write(tmp_path, SHARED)
    binding = tiny_llama.bind(tmp_path)
    assert binding.geometry.layer_key_values == (32, 64, 32, 0, 0, 0)
    caches = binding.make_cache()
    assert len(caches) == 3
    forward(binding, [PROMPT], [caches])
    mx.eval([cache.arrays() for cache in caches])
    assert sum(cache.nbytes for cache in caches) == row_bytes(binding.geometry, len(PROMPT), 4)


@pytest.mark.parametrize(
    "storage",
    [{}, {"library_arithmetic": True}, {"paged_kv": PagedKvComposition(block_tokens=16)}],
    ids=["pooled", "alone", "paged"],
)
def test_rows_that_share_layers_go_on_from_snapshots_and_wrong_guesses(tmp_path, storage):
    oracle, _, _ = write(tmp_path, SHARED)
    binding = tiny_llama.bind(tmp_path, **storage)
    assert relative_difference(logits_of(binding, PROMPT), oracle.logits(PROMPT)) < 1e-5
    donor, cold = binding.make_cache(), binding.make_cache()
    for caches in (donor, cold):
        forward(binding, [PROMPT], [caches])
    warm = binding.cache_builder.restore([cache.snapshot() for cache in donor], len(PROMPT))
    forward(binding, [[9]], [warm])
    for cache in warm:
        cache.trim(1)
    for part in ([4], [5, 6, 7], [8]):
        found, wanted = (forward(binding, [part], [caches])[0] for caches in (warm, cold))
        assert mx.array_equal(found, wanted).item()


def test_sharing_layers_read_what_their_donors_have_quantized(tmp_path):
    """With both kinds of arithmetic, which read packed keys in their own ways; what was rounded shows."""
    write(tmp_path, SHARED | {"head_dim": 32})
    found = {}
    for name, how in {"composed": {}, "library": {"library_arithmetic": True}}.items():
        for scheme in (PlainKv(), AffineKv(bits=8, group_size=32)):
            binding = tiny_llama.bind(tmp_path, kv=scheme, **how)
            caches = binding.make_cache()
            logits = []
            for part in (PROMPT[:20], PROMPT[20:39], PROMPT[39:]):
                for cache in caches:
                    cache.maintain()
                logits.append(forward(binding, [part], [caches])[0])
            found[name, type(scheme)] = mx.concatenate(logits)
    rounded = relative_difference(found["composed", AffineKv], found["composed", PlainKv])
    assert relative_difference(found["composed", AffineKv], found["library", AffineKv]) < rounded / 10
    assert rounded > 1e-3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_kv_shared_layers": 6}, CorruptArtifactError, "num_kv_shared_layers leaves no layer"),
        ({"num_kv_shared_layers": 5}, CorruptArtifactError, "leaves no layer of full_attention with keys of its own"),
        ({"num_kv_shared_layers": -1}, CorruptArtifactError, "num_kv_shared_layers must be"),
        ({"use_double_wide_mlp": False}, CorruptArtifactError, r"layers\.[345]\.mlp\.\w+\.weight has the shape"),
        ({"global_head_dim": 16}, CorruptArtifactError, "self_attn.* has the shape"),
        ({"hidden_size_per_layer_input": 16}, CorruptArtifactError, "per_layer.* has the shape"),
        ({"vocab_size_per_layer_input": 98}, CorruptArtifactError, r"embed_tokens_per_layer\.weight has the shape"),
        ({"vocab_size_per_layer_input": 96}, CorruptArtifactError, "vocab_size_per_layer_input must be at least vocab"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            CorruptArtifactError,
            "4 attention heads cannot share 3 global key/value heads",
        ),
        ({"enable_moe_block": True, "num_experts": 4}, MissingArtifactError, "has no top_k_experts"),
        ({"layer_types": ["full_attention"] * 5 + ["chunked"]}, UnsupportedArtifactError, "layer type 'chunked'"),
    ],
    ids=str,
)
def test_contradictory_configurations_are_refused_by_name(tmp_path, changes, error, message):
    _, tensors, config = write(tmp_path, SHARED)
    save(tmp_path, config | changes, tensors)
    with pytest.raises(error, match=message):
        open_artifact(tmp_path)


def test_surplus_tensors_of_layers_that_share_nothing_are_named(tmp_path):
    _, tensors, config = write(tmp_path, SHARED)
    save(tmp_path, config, tensors | {"model.layers.0.self_attn.k_proj.extra": mx.zeros((2,))})
    with pytest.raises(UnsupportedArtifactError, match=r"model\.layers\.0\.self_attn\.k_proj\.extra"):
        tiny_llama.bind(tmp_path)
