"""What a state is tied to, beyond the weights."""

from types import SimpleNamespace

from engine.contracts.adapters import AdapterInfo
from engine.contracts.composition import Composition
from engine.contracts.graph import GraphDescriptor
from engine.contracts.option_groups import AdapterSelection
from engine.execution.state_identity import adapter_namespace, state_identity
from tests.engine.state.oracle import full_attention


def test_a_state_that_other_arithmetic_has_made_is_another():
    plain, on_host, library = (
        _identity(**choices) for choices in ({}, {"host_kernels": True}, {"library_arithmetic": True})
    )
    assert len({plain, on_host, library}) == 3
    assert _identity(library_arithmetic=True, host_kernels=True) == library, "then no kernel is used"


def _identity(**choices):
    return state_identity(
        SimpleNamespace(
            fingerprint="weights",
            model_type="llama",
            descriptor=GraphDescriptor(id="a", backend="mlx", graph_abi="b", state_abi="c", artifact="d"),
            geometry=full_attention(1, 4),
            composition=Composition(**choices),
            runtime=SimpleNamespace(device="cpu", device_name="a processor", blas="a library", mlx_version="1"),
        )
    )


def test_another_revision_of_an_adapter_is_another_namespace():
    chosen = (AdapterSelection(id="a", scale=2.0), AdapterSelection(id="b"))
    names = {adapter_namespace(_Model(first, second), chosen) for first, second in (("1", "2"), ("1", "3"), ("3", "2"))}
    assert len(names) == 3
    assert adapter_namespace(_Model("1", "2"), chosen) != adapter_namespace(_Model("1", "2"), chosen[::-1])
    assert adapter_namespace(_Model("1", "2"), ()) == "[]"


class _Model:
    def __init__(self, first, second):
        self.adapters = tuple(
            AdapterInfo(
                id=name,
                revision=revision,
                rank=1,
                scale=1.0,
                mounted_layers=1,
                applied_tensors=1,
                skipped_tensors=(),
                file_bytes=1,
                resident_bytes=1,
            )
            for name, revision in (("a", first), ("b", second))
        )
