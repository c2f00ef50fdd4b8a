"""Seeded LoRA adapters of tiny models, written as mlx-lm and as PEFT write them, and the models that carry them."""

import json

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

RANK, SCALE = 4, 3.0
KEYS = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv")) + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down", "gate_up")
)


def adapt(model, *, seed=1, rank=RANK, scale=SCALE, keys=KEYS):
    """Put mlx-lm's own LoRA layers into `model`, and return their tensors by name, as its trainer saves them."""
    layers = getattr(model, "layers", None) or model.model.layers
    linear_to_lora_layers(model, len(layers), {"rank": rank, "scale": scale, "dropout": 0.0, "keys": set(keys)})
    mx.random.seed(seed)
    tensors = {}
    for name, value in tree_flatten(model.parameters()):
        if name.endswith((".lora_a", ".lora_b")):
            tensors[name] = 0.1 * mx.random.normal(value.shape)
    model.load_weights(list(tensors.items()), strict=False)
    mx.eval(model.parameters())
    return tensors


def write_mlx(folder, tensors, *, rank=RANK, scale=SCALE, **changes):
    """A folder as mlx-lm's trainer leaves it."""
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": {"rank": rank, "scale": scale}}
    return write(folder, tensors, config | changes, "adapters.safetensors")


def write_peft(folder, tensors, *, rank=RANK, alpha=SCALE * RANK, **changes):
    """A folder as PEFT leaves it: other names, and matrices the other way round."""
    renamed = {
        f"base_model.model.{name[:-7]}.lora_{name[-1].upper()}.weight": mx.contiguous(value.T)
        for name, value in tensors.items()
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_dora": False}
    return write(folder, renamed, config | changes, "adapter_model.safetensors")


def write(folder, tensors, config, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / name), tensors)
    return folder
