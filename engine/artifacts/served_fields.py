"""Fields that change what a model computes and that a graph follows in some values only: any other value is refused.

What a family follows in every value, or does not know at all, is not here; neither is what its tensors would betray.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.artifacts.fields import shown_text
from engine.contracts.errors import UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.family import Family
    from engine.artifacts.fields import Fields

SERVED: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "use_bidirectional_attention": (False, "vision"),  # "vision": among the tokens of one image
        "is_causal": (True,),
        "quantize_activations": (False,),
        "position_embedding_type": ("rope", "rotary"),
        "alibi": (False,),
        "lm_head_bias": (False,),
        "clip_qkv": (),
        "llama_4_scaling_beta": (0,),
    }
)
"""Of all families: the values that each field may have where it is stated."""
WHOLE_MODELS: Final = frozenset({"paligemma"})
"""Multimodal models whose text half computes otherwise than alone: PaliGemma attends both ways in its prompt."""
_ROPE: Final = ("rope_parameters", "rope_scaling")


def check_served(top: Fields, fields: Fields, family: Family) -> None:
    """Check the fields of a model's text half, and the name of the whole, which is at the `top`.

    Raises:
        UnsupportedArtifactError: a field has a value that the graphs do not follow.
    """
    whole = top.text("model_type")
    if whole in WHOLE_MODELS:
        raise UnsupportedArtifactError(top.file, f"model_type {whole!r} is not supported: its prompts attend both ways")
    ropes = [fields.raw(name) for name in _ROPE]
    for name, values in {**SERVED, **family.served}.items():
        for stated in (fields.raw(name), *(rope.get(name) for rope in ropes if isinstance(rope, dict))):
            if stated is not None and stated not in values:
                choices = " or ".join(repr(value) for value in values) or "no value"
                raise UnsupportedArtifactError(
                    fields.file, f"{name} {shown_text(str(stated))} is not supported; supported: {choices}"
                )
