"""Predicted memory against what is really held: weights, keys and values, the whole of a running model."""

import subprocess
import sys

import mlx.core as mx
import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.resident_size import resident_bytes
from engine.artifacts.weights import WeightStore
from engine.contracts.composition import Composition
from engine.contracts.errors import MissingArtifactError, PromptTooLongError
from engine.contracts.graph import PackedSegment
from engine.contracts.memory import MemoryLoad
from engine.execution.engine import Engine
from engine.execution.estimating import unloaded_facts
from engine.execution.state_room import estimate
from engine.generation.bindings.autoregressive import bind_mlx_autoregressive_graph
from engine.generation.memory import usable_bytes
from engine.models.reading import WeightReader
from engine.models.registry import build_graph
from engine.runtime import activation
from engine.runtime.host import Host
from engine.runtime.memory import memory_in_use
from engine.runtime.policy import LayoutPolicy
from tests.engine import tiny_model
from tests.engine.execution.driving import settings
from tests.engine.machines import FreeMemory, machine
from tests.engine.models import tiny_llama

CONTEXT = 2048


def bound(path, *, pretranspose=False, dequantize=True, dtype="float32"):
    layout = LayoutPolicy(
        compute_dtype=dtype, dequantize=dequantize, pretranspose_linear=pretranspose, prefill_step_tokens=64
    )
    artifact = open_artifact(path)
    store = WeightStore(artifact)
    reader = WeightReader(store, layout)
    graph = build_graph(artifact.config, reader, Composition(compute_dtype=dtype, prefill_chunk_tokens=64))
    reader.close()
    store.close()
    return artifact, bind_mlx_autoregressive_graph(graph)


@pytest.mark.parametrize("pretranspose", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_predicted_to_the_byte(tmp_path, dtype, tied, pretranspose):
    tiny_llama.write(tmp_path, tie_word_embeddings=tied)
    artifact, binding = bound(tmp_path, dtype=dtype, pretranspose=pretranspose)
    element_bytes = 4 if dtype == "float32" else 2
    predicted = resident_bytes(artifact, element_bytes=element_bytes, dequantize=True, pretranspose=pretranspose)
    assert predicted == binding.weights_bytes


def test_an_estimate_needs_no_mlx_and_equals_that_of_the_loaded_model(tmp_path):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    code = f"""
import sys, pathlib
from engine.contracts.memory import MemoryLoad
from engine.execution.estimating import unloaded_facts
from engine.execution.resident import EngineSettings
from engine.execution.state_room import estimate
folder = {str(tmp_path / "tiny")!r}
settings = EngineSettings(model=folder, state_dir=pathlib.Path("x"), device="cpu", max_rows=8, state_bytes=10**6)
print(estimate(unloaded_facts(settings), MemoryLoad(prompt_tokens=300, max_tokens=50, rows=2)))
assert "mlx.core" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    asked = settings(tmp_path / "tiny", tmp_path, state_bytes=10**6)
    wanted = estimate(unloaded_facts(asked), MemoryLoad(prompt_tokens=300, max_tokens=50, rows=2))
    assert done.stdout.strip() == str(wanted)


async def test_the_estimate_of_a_served_model_is_what_admission_goes_by(tmp_path):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    asked = settings(tmp_path / "tiny", tmp_path, state_bytes=10**6)
    engine = Engine(asked)
    await engine.start()
    try:
        load = MemoryLoad(prompt_tokens=300, max_tokens=50, rows=2)
        found = engine.estimate_memory(load, model="")
        assert found == estimate(unloaded_facts(asked), load)
        assert found.kv_bytes == 2 * 512 * 2 * 2 * 2 * 16 * 4
        assert found.max_context_tokens == 256 * (10**6 // (256 * 512))
        assert found.fits
        assert not engine.estimate_memory(MemoryLoad(prompt_tokens=300, max_tokens=50, rows=5), model="").fits
        with pytest.raises(PromptTooLongError):
            engine.estimate_memory(MemoryLoad(prompt_tokens=CONTEXT, max_tokens=1), model="")
        cut = engine.estimate_memory(MemoryLoad(prompt_tokens=2000, max_tokens=10**9), model="")
        assert cut.kv_bytes == CONTEXT * 512
    finally:
        await engine.stop()


@pytest.mark.parametrize("changes", [{}, {"state_bytes": 10**6}])
async def test_a_reading_tells_what_the_smallest_request_takes_and_what_is_there(tmp_path, changes):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    engine = Engine(settings(tmp_path / "tiny", tmp_path, **changes))
    assert engine.memory() is None
    await engine.start()
    try:
        reading = engine.memory()
        smallest = engine.estimate_memory(MemoryLoad(prompt_tokens=1, max_tokens=1), model="")
        assert reading.smallest_request_bytes == smallest.kv_bytes + (0 if changes else smallest.workspace_bytes)
        assert reading.state_limit_bytes == engine.load().state_limit_bytes
        assert reading.active_bytes >= engine.model.weights_bytes
        assert reading.free_bytes > reading.smallest_request_bytes
        await engine.unload_model("tiny")
        assert engine.memory() is None
    finally:
        await engine.stop()


def test_the_longest_context_is_where_admission_ends(tmp_path):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    facts = unloaded_facts(settings(tmp_path / "tiny", tmp_path, state_bytes=10**6))
    most = estimate(facts, MemoryLoad(prompt_tokens=1, max_tokens=1)).max_context_tokens
    assert 0 < most < CONTEXT
    assert estimate(facts, MemoryLoad(prompt_tokens=most, max_tokens=0)).fits
    assert not estimate(facts, MemoryLoad(prompt_tokens=most + 1, max_tokens=0)).fits


def test_a_long_stated_context_takes_nothing_from_rows_that_do_not_use_it(tmp_path):
    tiny_model.write(tmp_path / "long", max_position_embeddings=10**7)
    facts = unloaded_facts(settings(tmp_path / "long", tmp_path), machine(10**8))
    most = estimate(facts, MemoryLoad(prompt_tokens=1, max_tokens=1)).max_context_tokens
    assert 4_000 < most < 10**6
    longest = estimate(facts, MemoryLoad(prompt_tokens=most, max_tokens=0))
    assert longest.fits
    assert longest.total_bytes <= longest.budget_bytes == facts.weights_bytes + facts.state_bytes
    assert not estimate(facts, MemoryLoad(prompt_tokens=most + 1, max_tokens=0)).fits
    assert not estimate(facts, MemoryLoad(prompt_tokens=most, max_tokens=0, rows=2)).fits
    assert estimate(facts, MemoryLoad(prompt_tokens=300, max_tokens=50, rows=8)).fits


@pytest.mark.parametrize(("device", "limit_bytes"), [("metal", 2 * 10**7), ("cuda", 2 * 10**7)])
def test_an_accelerator_bounds_the_estimate_by_its_own_memory_however_much_the_host_has(tmp_path, device, limit_bytes):
    tiny_model.write(tmp_path / "long", max_position_embeddings=10**7)
    asked = settings(tmp_path / "long", tmp_path)
    facts = unloaded_facts(asked, machine(10**12, device=device, limit_bytes=limit_bytes))
    assert facts.composition.device == device
    assert facts.state_bytes == usable_bytes(limit_bytes - facts.weights_bytes)
    most = estimate(facts, MemoryLoad(prompt_tokens=1, max_tokens=1)).max_context_tokens
    assert 0 < most < 10**6
    assert not estimate(facts, MemoryLoad(prompt_tokens=most + 1, max_tokens=0)).fits
    roomy = unloaded_facts(asked, machine(10**12, device=device, limit_bytes=100 * limit_bytes))
    assert estimate(roomy, MemoryLoad(prompt_tokens=most + 1, max_tokens=0)).fits


def test_what_other_models_hold_of_a_device_is_not_planned_with(tmp_path):
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    asked = settings(tmp_path / "tiny", tmp_path)
    empty, shared = (
        unloaded_facts(asked, machine(10**12, device="metal", limit_bytes=10**8, active_bytes=held))
        for held in (0, 4 * 10**7)
    )
    assert empty.state_bytes - shared.state_bytes == usable_bytes(4 * 10**7)


async def test_a_device_bounds_the_loaded_model_as_the_estimate_before_the_load_has_said(tmp_path, monkeypatch):
    """The device of this test always holds as much as others do before the load."""
    tiny_model.write(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    limit_bytes, others_bytes = 10**8, 3 * 10**7
    monkeypatch.setattr(activation, "device_memory_bytes", lambda _: limit_bytes)
    monkeypatch.setattr(activation, "active_memory_bytes", lambda: others_bytes)
    asked = settings(tmp_path / "tiny", tmp_path)
    predicted = unloaded_facts(asked, memory_in_use("cpu", FreeMemory(10**12)))
    monkeypatch.setattr(Host, "available_memory_bytes", lambda _: 10**12)
    engine = Engine(asked)
    await engine.start()
    try:
        assert engine.load().state_limit_bytes == usable_bytes(limit_bytes - others_bytes)
        assert predicted.state_bytes == usable_bytes(limit_bytes - others_bytes - engine.model.weights_bytes)
        assert engine.memory().active_limit_bytes == limit_bytes
    finally:
        await engine.stop()


def test_a_model_that_is_not_here_is_not_fetched(tmp_path):
    with pytest.raises(MissingArtifactError):
        unloaded_facts(settings(tmp_path / "nothing", tmp_path))


@pytest.mark.demo_model
@pytest.mark.timeout(300)
def test_the_demo_model_takes_what_was_predicted(demo_model_path, tmp_path):
    """Within a tenth: weights alone, and the peak while a 500-token prompt is read."""
    tokens = 500
    facts = unloaded_facts(settings(demo_model_path, tmp_path))
    step_tokens = facts.prefill_policy.chunk_size(tokens)
    predicted = estimate(facts, MemoryLoad(prompt_tokens=tokens, max_tokens=0))
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    _, binding = bound(demo_model_path)
    mx.clear_cache()
    weights_bytes = mx.get_active_memory() - before_bytes
    assert weights_bytes == pytest.approx(predicted.weights_bytes, rel=0.1)
    caches = binding.make_cache()
    mx.reset_peak_memory()
    for start in range(0, tokens, step_tokens):
        width = min(step_tokens, tokens - start)
        hidden = binding.hidden(mx.zeros((1, width), dtype=mx.uint32), [PackedSegment(width, caches)])
        mx.eval(binding.project(hidden[:, -1:]), [cache.arrays() for cache in caches])
    state_bytes = sum(cache.nbytes for cache in caches)
    assert state_bytes == predicted.kv_bytes
    peak_bytes = mx.get_peak_memory() - before_bytes
    assert peak_bytes == pytest.approx(predicted.total_bytes, rel=0.1)
