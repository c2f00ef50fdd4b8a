"""Graphs of mlx-lm: the ids of its own loop, whoever shares the step, and state that can be kept and given back."""

import dataclasses
import resource
import sys

import mlx.core as mx
import mlx_lm.utils
import pytest

from engine.artifacts import foreign_config
from engine.artifacts.artifact import open_artifact
from engine.contracts.composition import Composition
from engine.contracts.errors import (
    GraphContractError,
    UnavailableError,
    UnsupportedArtifactError,
    UnsupportedOptionError,
)
from engine.contracts.graph import PackedSegment
from engine.contracts.kv_scheme import AffineKv
from engine.generation.bindings.autoregressive import bind_mlx_autoregressive_graph
from engine.models import foreign
from engine.models.foreign import load_foreign_graph
from engine.models.foreign_state import ForeignState
from engine.runtime.policy import LayoutPolicy
from tests.engine.models import tiny_foreign
from tests.engine.models.tiny_foreign import ARCHITECTURES, greedy
from tests.engine.models.tiny_llama import random_prompt

LAYOUT = LayoutPolicy(compute_dtype="float32", dequantize=True, pretranspose_linear=False, prefill_step_tokens=64)


def bind(folder, *, layout=LAYOUT, stored_dtype="float32", before_each=lambda: None):
    graph = load_foreign_graph(
        open_artifact(folder), layout, Composition(), stored_dtype=stored_dtype, before_each=before_each
    )
    return bind_mlx_autoregressive_graph(graph, graph.states)


def step(binding, units):
    """One step of several rows: each a list of tokens and its caches; the last logits [R, V]."""
    segments = [PackedSegment(len(tokens), caches) for tokens, caches in units]
    packed = mx.array([[token for tokens, _ in units for token in tokens]], dtype=mx.uint32)
    ends = [sum(len(tokens) for tokens, _ in units[: index + 1]) - 1 for index in range(len(units))]
    return binding.logits(packed, segments, ends)


def decode(binding, caches, token, count):
    ids = []
    for _ in range(count):
        ids.append(token)
        token = mx.argmax(step(binding, [([token], caches)])[0]).item()
    return ids


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign") / request.param
    return folder, tiny_foreign.write(folder, ARCHITECTURES[request.param])


def test_rows_that_share_steps_each_get_the_ids_of_mlx_lms_own_loop(model):
    folder, oracle = model
    binding = bind(folder)
    prompts = [random_prompt(seed, length) for seed, length in ((1, 12), (2, 5), (3, 20))]
    rows = [(prompt, binding.make_cache()) for prompt in prompts]
    assert (
        binding.logits(
            mx.array([[token for prompt, _ in rows for token in prompt[:-1]]], dtype=mx.uint32),
            [PackedSegment(len(prompt) - 1, caches) for prompt, caches in rows],
            [],
        )
        is None
    )
    ids = [[] for _ in rows]
    fed = [prompt[-1] for prompt in prompts]
    for _ in range(24):
        logits = step(binding, [([token], caches) for token, (_, caches) in zip(fed, rows, strict=True)])
        fed = mx.argmax(logits, axis=-1).tolist()
        for own, token in zip(ids, fed, strict=True):
            own.append(token)
    assert ids == [greedy(oracle, prompt, 24) for prompt in prompts]
    assert len({tuple(own) for own in ids}) == 3
    assert all(caches[0].offset == len(prompt) + 23 for prompt, caches in rows)


def test_a_kept_state_goes_on_as_if_nothing_had_happened(model):
    folder, _ = model
    binding = bind(folder)
    prompt = random_prompt(4, 17)
    caches = binding.make_cache()
    token = mx.argmax(step(binding, [(prompt, caches)])[0]).item()
    kept = caches[0].snapshot()
    expected = decode(binding, caches, token, 12)
    caches[0].close()
    for _ in range(2):  # the first run must not have written into what was kept
        assert decode(binding, binding.cache_builder.restore([kept], 17), token, 12) == expected
    assert kept.tokens == 17
    assert kept.nbytes > 0


def test_a_kept_state_is_cut_where_its_layers_can_be_cut_and_refused_where_not(model):
    folder, oracle = model
    binding = bind(folder)
    prompt = random_prompt(4, 17)
    caches = binding.make_cache()
    mx.eval(step(binding, [(prompt, caches)]))
    kept = caches[0].snapshot()
    if kept.least_tokens:
        assert not caches[0].trimmable_tokens
        with pytest.raises(ValueError, match="cannot be cut to 9"):
            binding.cache_builder.restore([kept], 9)
        with pytest.raises(ValueError, match="cannot drop"):
            caches[0].trim(1)
        return
    shorter = binding.cache_builder.restore([kept], 9)
    assert shorter[0].offset == 9
    token = mx.argmax(step(binding, [(prompt[9:], shorter)])[0]).item()
    assert decode(binding, shorter, token, 8) == greedy(oracle, prompt, 8)


def test_states_of_other_kinds_and_empty_ones_are_refused(model):
    folder, _ = model
    state = ForeignState([])
    with pytest.raises(ValueError, match="no token"):
        state.snapshot()
    binding = bind(folder)
    caches = binding.make_cache()
    mx.eval(step(binding, [([1, 2, 3], caches)]))
    other = dataclasses.replace(caches[0].snapshot(), kind="plain")
    with pytest.raises(ValueError, match="kind 'plain'"):
        binding.cache_builder.restore([other], 3)
    with pytest.raises(GraphContractError, match="does not attend"):
        state.append(mx.zeros(1), mx.zeros(1))
    assert state.place_for(3) is None


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize(
    "quantization", [{"bits": 4, "group_size": 32}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}]
)
def test_quantized_models_give_mlx_lms_ids_packed_and_unpacked(tmp_path, quantization, dequantize):
    oracle = tiny_foreign.write(tmp_path / "m", ARCHITECTURES["internlm2"], quantization=quantization)
    binding = bind(tmp_path / "m", layout=dataclasses.replace(LAYOUT, dequantize=dequantize))
    caches = binding.make_cache()
    prompt = random_prompt(6, 9)
    token = mx.argmax(step(binding, [(prompt, caches)])[0]).item()
    assert decode(binding, caches, token, 10) == greedy(oracle, prompt, 10)
    artifact = open_artifact(tmp_path / "m")
    assert artifact.parameters > artifact.weights_bytes / 4
    assert (binding.weights_bytes > artifact.weights_bytes) is dequantize


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_unpacked_weights_are_not_rounded_to_the_dtype_of_their_scales(tmp_path, dtype):
    config, quantization = ARCHITECTURES["internlm2"], {"bits": 4, "group_size": 32}
    oracle = tiny_foreign.write(tmp_path / "m", config, quantization=quantization, dtype=dtype)
    oracle.apply(lambda array: array.astype(mx.float32) if array.dtype == dtype else array)
    stored = "bfloat16" if dtype == mx.bfloat16 else "float16"
    binding = bind(tmp_path / "m", stored_dtype=stored)
    prompt = random_prompt(6, 9)
    found, expected = step(binding, [(prompt, binding.make_cache())])[0], oracle(mx.array([prompt]))[0, -1]
    assert mx.abs(found - expected).max() < 1e-5 * mx.abs(expected).max()


def test_weights_of_both_16_bit_dtypes_are_held_in_one(tmp_path):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"], dtype=mx.bfloat16)
    path = tmp_path / "m/model.safetensors"
    tensors = {name: array + 0 for name, array in mx.load(str(path)).items()}
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(mx.float16)
    mx.eval(tensors)
    path.unlink()
    mx.save_safetensors(str(path), tensors)
    for held in ("float32", "bfloat16"):
        layout = dataclasses.replace(LAYOUT, compute_dtype=held)
        graph = bind(tmp_path / "m", layout=layout, stored_dtype="bfloat16").graph
        assert {str(array.dtype) for array in foreign._parameters(graph._model)} == {f"mlx.core.{held}"}


def test_weights_of_the_stored_dtype_are_widened_and_others_left(tmp_path):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"], dtype=mx.bfloat16)
    wide = bind(tmp_path / "m", stored_dtype="bfloat16")
    kept = bind(tmp_path / "m", layout=dataclasses.replace(LAYOUT, compute_dtype="bfloat16"), stored_dtype="bfloat16")
    assert wide.weights_bytes == 2 * kept.weights_bytes
    assert step(wide, [([1, 2], wide.make_cache())]).dtype == mx.float32
    assert step(kept, [([1, 2], kept.make_cache())]).dtype == mx.bfloat16


def test_the_declaration_says_what_such_a_graph_cannot_do(model):
    folder, _ = model
    binding = bind(folder)
    declaration = binding.declaration
    assert not declaration.packed_segments
    assert not declaration.adapters.mountable
    assert not declaration.speculation.external_tokens
    assert binding.descriptor.id == f"mlx-lm:{folder.name}"
    assert binding.descriptor.state_abi == "mlx-lm-cache-v1"
    assert binding.descriptor.artifact == f"mlx-lm {mlx_lm.__version__}"  # states on disk are of this version alone


# What is refused


def test_another_form_of_state_than_mlx_lms_is_refused_by_name(model):
    graph = bind(model[0]).graph
    graph.composition = Composition(kv=AffineKv(bits=8))
    with pytest.raises(UnsupportedOptionError, match=r"composition\.kv"):
        bind_mlx_autoregressive_graph(graph, graph.states)


def test_a_load_can_be_ended_between_two_tensors(model):
    def stop():
        raise UnavailableError("stopped")

    with pytest.raises(UnavailableError):
        bind(model[0], before_each=stop)


def test_stray_files_are_neither_read_nor_mixed_in(tmp_path):
    oracle = tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    stray = {name: array + 1 for name, array in mx.load(str(tmp_path / "m/model.safetensors")).items()}
    mx.save_safetensors(str(tmp_path / "m/model-stray.safetensors"), stray)
    binding = bind(tmp_path / "m")
    prompt = random_prompt(6, 9)
    token = mx.argmax(step(binding, [(prompt, binding.make_cache())])[0]).item()
    assert [token] == greedy(oracle, prompt, 1)


@pytest.mark.parametrize("extra", [True, False])
def test_missing_and_surplus_tensors_are_refused_by_name_without_a_path(tmp_path, extra):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    path = tmp_path / "m/model.safetensors"
    tensors = mx.load(str(path))
    name = "model.layers.0.odd.weight" if extra else "model.layers.0.mlp.up_proj.weight"
    tensors = tensors | {name: mx.zeros((2,))} if extra else {key: tensors[key] for key in tensors if key != name}
    mx.eval(tensors)
    path.unlink()
    mx.save_safetensors(str(path), tensors)
    with pytest.raises(
        UnsupportedArtifactError, match=rf"^m: mlx-lm cannot load a stablelm model from it: .*{name}"
    ) as found:
        bind(tmp_path / "m")
    assert "/tmp" not in str(found.value)
    assert str(tmp_path) not in str(found.value)


def test_an_architecture_that_ends_the_process_is_refused_like_any_other(tmp_path):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    config = (tmp_path / "m/config.json").read_text().replace('"stablelm"', '"olmo"')
    (tmp_path / "m/config.json").write_text(config)
    with pytest.raises(UnsupportedArtifactError, match="cannot load a olmo model from it: SystemExit"):
        bind(tmp_path / "m")


def test_the_process_keeps_its_limit_of_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = resource.setrlimit
    with foreign._descriptor_limit_kept():
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert resource.setrlimit is kept


def test_without_the_extra_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    monkeypatch.setattr(foreign_config, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedArtifactError, match=r"model_type 'stablelm' .*python -m pip install -e '\.\[mlx-lm\]'`"
    ):
        open_artifact(tmp_path / "m")
    monkeypatch.undo()
    artifact = open_artifact(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(UnsupportedArtifactError, match="mlx-lm cannot be imported"):
        load_foreign_graph(artifact, LAYOUT, Composition(), stored_dtype="float32", before_each=lambda: None)


@pytest.mark.parametrize(
    "name", ["nobody_knows", "../cache", "os", "base.py", "a b", "Llama", "base", "cache", "rope_utils", "ssm"]
)
def test_a_name_that_mlx_lm_does_not_know_is_refused_before_anything_is_imported(tmp_path, name):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    config = (tmp_path / "m/config.json").read_text().replace('"stablelm"', f'"{name}"')
    (tmp_path / "m/config.json").write_text(config)
    with pytest.raises(UnsupportedArtifactError, match="is not supported, nor is it known to mlx-lm"):
        open_artifact(tmp_path / "m")


def test_code_in_a_models_folder_is_never_run(tmp_path):
    tiny_foreign.write(tmp_path / "m", ARCHITECTURES["stablelm"])
    (tmp_path / "m/evil.py").write_text("raise SystemExit('ran')")
    config = (tmp_path / "m/config.json").read_text().replace("{", '{"model_file": "evil.py", ', 1)
    (tmp_path / "m/config.json").write_text(config)
    with pytest.raises(UnsupportedArtifactError, match="names code of its own to be run"):
        open_artifact(tmp_path / "m")


def test_the_names_that_mlx_lm_changes_are_known():
    assert set(mlx_lm.utils.MODEL_REMAPPING) == foreign_config.RENAMED


def test_sizes_are_read_under_the_names_that_files_use(tmp_path):
    (tmp_path / "m").mkdir()
    gpt2 = '{"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 6, "n_positions": 99, "vocab_size": 10}'
    mx.save_safetensors(str(tmp_path / "m/model.safetensors"), {"wte.weight": mx.zeros((10, 48))})
    (tmp_path / "m/config.json").write_text(
        '{"model_type": "openelm", "num_transformer_layers": 3, "model_dim": 48, "num_query_heads": [4, 6, 6],'
        ' "num_kv_heads": [2, 3, 3], "head_dim": 8, "max_context_length": 99, "vocab_size": 10}'
    )
    geometry = open_artifact(tmp_path / "m").config.geometry()
    assert (geometry.heads, geometry.kv_heads, geometry.layers, geometry.context_length) == (6, 3, 3, 99)
    (tmp_path / "m/config.json").write_text(gpt2)
    geometry = open_artifact(tmp_path / "m").config.geometry()
    assert (geometry.layers, geometry.hidden_size, geometry.heads, geometry.head_dim) == (3, 48, 6, 8)
    assert (geometry.kv_heads, geometry.context_length) == (6, 99)
