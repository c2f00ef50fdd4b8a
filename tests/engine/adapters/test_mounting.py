"""Mounted adapters against mlx-lm's own LoRA layers, alone and beside rows with other adapters or none."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from engine.adapters.files import open_adapters
from engine.adapters.mounting import mount
from engine.artifacts.artifact import open_artifact
from engine.contracts.adapters import AdapterTarget
from engine.contracts.errors import CorruptArtifactError
from engine.contracts.graph import PackedSegment
from engine.contracts.option_groups import AdapterSelection
from engine.ops.adapted import AdapterSites, LowRankPair
from engine.ops.linear import DenseLinear
from tests.engine.adapters import tiny_adapters
from tests.engine.models import tiny_families, tiny_llama
from tests.engine.models.packed import relative_difference
from tests.engine.models.test_gguf_families import MODELS
from tests.engine.models.test_gguf_families import write as write_gguf

PROMPT = tiny_llama.random_prompt(3, 21)
FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "olmo2", "qwen2", "granite", "gemma4_text", "qwen3_5"]


def selected(*names):
    return tuple(AdapterSelection(id=name) for name in names)


def written(family, folder, case=0):
    """A model of `family` in `folder`, and the mlx-lm model with the same weights."""
    config = tiny_families.config_of(family, list(tiny_families.FAMILIES[family].cases.values())[case])
    model = tiny_families.build(family, config)
    tiny_families.save(folder, model, config)
    return model


def mounted(folder, **adapters):
    """The model in `folder`, bound with adapters."""
    return bound(folder, adapters)[0]


def bound(folder, adapters, **composition):
    binding = tiny_llama.bind(folder, adapters=True, **composition)
    infos = [
        mount(files, binding.graph.adapters, open_artifact(folder), compute_dtype="float32")
        for files in open_adapters(tuple(adapters.items()))
    ]
    return binding, infos


def logits_of(binding, *rows, prompt=PROMPT):
    """Logits of `prompt` for each row's adapters, all rows packed: all tokens but one, then the last."""
    caches = [binding.make_cache() for _ in rows]
    found = [[] for _ in rows]
    for part in (prompt[:-1], prompt[-1:]):
        segments = [PackedSegment(len(part), cache, row) for cache, row in zip(caches, rows, strict=True)]
        flat = binding.project(binding.hidden(mx.array([part * len(rows)], dtype=mx.uint32), segments))[0]
        for place, logits in enumerate(mx.split(flat, len(rows), axis=0)):
            found[place].append(logits)
    return [mx.concatenate(parts, axis=0) for parts in found]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["mlx", "peft"])
def test_a_mounted_adapter_gives_the_logits_of_mlx_lms_own_layers(tmp_path, family, layout):
    model = written(family, tmp_path / "model")
    base = tiny_llama.Oracle(model).logits(PROMPT)
    mx.eval(base)
    tensors = tiny_adapters.adapt(model)
    write = tiny_adapters.write_mlx if layout == "mlx" else tiny_adapters.write_peft
    binding, (info,) = bound(tmp_path / "model", {"a": write(tmp_path / "adapter", tensors)})
    plain, adapted, again = logits_of(binding, (), selected("a"), selected("a"))
    wanted = tiny_llama.Oracle(model).logits(PROMPT)
    assert relative_difference(wanted, base) > 0.01
    assert relative_difference(adapted, wanted) < 1e-5
    assert relative_difference(again, wanted) < 1e-5
    assert relative_difference(plain, base) < 1e-5
    assert info.applied_tensors == len(tensors)
    assert info.skipped_tensors == ()
    assert (info.rank, info.scale) == (tiny_adapters.RANK, pytest.approx(tiny_adapters.SCALE))
    assert info.resident_bytes >= sum(tensor.nbytes for tensor in tensors.values())


def two_adapters(tmp_path):
    tensors = [tiny_adapters.adapt(written("llama", tmp_path / "model"), seed=seed) for seed in (1, 2)]
    folders = {name: tiny_adapters.write_mlx(tmp_path / name, own) for name, own in zip("ab", tensors, strict=True)}
    return tmp_path / "model", folders


def test_rows_without_adapters_keep_their_bits_beside_rows_with_them(tmp_path):
    folder, adapters = two_adapters(tmp_path)
    with_adapters = mounted(folder, **adapters)
    base = tiny_llama.bind(folder)
    company = logits_of(with_adapters, (), selected("a"), (), selected("b"), selected("a", "b"))
    among_base = logits_of(base, (), (), (), (), ())
    for place in (0, 2):
        assert mx.array_equal(company[place], among_base[place])
    assert not any(mx.array_equal(company[place], among_base[place]) for place in (1, 3, 4))


@pytest.mark.parametrize("tile", [None, 8])
def test_a_row_is_the_same_in_any_company(tmp_path, tile):
    folder, adapters = two_adapters(tmp_path)
    binding, _ = bound(folder, adapters, row_tile_tokens=tile)
    rows = [(), selected("a"), selected("b"), selected("a", "b"), selected("b"), (AdapterSelection(id="a", scale=0.5),)]
    together = logits_of(binding, *rows)
    alone = [logits_of(binding, row)[0] for row in rows]
    for found, wanted in zip(together, alone, strict=True):
        assert relative_difference(found, wanted) < 1e-5
        assert tile is None or mx.array_equal(found, wanted)
    assert min(relative_difference(alone[0], other) for other in alone[1:]) > 0.01


def test_a_strength_of_the_request_replaces_the_adapters_own(tmp_path):
    folder, adapters = two_adapters(tmp_path)
    binding = mounted(folder, **adapters)
    scaled = [(AdapterSelection(id="a", scale=scale),) for scale in (tiny_adapters.SCALE, 0.0)]
    own, same, none, base = logits_of(binding, selected("a"), *scaled, ())
    assert relative_difference(same, own) < 1e-6
    assert relative_difference(none, base) < 1e-6


def test_stacked_adapters_are_added_in_order_each_to_its_own_columns():
    mx.random.seed(4)
    weight, x = mx.random.normal((24, 16)), mx.random.normal((1, 5, 16))
    pairs = {name: LowRankPair(mx.random.normal((16, 2)), mx.random.normal((2, 12)), 0.5) for name in "ab"}
    sites = AdapterSites(None)
    product = sites.place(
        DenseLinear(weight), [AdapterTarget(module=name, in_features=16, out_features=12) for name in ("q", "k")]
    )
    sites.attach("a", {"q": pairs["a"], "k": pairs["b"]})
    sites.attach("b", {"k": pairs["a"]})
    rows = [(2, ()), (1, selected("a", "b")), (1, ()), (1, selected("a", "b"))]
    sites.begin([PackedSegment(length, [], adapters) for length, adapters in rows])
    wanted = np.array(x @ weight.T)
    for token in (2, 4):
        own = np.array(x)[0, token]
        low = {name: 0.5 * (own @ np.array(pair.a)) @ np.array(pair.b) for name, pair in pairs.items()}
        wanted[0, token] += np.concatenate([low["a"], low["b"] + low["a"]])
    found = np.array(product(x))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert np.array_equal(found[0, [0, 1, 3]], np.array(x @ weight.T)[0, [0, 1, 3]])


def test_mounted_adapters_count_as_weights_until_the_model_is_closed(tmp_path):
    folder, adapters = two_adapters(tmp_path)
    before = tiny_llama.bind(folder, adapters=True).graph.weights_bytes
    binding, infos = bound(folder, adapters)
    assert binding.graph.weights_bytes == before + sum(info.resident_bytes for info in infos)
    binding.graph.close()
    assert binding.graph.adapters.nbytes == 0


def test_an_adapter_over_a_quantized_base_adds_the_same(tmp_path):
    model = written("llama", tmp_path / "model")
    tensors = tiny_adapters.adapt(model)
    config = tiny_families.config_of("llama", next(iter(tiny_families.FAMILIES["llama"].cases.values())))
    base = tiny_families.build("llama", config)
    nn.quantize(base, group_size=32, bits=4)
    stored = config | {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(stored))
    mx.save_safetensors(str(tmp_path / "quantized" / "model.safetensors"), dict(tree_flatten(base.parameters())))
    tiny_adapters.adapt(base)
    binding = mounted(tmp_path / "quantized", a=tiny_adapters.write_mlx(tmp_path / "a", tensors))
    (found,) = logits_of(binding, selected("a"))
    assert relative_difference(found, tiny_llama.Oracle(base).logits(PROMPT)) < 1e-4


def test_numbers_that_are_not_finite_are_refused_and_nothing_is_mounted(tmp_path):
    tensors = tiny_adapters.adapt(written("llama", tmp_path / "model"))
    name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.lora_b"))
    tensors[name] = tensors[name] * float("nan")
    binding = tiny_llama.bind(tmp_path / "model", adapters=True)
    (files,) = open_adapters([("a", tiny_adapters.write_mlx(tmp_path / "a", tensors))])
    with pytest.raises(CorruptArtifactError, match=r"a/adapters.safetensors: .*not finite.*layers.1.mlp.down_proj"):
        mount(files, binding.graph.adapters, open_artifact(tmp_path / "model"), compute_dtype="float32")
    assert binding.graph.adapters.nbytes == 0


@pytest.mark.parametrize("architecture", ["llama", "smollm3", "granite", "glm4", "qwen2", "phi3"])
def test_an_adapter_over_a_gguf_file_changes_the_rows_that_it_was_made_for(tmp_path, architecture):
    """Converters of some families hold the rows of queries and keys in another order than the adapter's."""
    family, changes = MODELS[architecture]
    config = tiny_families.config_of(family, changes)
    model = tiny_families.build(family, config)
    write_gguf(tmp_path / "model.gguf", architecture, model, config)
    folder = tiny_adapters.write_peft(tmp_path / "a", tiny_adapters.adapt(model))
    (found,) = logits_of(mounted(tmp_path / "model.gguf", a=folder), selected("a"))
    assert relative_difference(found, tiny_llama.Oracle(model).logits(PROMPT)) < 1e-5
