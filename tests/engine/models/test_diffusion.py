"""DiffusionGemma: logits as mlx-vlm's in every pass and form of storage, states, feedback and adapters."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from engine.adapters.files import open_adapters
from engine.adapters.mounting import mount
from engine.artifacts.artifact import open_artifact
from engine.contracts.errors import GraphContractError
from engine.contracts.option_groups import AdapterSelection
from engine.models.registry import build_graph
from tests.engine.adapters import tiny_adapters
from tests.engine.models import tiny_diffusion, tiny_vision
from tests.engine.models.packed import relative_difference


@pytest.mark.parametrize("lengths", tiny_diffusion.READ.values(), ids=tiny_diffusion.READ)
@pytest.mark.parametrize("changes", tiny_diffusion.SHAPES.values(), ids=tiny_diffusion.SHAPES)
def test_every_pass_gives_mlx_vlms_logits(tmp_path, changes, lengths):
    model = tiny_diffusion.build(scale=3.0, **changes)
    tiny_diffusion.save(tmp_path, model)
    oracle = tiny_diffusion.Oracle(model)
    for how in ({"library_arithmetic": True}, {"pretranspose": True}):
        for wanted, found in tiny_diffusion.passes(oracle, tiny_diffusion.graph(tmp_path, **how), lengths):
            assert relative_difference(found, wanted) < 1e-5
            assert found.dtype == mx.float32
            assert mx.abs(wanted).max().item() > 1.0


def test_with_the_librarys_arithmetic_every_pass_gives_mlx_vlms_bits():
    """In a process of its own, because this one has another BLAS."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.engine.models.compare_diffusion_bits"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    compared = dict(line.rsplit(": ", 1) for line in ran.stdout.splitlines())
    assert len(compared) == len(tiny_diffusion.SHAPES) * (len(tiny_diffusion.READ) - 1) + 2 + len(tiny_vision.SHAPES)
    assert {case: answer for case, answer in compared.items() if answer != "equal"} == {}


def test_what_is_fed_back_changes_the_next_pass(tmp_path):
    """The first pass is conditioned too, on zeros: the norm after it stays."""
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    graph = tiny_diffusion.graph(tmp_path)
    state, canvas = tiny_diffusion.read(graph, [4, 9, 2]), tiny_diffusion.ids(1, tiny_diffusion.CANVAS)
    first = tiny_diffusion.logits(graph, canvas, state)
    zeros = mx.zeros((1, tiny_diffusion.CANVAS, 32))
    assert mx.array_equal(first, tiny_diffusion.logits(graph, canvas, state, zeros)).item()
    assert (
        relative_difference(tiny_diffusion.logits(graph, canvas, state, tiny_diffusion.fed_back(graph, first)), first)
        > 0.01
    )


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("scheme", [{"bits": 4, "group_size": 32}, {"bits": 4, "group_size": 64}], ids=str)
def test_quantized_models_give_mlx_vlms_logits(tmp_path, scheme, packed):
    model = tiny_diffusion.build(**tiny_diffusion.WIDE)
    dense = tiny_diffusion.Oracle(model).logits(tiny_diffusion.ids(0, 16), tiny_diffusion.Oracle(model).read([3, 4, 5]))
    mx.eval(dense)
    stated = tiny_diffusion.quantize(model, scheme)
    _, tensors = tiny_diffusion.save(tmp_path, model, quantization=stated)
    assert {"model.decoder.embed_tokens.scales", "model.decoder.layers.0.experts.down_proj.scales"} <= tensors.keys()
    oracle = tiny_diffusion.Oracle(model)
    rounded = oracle.logits(tiny_diffusion.ids(0, 16), oracle.read([3, 4, 5]))
    assert relative_difference(rounded, dense) > 1e-3
    graph = tiny_diffusion.graph(tmp_path, dequantize=not packed)
    for wanted, found in tiny_diffusion.passes(oracle, graph, [21]):
        assert relative_difference(found, wanted) < 1e-5


def test_a_quantized_table_is_unpacked_for_feedback_as_its_rows_are_looked_up(tmp_path):
    model = tiny_diffusion.build(**tiny_diffusion.WIDE)
    tiny_diffusion.save(tmp_path, model, quantization=tiny_diffusion.quantize(model))
    table = tiny_diffusion.graph(tmp_path, dequantize=False).dequant_embed_weight()
    stored = model.model.decoder.embed_tokens
    assert table.shape == (tiny_diffusion.VOCAB, 64)
    assert mx.array_equal(table, stored(mx.arange(tiny_diffusion.VOCAB))).item()


def test_a_dense_table_is_shared_and_never_copied(tmp_path):
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    graph = tiny_diffusion.graph(tmp_path)
    assert graph.dequant_embed_weight() is graph.dequant_embed_weight()


def test_soft_embeddings_are_the_mean_row_times_the_root_of_the_size(tmp_path):
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    graph = tiny_diffusion.graph(tmp_path)
    table = graph.dequant_embed_weight()
    shares = mx.softmax(mx.random.normal((1, 5, tiny_diffusion.VOCAB), key=mx.random.key(2)), axis=-1)
    found = np.array(graph.soft_embeddings(shares, table), dtype=np.float64)
    wanted = np.array(shares, np.float64) @ np.array(table, np.float64) * 32**0.5
    assert np.abs(found - wanted).max() < 1e-5
    assert graph.embed_scale == 32**0.5
    assert graph.soft_embeddings(shares, table.astype(mx.bfloat16)).dtype == mx.bfloat16


def test_a_state_does_not_change_under_passes_and_a_closed_one_holds_nothing(tmp_path):
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    graph = tiny_diffusion.graph(tmp_path)
    state = tiny_diffusion.read(graph, tiny_diffusion.ids(1, 20))
    before = [mx.array(array) for array in state.arrays()]
    mx.eval(before, tiny_diffusion.logits(graph, tiny_diffusion.ids(2, 16), state))
    assert all(mx.array_equal(one, other).item() for one, other in zip(before, state.arrays(), strict=True))
    sliding, full = (tiny_diffusion.WINDOW - 1) * 2 * 8, 20 * 1 * 16
    assert state.nbytes == 2 * 4 * (sliding + full)
    state.close()
    state.close()
    assert state.arrays() == []
    assert state.nbytes == 0


def test_rows_do_not_share_what_they_hold(tmp_path):
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    graph = tiny_diffusion.graph(tmp_path)
    canvas = tiny_diffusion.ids(3, 16)
    alone = tiny_diffusion.logits(graph, canvas, tiny_diffusion.read(graph, [1, 2, 3], [4, 5]))
    one, other = tiny_diffusion.read(graph, [1, 2, 3]), tiny_diffusion.read(graph, [9, 8, 7, 6])
    graph.extend_prefill(mx.array([[4, 5]]), one)
    graph.extend_prefill(mx.array([[11]]), other)
    assert mx.array_equal(tiny_diffusion.logits(graph, canvas, one), alone).item()
    assert not mx.array_equal(tiny_diffusion.logits(graph, canvas, other), alone).item()


def test_the_encoder_reads_padding_where_an_image_would_stand(tmp_path):
    """As mlx-vlm does without pixels; canvases are left alone, since no image stands there."""
    model = tiny_diffusion.build()
    model.config.image_token_id = 40
    tiny_diffusion.save(tmp_path, model, image_token_id=40)
    graph, oracle = tiny_diffusion.graph(tmp_path), tiny_diffusion.Oracle(model)
    prompt, canvas = [3, 40, 40, 7], [40, *tiny_diffusion.ids(1, 15)]
    found = tiny_diffusion.logits(graph, canvas, tiny_diffusion.read(graph, prompt))
    assert relative_difference(found, oracle.logits(canvas, oracle.read(prompt))) < 1e-5
    assert mx.array_equal(found, tiny_diffusion.logits(graph, canvas, tiny_diffusion.read(graph, [3, 0, 0, 7]))).item()


def test_an_adapter_stays_with_its_row_through_every_pass(tmp_path):
    model = tiny_diffusion.build()
    tiny_diffusion.save(tmp_path / "model", model)
    oracle = tiny_diffusion.Oracle(model)
    prompt, more, canvas = tiny_diffusion.ids(1, 12), tiny_diffusion.ids(2, 5), tiny_diffusion.ids(3, 16)
    base = oracle.logits(canvas, oracle.read(prompt, more))
    mx.eval(base)
    tensors = tiny_adapters.adapt(model)
    folder = tiny_adapters.write_mlx(tmp_path / "adapter", tensors)
    wanted = oracle.logits(canvas, oracle.read(prompt, more))
    graph = tiny_diffusion.graph(tmp_path / "model", adapters=True)
    (files,) = open_adapters((("a", folder),))
    info = mount(files, graph.adapters, open_artifact(tmp_path / "model"), compute_dtype="float32")
    assert (info.applied_tensors, info.skipped_tensors) == (len(tensors), ())
    assert not [target for target in graph.adapters.targets if "self_conditioning" in target]
    plain = graph.prefill(mx.array([prompt]))
    adapted = graph.prefill(mx.array([prompt]), (AdapterSelection(id="a"),))
    for state in (adapted, plain):
        graph.extend_prefill(mx.array([more]), state)
    assert relative_difference(wanted, base) > 0.01
    assert relative_difference(tiny_diffusion.logits(graph, canvas, adapted), wanted) < 1e-5
    assert relative_difference(tiny_diffusion.logits(graph, canvas, plain), base) < 1e-5


def test_the_graph_declares_its_method_and_no_other_graph_takes_the_model(tmp_path):
    tiny_diffusion.save(tmp_path, tiny_diffusion.build())
    graph = tiny_diffusion.graph(tmp_path)
    declared = graph.graph_capabilities
    assert (declared.method, declared.packed_segments, declared.media) == ("denoising", False, None)
    assert (graph.canvas_length, graph.model_type, graph.eos_token_ids) == (16, "diffusion_gemma", (1,))
    assert graph.geometry.layer_key_values == (16, 16)
    with pytest.raises(GraphContractError, match="a diffusion_gemma model has no graph of the autoregressive method"):
        build_graph(open_artifact(tmp_path).config, None, None)
