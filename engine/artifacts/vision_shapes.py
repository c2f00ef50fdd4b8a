"""The tensors of a vision tower by canonical name, with their shapes in values, and the names of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.artifacts.vision_fields import Vision

TOWER: Final = "model.encoder.vision_tower"
PROJECTION: Final = "model.encoder.embed_vision.embedding_projection"
PATCHES: Final = f"{TOWER}.patch_embedder.input_proj"
POSITIONS: Final = f"{TOWER}.patch_embedder.position_embedding_table"
LAYER_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")


def layer_module(layer: int) -> str:
    """The name of one layer."""
    return f"{TOWER}.encoder.layers.{layer}"


def tower_shapes(vision: Vision, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the tower of a text model whose hidden states have `hidden_size` values."""
    sizes = vision.geometry
    seen = sizes.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{PATCHES}.weight": (seen, 3 * sizes.patch_pixels**2),
        POSITIONS: (2, vision.positions, seen),
        f"{PROJECTION}.weight": (hidden_size, seen),
    }
    if vision.standardizes:
        shapes |= {f"{TOWER}.std_bias": (seen,), f"{TOWER}.std_scale": (seen,)}
    for layer in range(sizes.layers):
        module = layer_module(layer)
        shapes |= {f"{module}.{name}.weight": (seen,) for name in LAYER_NORMS}
        shapes |= {f"{module}.self_attn.{name}.weight": (sizes.head_dim,) for name in ("q_norm", "k_norm")}
        for name, (rows, columns) in _products(vision).items():
            shapes[f"{module}.{name}.linear.weight"] = (rows, columns)
            if vision.clips:
                shapes |= {f"{module}.{name}.{bound}": () for bound in BOUNDS}
    return shapes


def _products(vision: Vision) -> dict[str, tuple[int, int]]:
    """Rows and columns of the products of a layer."""
    sizes = vision.geometry
    seen, inner = sizes.hidden_size, sizes.intermediate_size
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "self_attn.q_proj": (queries, seen),
        "self_attn.k_proj": (keys, seen),
        "self_attn.v_proj": (keys, seen),
        "self_attn.o_proj": (seen, queries),
        "mlp.gate_proj": (inner, seen),
        "mlp.up_proj": (inner, seen),
        "mlp.down_proj": (seen, inner),
    }
