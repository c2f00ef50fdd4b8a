"""What a configuration says of a model that denoises: its canvas, and the ids that its encoder reads otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.artifacts.config import Denoising
from engine.contracts.errors import CorruptArtifactError

if TYPE_CHECKING:
    from engine.artifacts.fields import Fields
    from engine.artifacts.mixtures import Mixture


def parse_denoising(top: Fields, fields: Fields, mixture: Mixture | None) -> Denoising:
    """Read `fields`, those of the text model over the family's defaults; a canvas at the `top` counts first.

    Raises:
        CorruptArtifactError: the canvas does not fit the context, or layers have no experts.
    """
    context_length = fields.count("max_position_embeddings")
    place = top if "canvas_length" in top else fields
    canvas_length = place.count("canvas_length")
    if canvas_length > context_length:
        raise place.bad("canvas_length", f"must be at most max_position_embeddings, {context_length}")
    if mixture is None:
        raise fields.bad("num_experts", "must be at least 1: every layer of this family has experts")
    return Denoising(
        canvas_length=canvas_length,
        image_token_id=_one_id(fields, "image_token_id"),
        pad_token_id=_one_id(fields, "pad_token_id"),
    )


def _one_id(fields: Fields, name: str) -> int:
    ids = fields.token_ids(name)
    if len(ids) != 1:
        raise CorruptArtifactError(fields.file, f"{name} must be one token id, got {len(ids)}")
    return ids[0]
