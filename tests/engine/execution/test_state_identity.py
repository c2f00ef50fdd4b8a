"""What a state is tied to, beyond the weights."""

from engine.contracts.adapters import AdapterInfo
from engine.contracts.option_groups import AdapterSelection
from engine.execution.state_identity import adapter_namespace


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
