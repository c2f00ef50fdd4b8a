"""How a graph's rows store keys and values: from what an operator wrote to a scheme that this graph can read.

Pure: reads the graph's sizes and promises, touches no array. What cannot work is refused before a row is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.composition import PagedKvComposition
from engine.contracts.errors import ConfigurationError
from engine.contracts.graph import LINEAR_ATTENTION
from engine.contracts.kv_scheme import (
    TURBO_HEAD_DIMS,
    AffineKv,
    AffineLayersKv,
    PlainKv,
    TurboKv,
    layer_scheme,
    parse_kv_wish,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphDeclaration, GraphGeometry
    from engine.contracts.kv_scheme import AffineLayer, KvStorageScheme

SETTING = "kv_storage"


def resolve_kv_storage(
    text: str, read_list: Callable[[], Sequence[AffineLayer] | None]
) -> tuple[KvStorageScheme, PagedKvComposition | None]:
    """The scheme that an operator's `text` stands for, and whether it is paged.

    Args:
        text: one of `engine.contracts.kv_scheme.SPELLINGS`.
        read_list: reads which layers the model's own files want quantized; None when they say nothing. It is called
            only when the text asks for them.

    Raises:
        ConfigurationError: the text is none of these, or asks for a list that the model does not have.
    """
    try:
        wish = parse_kv_wish(text)
    except ValueError as error:
        raise ConfigurationError(SETTING, str(error)) from None
    if not wish.from_config:
        return wish.scheme, PagedKvComposition() if wish.paged else None
    listed = read_list()
    if listed is None:
        raise ConfigurationError(SETTING, f"{text!r} needs a kv_config.json beside the model, and there is none")
    return AffineLayersKv(layers=tuple(listed), start=wish.scheme.start), None


def refuse_unreadable_storage(declaration: GraphDeclaration, geometry: GraphGeometry, composition: Composition) -> None:
    """Raise `ConfigurationError` when the graph's attention cannot read what the composition stores."""
    scheme = composition.kv
    if isinstance(scheme, PlainKv):
        return
    if composition.paged_kv is not None:
        raise ConfigurationError(SETTING, f"{scheme.store_key}: paged storage keeps plain keys and values alone")
    if declaration.kv.dense_reads:
        raise ConfigurationError(SETTING, f"{scheme.store_key}: this model reads plain keys and values alone")
    if scheme.start and declaration.kv.delayed_affine == "none":
        raise ConfigurationError(SETTING, f"{scheme.store_key}: this model cannot convert its state once it has begun")
    if isinstance(scheme, AffineLayersKv):
        _refuse_unknown_layers(scheme, geometry)
    for layer, (kind, values) in enumerate(zip(geometry.layer_types, geometry.key_values, strict=True)):
        if kind != LINEAR_ATTENTION and values:
            _refuse_head(scheme, layer, values, geometry, sliding=kind == "sliding_attention")


def _refuse_unknown_layers(scheme: AffineLayersKv, geometry: GraphGeometry) -> None:
    for entry in scheme.layers:
        if entry.layer >= geometry.state_layers:
            kept = "layers" if geometry.state_layers == geometry.layers else "layers that keep keys"
            raise ConfigurationError(
                SETTING, f"kv_config.json lists layer {entry.layer} of a model with {geometry.state_layers} {kept}"
            )


def _refuse_head(scheme: KvStorageScheme, layer: int, values: int, geometry: GraphGeometry, *, sliding: bool) -> None:
    """Heads of unlike sizes differ in how many numbers a layer keeps, so both must be divisible."""
    kept = layer_scheme(scheme, layer, sliding=sliding)
    head_dim = geometry.head_dim
    if isinstance(kept, AffineKv) and (head_dim % kept.group_size or values % kept.group_size):
        raise ConfigurationError(
            SETTING, f"{scheme.store_key}: heads of {head_dim} values cannot be cut into groups of {kept.group_size}"
        )
    if isinstance(kept, TurboKv) and head_dim not in TURBO_HEAD_DIMS:
        known = ", ".join(map(str, TURBO_HEAD_DIMS))
        raise ConfigurationError(SETTING, f"{scheme.store_key}: heads have {head_dim} values, and not one of {known}")
