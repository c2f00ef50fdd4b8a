"""What passes over canvases really hold, against what admission predicts."""

import gc

import mlx.core as mx
import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.resident_size import resident_bytes
from engine.contracts.composition import Composition
from engine.contracts.option_groups import DenoisingOptions
from engine.execution.checkpoints import CheckpointKeeper
from engine.execution.denoising_method import DenoisingMethod
from engine.execution.engine import Engine
from engine.execution.prefix_opening import no_prefixes, restore_nothing
from engine.execution.stepper import MethodStepper
from engine.generation.bindings.denoising import bind_denoising_model
from engine.generation.denoising import dispatch_denoising_unit
from engine.generation.memory import images_bytes, row_bytes, unit_tokens, workspace_bytes
from engine.generation.scopes import WiredScope
from tests.engine import tiny_denoiser
from tests.engine.execution.driving import settings
from tests.engine.generation.scripted_denoiser import make_row
from tests.engine.models import tiny_diffusion, tiny_vision

CANVAS, PROMPT, VOCAB = 48, 40, 4096


@pytest.fixture(scope="module")
def binding(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "tiny"
    model = tiny_diffusion.build(scale=6.0, canvas=CANVAS, vocab_size=VOCAB)
    tiny_diffusion.save(folder, model, canvas=CANVAS)
    found = bind_denoising_model(tiny_diffusion.graph(folder))
    mx.eval(found.table)
    return found


def rows(count, sampler):
    denoising = {"sampler": sampler, "max_denoising_steps": 4, "threshold": 1.0}
    return [
        make_row(tiny_diffusion.ids(seed, PROMPT), canvas=CANVAS, max_tokens=CANVAS, seed=seed, denoising=denoising)[0]
        for seed in range(count)
    ]


@pytest.mark.parametrize("sampler", ["confidence-threshold", "entropy-bound"])
@pytest.mark.parametrize("count", [1, 2])
def test_no_more_is_held_than_was_predicted_and_not_far_less(binding, sampler, count):
    """Rows take turns, and the unit of one is started before that of the other is read."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    running, pending = rows(count, sampler), []
    for row in running:
        row.admit([])
    for _ in range(5):
        for row in running:
            pending.append((row, dispatch_denoising_unit(binding, row)))
            if len(pending) == count:
                first, unit = pending.pop(0)
                first.receive(unit.read())
    for row, unit in pending:
        row.receive(unit.read())
    held = mx.get_peak_memory() - before
    geometry, composition = binding.geometry, Composition()
    predicted = count * row_bytes(geometry, PROMPT + CANVAS, 4)
    predicted += workspace_bytes(
        geometry, composition, step_tokens=unit_tokens(geometry, PROMPT), context_tokens=PROMPT + CANVAS
    )
    for row in running:
        row.close()
    assert held <= predicted
    assert predicted <= 3 * held


@pytest.mark.parametrize("dequantize", [True, False])
def test_weights_are_predicted_to_the_byte_with_the_table_that_feedback_needs(tmp_path, dequantize):
    model = tiny_diffusion.build(**tiny_diffusion.WIDE)
    tiny_diffusion.save(tmp_path, model, quantization=tiny_diffusion.quantize(model))
    found = bind_denoising_model(tiny_diffusion.graph(tmp_path, dequantize=dequantize))
    artifact = open_artifact(tmp_path)
    predicted = resident_bytes(artifact, element_bytes=4, dequantize=dequantize, pretranspose=False)
    assert found.weights_bytes == predicted
    table_bytes = tiny_diffusion.VOCAB * tiny_diffusion.WIDE["hidden_size"] * 4
    assert found.weights_bytes - found.graph.weights_bytes == (0 if dequantize else table_bytes)


def held_now():
    """What mlx holds once everything that nobody needs is gone."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def driven(binding, tmp_path):
    wired = WiredScope(limit_bytes=0, set_limit=mx.set_wired_limit, synchronize=mx.synchronize)
    keepers = no_prefixes(settings("m", tmp_path)), CheckpointKeeper(restore_nothing)
    return MethodStepper(DenoisingMethod(binding), wired, None, *keepers)


@pytest.mark.parametrize("dequantize", [True, False], ids=["dense", "packed"])
def test_what_a_model_holds_is_counted_with_its_unpacked_table_and_given_back(tmp_path, dequantize):
    model = tiny_diffusion.build(**tiny_diffusion.WIDE, vocab_size=VOCAB)
    tiny_diffusion.save(tmp_path, model, quantization=tiny_diffusion.quantize(model))
    del model
    predicted = resident_bytes(open_artifact(tmp_path), element_bytes=4, dequantize=dequantize, pretranspose=False)
    before = held_now()
    stepper = driven(bind_denoising_model(tiny_diffusion.graph(tmp_path, dequantize=dequantize)), tmp_path)
    stepper.probe()
    assert stepper.held_bytes == predicted
    assert held_now() - before == pytest.approx(predicted, rel=0.05)
    stepper.close()
    assert held_now() - before < predicted // 20


async def test_unloading_a_packed_model_tells_all_that_it_frees(tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    tiny_denoiser.write(folder, quantized=True)
    packed, dense = (
        resident_bytes(open_artifact(folder), element_bytes=4, dequantize=dequantize, pretranspose=False)
        for dequantize in (False, True)
    )
    monkeypatch.setattr("engine.runtime.host.Host.available_memory_bytes", lambda _host: 1000)
    engine = Engine(settings(folder, tmp_path, state_bytes=10**6))
    await engine.start()
    try:
        assert packed != dense
        assert engine.model.weights_bytes == packed
        assert (await engine.unload_model("tiny")).freed_bytes == packed
    finally:
        await engine.stop()


def test_default_options_never_ask_for_more_than_the_canvas(binding):
    row, _ = make_row(tiny_diffusion.ids(1, 4), canvas=CANVAS, max_tokens=10**6)
    assert row.next_canvas_tokens == CANVAS
    assert DenoisingOptions().max_canvas_length is None


@pytest.mark.parametrize("composed", [True, False])
@pytest.mark.parametrize("sizes", [{"intermediate_size": 400}, {"hidden_size": 160, "head_dim": 80}], ids=str)
def test_a_tower_holds_no_more_than_was_predicted_and_not_far_less(tmp_path, sizes, composed):
    vision = {"default_output_length": 64, "position_embedding_size": 128, "pooling_kernel_size": 2} | sizes
    tiny_vision.save(tmp_path, tiny_vision.build(vision))
    graph = tiny_diffusion.graph(tmp_path, library_arithmetic=not composed)
    image = tiny_vision.prompt_image(tmp_path, tiny_vision.picture(1, 64, 64))
    assert image.tokens == 64
    mx.eval(graph._tower(image.pixels))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(graph._tower(image.pixels))
    held = mx.get_peak_memory() - before
    predicted = images_bytes(graph.geometry, graph.composition, [image.tokens])
    assert held <= predicted
    assert predicted <= 4 * held
