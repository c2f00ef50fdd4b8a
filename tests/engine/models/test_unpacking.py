"""Matrices filled by compiled code: the bits of the library's own way, joined in order, refused when damaged."""

import threading
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from engine.artifacts.artifact import open_artifact
from engine.artifacts.weights import WeightStore
from engine.contracts.errors import CorruptArtifactError, GraphContractError, UnsupportedArtifactError
from engine.models.reading import WeightReader
from engine.runtime.policy import LayoutPolicy
from engine.runtime.unpack_kernel import open_unpack_kernel
from tests.engine.artifacts.tiny_files import llama_tensors, write_folder, write_gguf

LAYER = "model.layers.0"
ATTENTION = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    made = open_unpack_kernel(tmp_path_factory.mktemp("compiled"))
    if made is None:
        pytest.skip("there is no C compiler")
    return made


def reader_of(path, kernel, *, pretranspose=False, dequantize=True, **hooks):
    layout = LayoutPolicy(
        compute_dtype="float32", dequantize=dequantize, pretranspose_linear=pretranspose, prefill_step_tokens=32
    )
    return WeightReader(WeightStore(open_artifact(path)), layout, unpack_kernel=kernel, **hooks)


def read_all(reader):
    """Some products, joined and single, and the table, after everything has settled."""
    table = reader.embedding("model.embed_tokens")
    found = [table, reader.tied_head(table)]
    found += [reader.linear(*ATTENTION), reader.linear(f"{LAYER}.mlp.down_proj")]
    for name in [*llama_tensors()]:
        module = name.removesuffix(".weight")
        if "norm" in name:
            reader.vector(name)
        elif module not in (*ATTENTION, f"{LAYER}.mlp.down_proj", "model.embed_tokens"):
            reader.linear(module)
    reader.finish()
    return [np.array(one.arrays()[0]) for one in found]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F32", "F16", "BF16"])
@pytest.mark.parametrize("pretranspose", [False, True])
def test_filled_matrices_have_the_bits_of_those_that_were_read_apart(tmp_path, kernel, kind, pretranspose):
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    filled = read_all(reader_of(path, kernel, pretranspose=pretranspose))
    apart = read_all(reader_of(path, None, pretranspose=pretranspose))
    assert filled[1].shape == ((64, 48) if pretranspose else (48, 64))
    assert filled[2].shape == ((64, 128) if pretranspose else (128, 64))
    for one, other in zip(filled, apart, strict=True):
        assert one.tobytes() == other.tobytes()


class HeldKernel:
    """Counts what is filled, by its form; fills nothing before `gate` is set."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.handles = kernel.handles
        self.filled = Counter()
        self.gate = threading.Event()

    def fill(self, form, *arguments):
        assert self.gate.wait(60)
        self.filled[form] += 1
        return self._kernel.fill(form, *arguments)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matrices_of_a_folder_are_filled_as_those_of_a_gguf_file_are(tmp_path, kernel, dtype):
    folder = write_folder(tmp_path / "tiny")
    tensors = {name: mx.array(value).astype(getattr(mx, dtype)) for name, value in llama_tensors().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    counting = HeldKernel(kernel)
    counting.gate.set()
    filled = read_all(reader_of(folder, counting))
    assert counting.filled == {{"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]: 1 + 2 * 7}
    for one, other in zip(filled, read_all(reader_of(folder, None)), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("change", ["another dtype", "another size", "another shape", "a tensor less"])
def test_a_file_that_another_has_replaced_is_refused(tmp_path, kernel, change):
    folder = write_folder(tmp_path / "tiny")
    reader, tensors = reader_of(folder, kernel), llama_tensors()
    table = tensors["model.embed_tokens.weight"]
    match change:
        case "another dtype":
            tensors["model.embed_tokens.weight"] = table.view(np.int32)
        case "another size":
            tensors["model.embed_tokens.weight"] = np.concatenate([table, table])
        case "another shape":
            tensors["model.embed_tokens.weight"] = table.T.copy()
        case _:
            del tensors["model.embed_tokens.weight"]
    write_folder(folder, tensors)
    with pytest.raises(CorruptArtifactError, match="has changed since its header was validated"):
        reader.linear(*ATTENTION)
    reader.close()


def test_a_matrix_of_many_jobs_is_whole(tmp_path, kernel, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    whole = read_all(reader_of(path, kernel))
    monkeypatch.setattr("engine.models.unpacking.JOB_VALUES", 3 * 64)
    for one, other in zip(read_all(reader_of(path, kernel)), whole, strict=True):
        assert one.tobytes() == other.tobytes()


def test_weights_that_stay_packed_are_not_filled(tmp_path, kernel):
    path = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    product = reader_of(path, kernel, dequantize=False).linear(*ATTENTION)
    assert product.arrays()[0].dtype == mx.uint32


def test_scales_beyond_float16_are_refused_by_the_end_of_the_load(tmp_path, kernel):
    tensors = llama_tensors()
    tensors[f"{ATTENTION[0]}.weight"] = tensors[f"{ATTENTION[0]}.weight"] * 1e6
    reader = reader_of(write_gguf(tmp_path / "tiny.gguf", tensors, kind="Q8_0"), kernel)
    with pytest.raises(CorruptArtifactError, match=r"tensor .* holds scales beyond float16"):
        read_all(reader)
    reader.close()


def test_a_file_that_shrinks_meanwhile_is_refused_and_leaves_no_thread(tmp_path, kernel):
    path = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    reader = reader_of(path, kernel)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CorruptArtifactError, match="ends inside tensor"):
        read_all(reader)
    reader.close()


def test_others_get_the_interpreter_once_when_all_is_laid_out_and_their_turn_while_it_is_filled(tmp_path, kernel):
    events, held = [], HeldKernel(kernel)

    def others_turn():
        events.append(reader.read_bytes)
        if "free" in events:
            held.gate.set()

    reader = reader_of(
        write_gguf(tmp_path / "tiny.gguf", kind="Q4_1"),
        held,
        before_each=others_turn,
        before_waiting=lambda: events.append("free"),
    )
    laid_out = reader.embedding("model.embed_tokens"), reader.linear(*ATTENTION)
    assert reader.read_bytes == 0
    with pytest.raises(UnsupportedArtifactError, match="no use for"):
        reader.finish()
    assert events[:4] == [0, 0, "free", 0]
    assert held.filled == {"Q4_1": 4}
    assert reader.read_bytes == 40 * (48 + 64 + 32 + 32)
    assert all(np.isfinite(np.array(one.arrays()[0])).all() for one in laid_out)


def test_a_load_ends_while_values_are_waited_for(tmp_path, kernel):
    class UnwantedError(Exception):
        pass

    def leave():
        if waiting:
            held.gate.set()
            raise UnwantedError

    waiting, held = [], HeldKernel(kernel)
    reader = reader_of(
        write_gguf(tmp_path / "tiny.gguf", kind="Q4_1"),
        held,
        before_each=leave,
        before_waiting=lambda: waiting.append(True),
    )
    reader.linear(*ATTENTION)
    with pytest.raises(UnwantedError):
        reader.finish()
    reader.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("mlx-stream-fill")]


def test_matrices_can_be_taken_once(tmp_path):
    store = WeightStore(open_artifact(write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")))
    name = f"{ATTENTION[0]}.weight"
    assert store.matrix_form(name) == "Q4_1"
    assert store.matrix_form("model.norm.weight") is None
    assert store.matrix_form("model.nothing.weight") is None
    assert store.take_stored(name).shape == (64, 64)
    with pytest.raises(GraphContractError, match="twice"):
        store.take(name)
