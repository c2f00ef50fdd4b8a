"""A random DiffusionGemma, small enough for a CPU: in mlx-vlm, and in files that both sides read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CANVAS_TOKENS = 64
TEXT: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_global_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "max_position_embeddings": 4096,
    "num_experts": 8,
    "top_k_experts": 2,
}
TABLE_SCALE = 6.0
"""Sharpens the scores of random weights, so that positions are accepted at different passes."""


def build(folder: Path, *, seed: int = 7) -> Any:
    """mlx-vlm's model in float32, whose weights are written to `folder` too."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.diffusion_gemma.config import ModelConfig, TextConfig
    from mlx_vlm.models.diffusion_gemma.diffusion_gemma import Model

    mx.random.seed(seed)
    model = Model(ModelConfig(text_config=TextConfig(**TEXT), canvas_length=CANVAS_TOKENS))
    table = model.model.decoder.embed_tokens
    table.weight = table.weight * TABLE_SCALE
    mx.eval(model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "diffusion_gemma", "canvas_length": CANVAS_TOKENS, "text_config": TEXT}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return model
