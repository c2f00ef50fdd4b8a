"""Canonical names of stored tensors, and which belong to parts of a checkpoint that are not served.

A multimodal checkpoint holds the text model under a name of its own, beside towers that read images or sound. The text
half is served, under the names that it has alone. Source: multimodal checkpoints as Hugging Face transformers 4 and 5
and MLX write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.family import Family

_TEXT_HALF: Final[Mapping[str, str]] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_TOWERS: Final = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in (
        "audio_tower.",
        "embed_audio.",
        "embed_vision.",
        "multi_modal_projector.",
        "vision_embedder.",
        "vision_tower.",
        "visual.",
    )
)


def canonical_name(family: Family, stored: str, *, nested: bool, sees: bool) -> str | None:
    """The name that `stored` has in the text model alone; None if it belongs to a part that is not served.

    `nested`: the configuration states the text model in a `text_config`, whatever its family. `sees`: it describes a
    vision tower, and the family's is served.
    """
    if sees and stored.startswith(family.tower):
        return stored
    if stored.startswith(family.dropped) and not stored.endswith(family.kept):
        return None
    if not (nested or family.multimodal):
        return stored
    if stored.startswith(_TOWERS):
        return None
    for prefix, meaning in _TEXT_HALF.items():
        if stored.startswith(prefix):
            return meaning + stored.removeprefix(prefix)
    return stored
