"""Models whose layers differ in more than their kind: heads of other sizes, shared keys, inputs of their own.

Sizes are counts of values; layers are counted from 0. Imports no mlx.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.errors import CorruptArtifactError

if TYPE_CHECKING:
    from engine.artifacts.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVariety:
    """What differs between the layers of one model.

    Attributes:
        full_kv_heads, full_head_dim: sizes in layers with full attention.
        keys_are_values: layers with full attention have no value projection; values are their keys before the norm.
        sharing_layers: so many of the last layers attend to what an earlier layer of their kind keeps.
        wide_when_sharing: those have feed-forwards twice as wide.
        input_width: values that each layer gets of a token besides, 0 for none.
        input_vocab_size: rows of the table of those.
    """

    full_kv_heads: int
    full_head_dim: int
    keys_are_values: bool
    sharing_layers: int
    wide_when_sharing: bool
    input_width: int
    input_vocab_size: int


def parse_variety(fields: Fields, kinds: tuple[str, ...], *, heads: int, kv_heads: int, head_dim: int) -> LayerVariety:
    """Read what `fields` say of layers of `kinds`.

    Raises:
        MissingArtifactError, CorruptArtifactError: a size is absent or impossible.
    """
    keys_are_values = fields.flag("attention_k_eq_v", default=False)
    full_kv_heads = fields.count("num_global_key_value_heads", kv_heads) if keys_are_values else kv_heads
    if heads % full_kv_heads:
        raise CorruptArtifactError(
            fields.file, f"{heads} attention heads cannot share {full_kv_heads} global key/value heads"
        )
    variety = LayerVariety(
        full_kv_heads=full_kv_heads,
        full_head_dim=fields.count("global_head_dim", head_dim),
        keys_are_values=keys_are_values,
        sharing_layers=_whole(fields, "num_kv_shared_layers"),
        wide_when_sharing=fields.flag("use_double_wide_mlp", default=False),
        input_width=_whole(fields, "hidden_size_per_layer_input"),
        input_vocab_size=fields.count("vocab_size_per_layer_input", fields.count("vocab_size")),
    )
    if variety.input_width and variety.input_vocab_size < fields.count("vocab_size"):
        raise fields.bad("vocab_size_per_layer_input", "must be at least vocab_size")
    own = kinds[: len(kinds) - variety.sharing_layers]
    lonely = next((kind for kind in kinds if kind not in own), None)
    if variety.sharing_layers >= len(kinds) or lonely is not None:
        raise fields.bad("num_kv_shared_layers", f"leaves no layer of {lonely} with keys of its own")
    return variety


def _whole(fields: Fields, name: str) -> int:
    """A whole number from 0, 0 when absent."""
    return 0 if fields.raw(name) == 0 and not isinstance(fields.raw(name), bool) else fields.count(name, 0)
