"""What a Hugging Face configuration says of single layers: which slide, how wide, and how each one rotates.

Newer files list a type for each layer; older ones leave it to a rule of the family. Windows are in tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.artifacts.config import FULL_ATTENTION, SLIDING_ATTENTION
from engine.artifacts.recurrent_fields import is_linear
from engine.artifacts.rope_fields import parse_rope
from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError
from engine.contracts.graph import LINEAR_ATTENTION
from engine.contracts.rope import RopeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.artifacts.family import Family, Sliding
    from engine.artifacts.fields import Fields

_KINDS: Final = (FULL_ATTENTION, SLIDING_ATTENTION)


def layer_types(
    fields: Fields, family: Family, *, layers: int, context_length: int
) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """The stated attention type of every layer, the one that it is held as, and the window (0 when none slides).

    They differ where a family's rule gives a window that the context cannot outgrow: such a layer attends fully,
    which is cheaper to hold, and still rotates as a sliding one.
    """
    stated = fields.texts("layer_types")
    kinds = stated or tuple(_implied(fields, family, layer) for layer in range(layers))
    if len(kinds) != layers:
        raise CorruptArtifactError(fields.file, f"layer_types names {len(kinds)} layers, the model has {layers}")
    for kind in kinds:
        if kind not in _KINDS and not (family.recurrent and kind == LINEAR_ATTENTION):
            raise UnsupportedArtifactError(fields.file, f"layer type {kind!r} is not supported")
    if SLIDING_ATTENTION not in kinds:
        return kinds, kinds, 0
    window = fields.count("sliding_window")
    if not stated and window >= context_length and not family.varied:
        return kinds, (FULL_ATTENTION,) * layers, 0
    return kinds, kinds, window


def _implied(fields: Fields, family: Family, layer: int) -> str:
    """The kind of a layer by its family's rule."""
    if family.recurrent and is_linear(fields, layer):
        return LINEAR_ATTENTION
    return SLIDING_ATTENTION if _SLIDES[family.sliding](fields, layer) else FULL_ATTENTION


def layer_ropes(
    fields: Fields, kinds: tuple[str, ...], *, head_dims: Mapping[str, int], context_length: int
) -> tuple[RopeConfig | None, ...]:
    """How each layer of `kinds`, whose heads have the size of `head_dims`, rotates; None where it does not."""
    ropes = {
        kind: parse_rope(fields, layer_type=kind, head_dim=head_dims[kind], context_length=context_length)
        for kind in dict.fromkeys(kinds)
        if kind != LINEAR_ATTENTION
    }
    return tuple(ropes.get(kind) if rotates(fields, layer) else None for layer, kind in enumerate(kinds))


def rotates(fields: Fields, layer: int) -> bool:
    """Whether `layer` rotates: as `no_rope_layers` lists (1 means that it does), else all but every n-th."""
    listed = fields.numbers("no_rope_layers")
    if listed:
        if len(listed) != fields.count("num_hidden_layers"):
            raise fields.bad("no_rope_layers", "must name every layer")
        return bool(listed[layer])
    return "no_rope_layer_interval" not in fields or (layer + 1) % fields.count("no_rope_layer_interval") != 0


def _alternating(_fields: Fields, layer: int) -> bool:
    return layer % 2 == 0


def _pattern(fields: Fields, layer: int) -> bool:
    name = "sliding_window_pattern" if "sliding_window_pattern" in fields else "_sliding_window_pattern"
    return (layer + 1) % fields.count(name, 6) != 0


def _all_but_sixth_and_last(fields: Fields, layer: int) -> bool:
    return (layer + 1) % 6 != 0 and layer + 1 < fields.count("num_hidden_layers")


def _upper_layers(fields: Fields, layer: int) -> bool:
    """Qwen: from `max_window_layers` on, if a window is in use at all."""
    return _uses_window(fields) and layer >= fields.number("max_window_layers", 28)


def _unrotated(fields: Fields, layer: int) -> bool:
    """SmolLM3: the layers that do not rotate, if a window is in use at all."""
    return _uses_window(fields) and not rotates(fields, layer)


def _uses_window(fields: Fields) -> bool:
    return fields.flag("use_sliding_window", default=False) and "sliding_window" in fields


_SLIDES: Final[Mapping[Sliding, Callable[[Fields, int], bool]]] = {
    "stated": lambda _fields, _layer: False,
    "throughout": lambda fields, _layer: "sliding_window" in fields,
    "in_use": lambda fields, _layer: _uses_window(fields),
    "alternating": _alternating,
    "pattern": _pattern,
    "upper_layers": _upper_layers,
    "unrotated": _unrotated,
    "all_but_sixth_and_last": _all_but_sixth_and_last,
}
