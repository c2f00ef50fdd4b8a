"""How a model's modules are stored, from headers alone: which form in which layers, with how many values and bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.artifacts.artifact import Artifact
    from engine.artifacts.tensor_header import TensorHeader

_LAYER: Final = re.compile(r"(?P<before>.*?)\b(?P<layer>\d+)\.(?P<module>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """Modules of one name that are stored in one form. `layers` is as short as "0-3, 7", and "" outside of layers."""

    module: str
    form: str
    layers: str
    values: int
    nbytes: int


def stored_forms(artifact: Artifact) -> tuple[StoredForm, ...]:
    """The matrices of `artifact`, by module and form; modules come by their names."""
    found: dict[tuple[str, str], list[tuple[int | None, int, int]]] = defaultdict(list)
    for name, header in artifact.tensors.items():
        if artifact.is_scale(name) or len(header.shape) < 2:
            continue
        module, layer = _place(name.removesuffix(".weight"))
        form, values, nbytes = _form(artifact, name, header)
        found[module, form].append((layer, values, nbytes))
    return tuple(
        StoredForm(
            module=module,
            form=form,
            layers=spans(layer for layer, _, _ in parts if layer is not None),
            values=sum(values for _, values, _ in parts),
            nbytes=sum(nbytes for _, _, nbytes in parts),
        )
        for (module, form), parts in sorted(found.items(), key=lambda item: item[0][0])
    )


def spans(numbers: Iterable[int]) -> str:
    """Numbers as spans: "0-3, 7"."""
    told: list[list[int]] = []
    for number in sorted(set(numbers)):
        if told and told[-1][1] == number - 1:
            told[-1][1] = number
        else:
            told.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in told)


def _place(module: str) -> tuple[str, int | None]:
    """A module's name within its layer, and the layer; an expert counts as a part of its layer."""
    match = _LAYER.match(module)
    if match is None:
        return module.removeprefix("model."), None
    return re.sub(r"\b\d+\b", "*", match["module"]), int(match["layer"])


def _form(artifact: Artifact, name: str, header: TensorHeader) -> tuple[str, int, int]:
    """The form of a matrix, its values, and its bytes with those of its scales."""
    module = name.removesuffix(".weight")
    parts = [artifact.tensors.get(f"{module}.{part}") for part in ("scales", "biases")]
    nbytes = header.nbytes + sum(part.nbytes for part in parts if part is not None)
    scales, quantization = parts[0], artifact.config.quantization
    scheme = None if scales is None or quantization is None else quantization.scheme(module)
    return header.dtype if scheme is None else str(scheme), artifact.values(name), nbytes
