"""Models of mlx-lm as others publish them: their quantized layouts are read, and sizes and states are told of all."""

import json

import mlx.core as mx
import pytest
from mlx_lm import utils

from engine.artifacts.artifact import open_artifact
from engine.artifacts.resident_size import resident_bytes
from engine.contracts.errors import UnsupportedArtifactError
from engine.execution.inspection import inspect_model
from engine.generation.memory import row_bytes
from tests.engine.artifacts.tiny_files import CONFIG, llama_tensors, write_folder
from tests.engine.models import tiny_foreign
from tests.engine.models.test_foreign import bind, decode, step
from tests.engine.models.tiny_foreign import ARCHITECTURES, CONTEXT, VOCAB, greedy
from tests.engine.models.tiny_llama import random_prompt

GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 150000,
    "max_position_embeddings": CONTEXT,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}


def rewrite(folder, change, **fields):
    """Store the tensors of `folder` as `change` gives them back, and state `fields`."""
    path = folder / "model.safetensors"
    tensors = change({name: array + 0 for name, array in mx.load(str(path)).items()})
    mx.eval(tensors)
    path.unlink()
    mx.save_safetensors(str(path), tensors)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | fields))


def as_published(tensors):
    """Experts of gpt-oss in mxfp4 blocks, gate and up interleaved, as its authors store them."""
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts."
        parts = {name: tensors.pop(f"{place}{name}_proj.weight") for name in ("gate", "up", "down")}
        biases = {name: tensors.pop(f"{place}{name}_proj.bias") for name in ("gate", "up", "down")}
        joined = mx.stack([parts["gate"], parts["up"]], axis=2).reshape(4, -1, 64)
        for name, values in (("gate_up_proj", joined), ("down_proj", parts["down"])):
            packed, scales = mx.quantize(values.astype(mx.bfloat16), group_size=32, bits=4, mode="mxfp4")
            tensors[f"{place}{name}_blocks"] = packed.view(mx.uint8).reshape(*values.shape[:2], -1, 16)
            tensors[f"{place}{name}_scales"] = scales
        tensors[f"{place}gate_up_proj_bias"] = mx.stack([biases["gate"], biases["up"]], axis=-1).reshape(4, -1)
        tensors[f"{place}down_proj_bias"] = biases["down"]
    return tensors


def in_awq(tensors):
    """One projection as AutoAWQ packs it."""
    place, (outputs, inputs) = "model.layers.0.mlp.up_proj", (96, 64)
    del tensors[f"{place}.weight"]
    mx.random.seed(11)

    def words(rows, columns):
        return mx.random.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=mx.int32)

    scales = 0.02 + 0.02 * mx.random.uniform(shape=(inputs // 32, outputs))
    return tensors | {
        f"{place}.qweight": words(inputs, outputs // 8),
        f"{place}.qzeros": words(inputs // 32, outputs // 8),
        f"{place}.scales": scales.astype(mx.float16),
    }


PUBLISHED = {
    "mxfp4": (GPT_OSS, as_published, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    "awq": (
        ARCHITECTURES["stablelm"],
        in_awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    ),
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_published_layout_that_mlx_lm_reads_is_served_and_told(tmp_path, method):
    config, change, stated = PUBLISHED[method]
    tiny_foreign.write(tmp_path / "m", config)
    rewrite(tmp_path / "m", change, quantization_config=stated)
    oracle, _ = utils.load_model(tmp_path / "m")
    oracle.apply(lambda array: array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array)
    binding = bind(tmp_path / "m")
    caches, prompt = binding.make_cache(), random_prompt(6, 9)
    token = mx.argmax(step(binding, [(prompt, caches)])[0]).item()
    assert decode(binding, caches, token, 10) == greedy(oracle, prompt, 10)
    artifact = open_artifact(tmp_path / "m")
    assert artifact.stored_quantization.startswith(f"{method} 4-bit")
    values = resident_bytes(artifact, element_bytes=4, dequantize=True, pretranspose=False)
    assert values == pytest.approx(binding.weights_bytes, rel=0.01)
    report = inspect_model(str(tmp_path / "m"))
    assert not [problem for problem in report.problems if "weights" in problem]
    assert report.storage.parameters == pytest.approx(binding.weights_bytes / 4, rel=0.01)


def test_a_method_that_nobody_reads_is_refused_with_those_that_are_read(tmp_path):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    rewrite(tmp_path / "m", lambda tensors: tensors, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedArtifactError, match=r"'bitsandbytes' is not supported; supported: mxfp4, .*, awq"):
        open_artifact(tmp_path / "m")
    folder = write_folder(
        tmp_path / "n", llama_tensors(), config=CONFIG | {"quantization_config": {"quant_method": "awq"}}
    )
    with pytest.raises(UnsupportedArtifactError, match=r"'awq' is not supported; supported: MLX's own modes affine, "):
        open_artifact(folder)


STATES = {"mamba2": ARCHITECTURES["mamba2"], "stablelm": ARCHITECTURES["stablelm"], "deepseek_v3": DEEPSEEK_V3}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_row_is_predicted_as_the_graph_keeps_it(tmp_path, name):
    tiny_foreign.write(tmp_path / "m", STATES[name], scale=1.0)
    binding = bind(tmp_path / "m")
    caches = binding.make_cache()
    mx.eval(step(binding, [(random_prompt(3, 40), caches)]))
    predicted = row_bytes(binding.geometry, 40, 4)
    assert caches[0].nbytes <= predicted <= 2 * caches[0].nbytes
    grows = row_bytes(binding.geometry, 4000, 4) > predicted
    assert grows == (name != "mamba2")


def test_what_is_not_known_of_a_state_is_said(tmp_path):
    for name, known in (("mamba2", True), ("stablelm", False)):
        tiny_foreign.write(tmp_path / name, ARCHITECTURES[name])
        notes = inspect_model(str(tmp_path / name)).notes
        assert any("when it is loaded" in note for note in notes)
        assert any("not known" in note for note in notes) is not known
