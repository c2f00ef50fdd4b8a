"""GGUF tensors as mlx arrays: every type bit for bit, and damage that shows only when tensors are read."""

import mlx.core as mx
import numpy as np
import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.weights import QuantizedTensor, WeightStore
from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError
from tests.engine.artifacts.tiny_files import gguf_name, llama_tensors, permuted, write_gguf

QUERY = "model.layers.0.self_attn.q_proj"


def take_all(artifact):
    store = WeightStore(artifact)
    found = {name: store.take(name) for name in artifact.tensors}
    store.audit()
    return found


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_gguf_tensors_equal_those_of_mlx_bit_for_bit(tmp_path, kind):
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    theirs, compared = mx.load(str(path)), 0
    for name, tensor in take_all(open_artifact(path)).items():
        stem = gguf_name(name).removesuffix(".weight")
        for part in ("weight", "scales", "biases"):
            if part == "weight" or isinstance(tensor, QuantizedTensor):
                assert mx.array_equal(getattr(tensor, part), theirs.pop(f"{stem}.{part}")), (name, part)
                compared += 1
    assert theirs == {}
    assert compared > len(llama_tensors()) - 1


def test_bfloat16_in_gguf_loses_no_bit(tmp_path):
    found = take_all(open_artifact(write_gguf(tmp_path / "tiny.gguf", kind="BF16")))
    tensor = found[f"{QUERY}.weight"].weight
    expected = mx.array(permuted(llama_tensors()[f"{QUERY}.weight"], 4)).astype(mx.bfloat16)
    assert tensor.dtype == mx.bfloat16
    assert mx.array_equal(tensor, expected)


def test_gguf_scales_beyond_float16_are_refused(tmp_path):
    tensors = llama_tensors()
    tensors[f"{QUERY}.weight"] = tensors[f"{QUERY}.weight"] * 1e6
    artifact = open_artifact(write_gguf(tmp_path / "tiny.gguf", tensors, kind="Q8_0"))
    with pytest.raises(CorruptArtifactError, match="holds scales beyond float16"):
        WeightStore(artifact).take(f"{QUERY}.weight")


def test_a_gguf_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    artifact = open_artifact(path)
    path.write_bytes(path.read_bytes()[:-4096])
    store = WeightStore(artifact)
    with pytest.raises(CorruptArtifactError, match=r"^tiny.gguf: ends inside tensor"):
        for name in artifact.tensors:
            store.take(name)


def test_gguf_tensors_without_use_are_reported_by_their_own_names(tmp_path):
    path = write_gguf(
        tmp_path / "tiny.gguf", extra=lambda writer: writer.add_tensor("blk.0.odd.weight", np.zeros(4, np.float32))
    )
    with pytest.raises(UnsupportedArtifactError, match=r"^tiny.gguf: holds tensors .*: blk.0.odd.weight$"):
        store = WeightStore(open_artifact(path))
        for name in llama_tensors():
            store.take(name)
        store.audit()
