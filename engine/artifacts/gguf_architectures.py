"""The architectures of GGUF files: the family of each, how it rotates, and its tensors' names in Hugging Face's terms.

Names follow from the family's record. The converters of some families permute the rows of the query and key
projections, so that rotation pairs neighbours ("traditional") and the weights stay as they are stored.
Source: the GGUF specification; the tensor names and rotation kinds of llama.cpp's architectures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.artifacts.families import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM4,
    GRANITE,
    LLAMA,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.family import Family

EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
_LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_WHOLE: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `general.architecture`.

    `traditional` rotation pairs neighbours. `layers_of_widest` counts the layers of the one model of the family whose
    scores are scaled by hidden / heads in place of the head size, which files do not state; 0 if scores are not
    scaled by either.
    """

    family: Family
    traditional: bool = False
    layers_of_widest: int = 0

    @property
    def permutes_rows(self) -> bool:
        """Whether the converter permutes rows of queries and keys: the family itself does not pair neighbours."""
        return self.traditional and not self.family.defaults.get("rope_traditional", False)


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(family=LLAMA, traditional=True),
    "smollm3": Architecture(family=SMOLLM3, traditional=True),
    "qwen2": Architecture(family=QWEN2),
    "qwen3": Architecture(family=QWEN3),
    "gemma": Architecture(family=GEMMA),
    "gemma2": Architecture(family=GEMMA2, layers_of_widest=46),
    "gemma3": Architecture(family=GEMMA3, layers_of_widest=62),
    "phi3": Architecture(family=PHI3),
    "olmo2": Architecture(family=OLMO2),
    "glm4": Architecture(family=GLM4, traditional=True),
    "granite": Architecture(family=GRANITE, traditional=True),
    "starcoder2": Architecture(family=STARCODER2),
}


def permutes_rows(model_type: str) -> bool:
    """Whether GGUF files of the family called `model_type` hold rows of queries and keys in another order."""
    return any(one.permutes_rows for one in ARCHITECTURES.values() if one.family.name == model_type)


def canonical_name(family: Family, name: str) -> str:
    """The Hugging Face name of tensor `name`; an unknown one keeps its own."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        part = layer_names(family).get(match[2])
        return f"model.layers.{match[1]}.{part}.{match[3]}" if part else name
    module, _, kind = name.rpartition(".")
    return f"{_WHOLE[module]}.{kind}" if module in _WHOLE else name


def layer_names(family: Family) -> dict[str, str]:
    """The modules of a layer, by their GGUF names."""
    norms = family.norms
    names = {
        "attn_norm": norms.before_mixer,
        "post_attention_norm": norms.after_mixer,
        "ffn_norm": norms.before_feed_forward,
        "post_ffw_norm": norms.after_feed_forward,
        "attn_output": "self_attn.o_proj",
        "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
        "ffn_down": f"mlp.{family.down}",
    }
    inner = ("ffn_gate", "ffn_up")[-len(family.feed_forward) :]  # fused, or alone, it is called up
    names |= {stored: f"mlp.{module}" for stored, module in zip(inner, family.feed_forward, strict=True)}
    for module in family.query_key_value:
        names[f"attn_{module.removesuffix('_proj')}"] = f"self_attn.{module}"
    if family.head_norms != "none":
        names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    return {stored: module for stored, module in names.items() if module}
