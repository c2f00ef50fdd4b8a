"""GGUF metadata and names in the terms of Hugging Face, and the same logits from both."""

import mlx.core as mx
import numpy as np
import pytest

from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.graph import PackedSegment
from tests.engine.artifacts.tiny_files import llama_tensors, write_folder, write_gguf
from tests.engine.models.tiny_llama import bind


def config_of(tmp_path, **options):
    return open_artifact(write_gguf(tmp_path / "tiny.gguf", **options)).config


def test_metadata_becomes_the_configuration_that_the_folder_has(tmp_path):
    ours = config_of(tmp_path)
    theirs = open_artifact(write_folder(tmp_path / "folder")).config
    assert ours.geometry() == theirs.geometry()
    assert (ours.model_type, ours.intermediate_size, ours.eos_token_ids, ours.bos_token_id) == ("llama", 96, (2,), 1)
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    assert ours.tie_word_embeddings


def test_rotation_pairs_neighbours_because_the_converter_permutes(tmp_path):
    assert config_of(tmp_path).layer_ropes[0].traditional


def test_names_become_those_of_the_folder(tmp_path):
    tensors = llama_tensors(head=True)
    artifact = open_artifact(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert {name: header.shape for name, header in artifact.tensors.items()} == {
        name: values.shape for name, values in tensors.items()
    }
    assert not artifact.config.tie_word_embeddings


def test_end_tokens_are_all_that_the_metadata_names(tmp_path):
    def extra(writer):
        writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)

    assert config_of(tmp_path, extra=extra).eos_token_ids == (2, 7)


@pytest.mark.parametrize("architecture", ["mamba", "gpt2"])
def test_another_architecture_is_refused_by_name(tmp_path, architecture):
    with pytest.raises(UnsupportedArtifactError, match=f"architecture '{architecture}' is not supported"):
        config_of(tmp_path, architecture=architecture)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.count", 2, "one part of a split model"),
        ("llama.expert_count", 8, "with experts"),
        ("llama.attention.value_length", 8, "different sizes"),
    ],
)
def test_variants_that_we_do_not_read_are_refused(tmp_path, key, value, message):
    with pytest.raises(UnsupportedArtifactError, match=message):
        config_of(tmp_path, extra=lambda writer: writer.add_uint32(key, value))


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"],
)
def test_metadata_that_is_needed_is_missed_by_name(tmp_path, key):
    with pytest.raises(MissingArtifactError, match=f"^tiny.gguf: has no llama.{key}"):
        config_of(tmp_path, drop=[key])


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    with pytest.raises(
        MissingArtifactError, match=r"^tiny.gguf: has no .*(token_embd|model\.norm|model\.layers\.1\.self_attn\.q_proj)"
    ):
        config_of(tmp_path, drop=[name])


def test_a_wrong_shape_is_refused_with_the_tensor_and_both_shapes(tmp_path):
    tensors = llama_tensors() | {"model.norm.weight": np.zeros(32, np.float32)}
    with pytest.raises(
        CorruptArtifactError, match=r"model.norm.weight has the shape \[32\], the configuration needs \[64\]"
    ):
        config_of(tmp_path, tensors=tensors)


def test_heads_written_once_per_layer_are_read_when_they_agree(tmp_path):
    def per_layer(counts):
        return {
            "drop": ["attention.head_count_kv"],
            "extra": lambda w: w.add_array("llama.attention.head_count_kv", counts),
        }

    assert config_of(tmp_path, **per_layer([2, 2])).kv_heads == 2
    with pytest.raises(UnsupportedArtifactError, match="head_count_kv that differs between layers"):
        config_of(tmp_path, **per_layer([2, 4]))


def test_stored_rotary_factors_become_part_of_the_configuration(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    artifact = open_artifact(
        write_gguf(tmp_path / "tiny.gguf", extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    )
    rope = artifact.config.layer_ropes[0]
    assert (rope.kind, rope.long_factor, rope.attention_factor) == ("longrope", tuple(factors.tolist()), 1.0)
    assert not any("rope" in name for name in artifact.tensors)


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.ones(8, np.float16)])
def test_rotary_factors_of_another_form_are_refused(tmp_path, factors):
    with pytest.raises(UnsupportedArtifactError, match=r"rope_freqs.weight of F"):
        config_of(tmp_path, extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors))


def test_rotary_factors_that_are_no_positive_numbers_are_refused(tmp_path):
    factors = np.zeros(8, np.float32)
    with pytest.raises(CorruptArtifactError, match="no positive number"):
        config_of(tmp_path, extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotation_is_read(tmp_path, kind):
    def extra(writer):
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 32)

    rope = config_of(tmp_path, extra=extra).layer_ropes[0]
    assert (rope.kind, rope.factor, rope.original_context_length) == (kind, 4.0, 32)


@pytest.mark.parametrize(
    "stated",
    [{"scaling.factor": 4.0}, {"scale_linear": 4.0}, {"scaling.type": "linear", "scale_linear": 4.0}],
    ids=["no type", "the old key", "a type and the old key"],
)
def test_a_scaling_factor_without_more_stretches_positions_linearly(tmp_path, stated):
    rope = config_of(tmp_path, extra=lambda writer: write_rope(writer, stated)).layer_ropes[0]
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_the_new_key_of_the_scaling_factor_wins_over_the_old_one(tmp_path):
    stated = {"scaling.factor": 4.0, "scale_linear": 2.0}
    assert config_of(tmp_path, extra=lambda writer: write_rope(writer, stated)).layer_ropes[0].factor == 4.0


@pytest.mark.parametrize(
    "stated",
    [{"scaling.type": "none", "scaling.factor": 4.0}, {"scaling.factor": 0.0}, {"scaling.factor": 1.0}, {}],
    ids=["none", "factor zero", "factor one", "nothing"],
)
def test_no_scaling_leaves_positions_as_they_are(tmp_path, stated):
    rope = config_of(tmp_path, extra=lambda writer: write_rope(writer, stated)).layer_ropes[0]
    assert (rope.kind, rope.factor) == ("default", 1.0)


def test_a_negative_scaling_factor_is_refused(tmp_path):
    with pytest.raises(CorruptArtifactError, match=r"llama.rope.scaling.factor must be at least 0, got -4.0"):
        config_of(tmp_path, extra=lambda writer: write_rope(writer, {"scaling.factor": -4.0}))


def test_yarn_without_a_factor_misses_it_by_name(tmp_path):
    with pytest.raises(MissingArtifactError, match=r"has no llama.rope.scaling.factor"):
        config_of(tmp_path, extra=lambda writer: write_rope(writer, {"scaling.type": "yarn"}))


def test_stored_factors_under_a_scaling_factor_are_refused_rather_than_half_applied(tmp_path):
    def extra(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
        write_rope(writer, {"scaling.factor": 4.0})

    with pytest.raises(UnsupportedArtifactError, match="with 'linear' scaling"):
        config_of(tmp_path, extra=extra)


@pytest.mark.parametrize("scaling", [{"scaling.factor": 4.0}, {"scale_linear": 4.0}])
def test_a_linearly_scaled_file_gives_the_logits_of_the_folder(tmp_path, scaling):
    stated = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    folder = write_folder(tmp_path / "folder", llama_tensors(), config=stated)
    scaled = write_gguf(tmp_path / "tiny.gguf", extra=lambda writer: write_rope(writer, scaling))
    plain = write_gguf(tmp_path / "plain.gguf")
    assert cosine(logits(folder), logits(scaled)) > 1 - 1e-6
    assert cosine(logits(folder), logits(plain)) < 0.9999


def test_parameters_of_yarn_are_honoured_or_refused_by_name(tmp_path):
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0, "scaling.attn_factor": 1.0}
    assert config_of(tmp_path, extra=lambda writer: write_rope(writer, yarn)).layer_ropes[0].beta_fast == 16.0
    for key in ("scaling.attn_factor", "scaling.yarn_attn_factor"):
        with pytest.raises(UnsupportedArtifactError, match=rf"llama.rope.{key} 0.5 is not supported"):
            config_of(tmp_path, extra=lambda writer, key=key: write_rope(writer, yarn | {key: 0.5}))


def write_rope(writer, stated):
    """Rotary metadata by the end of its key, texts as texts and numbers as float32."""
    for key, value in stated.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.{key}", value)


def test_an_unknown_scaling_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedArtifactError, match="kind 'spiral'"):
        config_of(tmp_path, extra=lambda writer: writer.add_string("llama.rope.scaling.type", "spiral"))


def logits(path):
    """Logits [L, V] of a fixed prompt, by the product's own graph."""
    binding = bind(path)
    tokens = mx.array([[3, 9, 27, 33, 3, 40, 11]], dtype=mx.uint32)
    hidden = binding.hidden(tokens, [PackedSegment(tokens.size, binding.make_cache())])
    return np.array(binding.project(hidden)[0])


def cosine(one, other):
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("kind", "least"), [("F32", 1 - 1e-6), ("F16", 0.9999), ("Q8_0", 0.999), ("Q4_0", 0.93)])
def test_a_converted_model_gives_the_logits_of_the_folder(tmp_path, kv_heads, kind, least):
    tensors = llama_tensors()
    for name, values in tensors.items():
        tensors[name] = values / 8 if values.ndim > 1 else np.ones_like(values)
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = np.tile(tensors[name], (2, 1))[: 16 * kv_heads]
    config = {"num_key_value_heads": kv_heads}
    folder = write_folder(tmp_path / "folder", tensors, config=config)
    converted = write_gguf(tmp_path / "tiny.gguf", tensors, kind=kind, config=config)
    assert cosine(logits(folder), logits(converted)) > least


def test_reading_halves_where_neighbours_are_stored_would_be_seen(tmp_path):
    """The proof that the test above can fail: the same file under the other rotation talks nonsense."""
    tensors = llama_tensors()
    folder = write_folder(tmp_path / "folder", tensors)
    wrong = write_folder(tmp_path / "wrong", tensors, config={"rope_traditional": True})
    assert cosine(logits(folder), logits(wrong)) < 0.999
