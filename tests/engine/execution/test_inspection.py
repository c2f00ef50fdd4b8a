"""A model explained from its headers: shape, storage layer by layer, memory here, text, and what is missing."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from engine.artifacts.storage_summary import spans
from engine.contracts.denoising import DEFAULT_STOPPING_IDS
from engine.contracts.errors import ArtifactError
from engine.execution.inspection import inspect_model
from engine.generation.memory import row_bytes
from tests.engine import tiny_model
from tests.engine.artifacts.test_weights import FOUR_BITS, quantized
from tests.engine.artifacts.tiny_files import CONFIG, llama_tensors, write_folder, write_gguf
from tests.engine.machines import machine
from tests.engine.models import test_gemma4, tiny_diffusion, tiny_families, tiny_foreign


@pytest.fixture
def folder(tmp_path):
    tiny_model.write(tmp_path / "m")
    return tmp_path / "m"


def test_a_complete_model_has_no_problem_and_its_shape_is_told(folder):
    report = inspect_model(str(folder))
    assert (report.name, report.kind, report.model_type, report.graph) == ("m", "huggingface", "llama", "native")
    assert (report.problems, report.notes) == ((), ())
    assert (report.geometry.layers, report.geometry.heads, report.geometry.kv_heads) == (2, 4, 2)
    assert report.rotations == ("default",)
    assert not report.tied_head
    assert report.declaration.packed_segments
    assert report.text.vocabulary == tiny_model.VOCAB
    assert (report.text.eos_token_ids, report.text.eos_tokens) == ((256,), ("<|endoftext|>",))
    assert report.text.has_chat_template
    assert sum(form.values for form in report.storage.forms) < report.storage.parameters
    assert report.storage.dtypes == {"F32": 4 * report.storage.parameters}


def test_quantization_is_told_layer_by_layer(tmp_path):
    up = "model.layers.1.mlp.up_proj"
    tensors = quantized(
        llama_tensors(), {up: None, "model.layers.0.mlp.up_proj": {"bits": 6, "group_size": 32}}, FOUR_BITS
    )
    stated = FOUR_BITS | {up: False, "model.layers.0.mlp.up_proj": {"bits": 6, "group_size": 32}}
    forms = inspect_model(str(write_folder(tmp_path / "m", tensors, config={"quantization": stated}))).storage.forms
    told = {(form.module, form.form): form.layers for form in forms}
    assert told["mlp.up_proj", "affine 6-bit, groups of 32"] == "0"
    assert told["mlp.up_proj", "F32"] == "1"
    assert told["mlp.down_proj", "affine 4-bit, groups of 32"] == "0-1"
    assert told["embed_tokens", "affine 4-bit, groups of 32"] == ""
    assert sum(form.nbytes for form in forms) == sum(values.nbytes for values in tensors.values() if values.ndim > 1)
    whole = {form.module: 0 for form in forms}
    for form in forms:
        whole[form.module] += form.values
    assert whole["mlp.up_proj"] == 2 * 96 * 64


def test_layers_are_told_as_spans():
    assert spans([7, 0, 1, 2, 2, 3]) == "0-3, 7"
    assert spans([]) == ""


def test_memory_is_what_serving_predicts_and_the_longest_row_just_fits(folder):
    report = inspect_model(str(folder), machine(10**12))
    memory = report.memory
    assert memory.context_bytes == row_bytes(report.geometry, 128, 4)
    assert memory.largest_context == 128
    assert memory.token_bytes == 2 * 2 * 2 * 16 * 4
    assert memory.weights_bytes == 4 * report.storage.parameters


def test_a_machine_without_room_is_named_with_both_numbers(folder):
    for without_room in (machine(1000), machine(10**12, device="metal", limit_bytes=1000)):
        report = inspect_model(str(folder), without_room)
        assert report.memory.largest_context == 0
        assert any("bytes, 1000 are available here" in problem for problem in report.problems)


def test_an_accelerator_is_asked_for_its_memory_and_its_form_of_the_weights(folder):
    report = inspect_model(str(folder), machine(10**12, device="metal", limit_bytes=10**9))
    assert (report.memory.device, report.memory.available_bytes) == ("metal", 10**9)
    assert report.problems == ()


def test_a_text_half_that_cannot_be_used_is_a_problem_and_the_rest_is_told(folder):
    (folder / "tokenizer.json").unlink()
    report = inspect_model(str(folder))
    assert report.text is None
    assert "tokenizer.json" in report.problems[0]
    assert report.geometry.layers == 2


def test_tensors_that_loading_would_refuse_are_named_before(folder):
    path = folder / "model.safetensors"
    tensors = {**mx.load(str(path)), "model.layers.0.odd.weight": mx.zeros((2,)), "x.rotary_emb.inv_freq": mx.zeros(2)}
    mx.eval(tensors)
    mx.save_safetensors(str(path), tensors)
    problems = inspect_model(str(folder)).problems
    assert problems == ("holds tensors that a llama model has no use for: model.layers.0.odd.weight",)


def test_what_a_model_does_otherwise_is_noted(tmp_path):
    tiny_foreign.write(tmp_path / "f", tiny_foreign.ARCHITECTURES["mamba2"])
    report = inspect_model(str(tmp_path / "f"))
    assert report.graph == "mlx-lm"
    assert not report.declaration.packed_segments
    assert any("served by mlx-lm" in note for note in report.notes)
    assert any("no chat template" in note for note in report.notes)
    tiny_model.write(tmp_path / "endless", eos=())
    (tmp_path / "endless/tokenizer_config.json").write_text("{}")
    assert any("no end token" in note for note in inspect_model(str(tmp_path / "endless")).notes)


def test_the_end_tokens_of_a_denoising_model_are_those_of_its_method(tmp_path):
    model = tiny_diffusion.build(vocab_size=tiny_model.VOCAB)
    tiny_diffusion.save(tmp_path / "m", model, eos_token_id=7)
    tiny_model.write(tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).write_bytes((tmp_path / "text" / name).read_bytes())
    assert inspect_model(str(tmp_path / "m")).text.eos_token_ids == DEFAULT_STOPPING_IDS


def test_a_gguf_file_is_told_by_its_own_types(tmp_path):
    report = inspect_model(str(write_gguf(tmp_path / "x.gguf", kind="Q5_0")))
    assert report.kind == "gguf"
    assert report.storage.dtypes.keys() == {"Q5_0", "F32"}
    assert {form.form for form in report.storage.forms} == {"Q5_0"}
    assert "tokenizer" in report.problems[0]


@pytest.mark.parametrize("damage", [b"{", b'{"model_type": "nobody_knows"}'])
def test_what_does_not_even_say_what_it_is_is_refused_by_file(folder, damage):
    (folder / "config.json").write_bytes(damage)
    with pytest.raises(ArtifactError, match=r"^m/config.json: "):
        inspect_model(str(folder))


def test_nothing_of_it_imports_mlx(folder):
    code = (
        "import sys\nfrom engine.execution.inspection import inspect_model\n"
        f"inspect_model({str(folder)!r})\nprint([name for name in ('mlx', 'mlx_lm', 'gguf') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_values_of_every_form_add_up_to_the_parameters(tmp_path):
    tensors = llama_tensors()
    forms = inspect_model(str(write_folder(tmp_path / "m", tensors))).storage.forms
    vectors = sum(values.size for values in tensors.values() if values.ndim == 1)
    report = inspect_model(str(tmp_path / "m"))
    assert sum(form.values for form in forms) + vectors == report.storage.parameters
    assert report.geometry.vocab_size == CONFIG["vocab_size"]
    assert np.prod(tensors["model.embed_tokens.weight"].shape) == forms_by_name(forms)["embed_tokens"].values


def forms_by_name(forms):
    return {form.module: form for form in forms}


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_no_family_is_blamed_for_tensors_that_its_graph_takes(tmp_path, family):
    for number, changes in enumerate(tiny_families.FAMILIES[family].cases.values()):
        config = tiny_families.config_of(family, changes)
        folder = tmp_path / str(number)
        tiny_families.save(folder, tiny_families.build(family, config), config)
        report = inspect_model(str(folder))
        assert not [problem for problem in report.problems if "no use for" in problem], changes
        assert report.memory.largest_context == report.geometry.context_length
        assert report.storage.parameters > 0


def test_tensors_that_a_graph_may_leave_are_no_problem(tmp_path):
    test_gemma4.write(tmp_path / "m", test_gemma4.SHARED, form=test_gemma4.with_unused_projections)
    assert not [problem for problem in inspect_model(str(tmp_path / "m")).problems if "no use for" in problem]
