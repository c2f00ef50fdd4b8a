"""What a configuration says of a model's vision tower, and of the tokens that stand for an image.

Absent fields have the defaults of Gemma 4's tower. Source: reference, denoising-and-models §2.6;
`mlx_vlm.models.gemma4.config` (names and defaults).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.artifacts.fields import Fields
from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError
from engine.contracts.vision import VisionGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

VISION_CONFIG: Final = "vision_config"
_MOST_LAYERS: Final = 4096
_DEFAULTS: Final[Mapping[str, object]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "default_output_length": 280,
    "position_embedding_size": 10240,
}
_ACTIVATION: Final = "gelu_pytorch_tanh"
_THETA: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokenIds:
    """The ids that stand for an image: around it, and for each of its tokens."""

    begin: int
    image: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A vision tower: its sizes, and what it computes.

    `positions` is the length of its position table, `theta` of its rotation. `standardizes`: what it sees is shifted
    and scaled by numbers of its own. `clips`: inputs and results of its products are kept within stored bounds.
    `both_ways`: the tokens of an image see each other in the text model too, whichever comes first.
    """

    geometry: VisionGeometry
    ids: ImageTokenIds
    norm_eps: float
    theta: float
    positions: int
    standardizes: bool
    clips: bool
    both_ways: bool


def parse_vision(top: Fields, fields: Fields) -> Vision:
    """Read the tower that the `top` of a configuration describes; `fields` are those of the text model.

    Raises:
        CorruptArtifactError: a value is impossible.
        UnsupportedArtifactError: a value changes what the tower computes, and is not followed.
    """
    tower = Fields(top.file, _DEFAULTS, f"{VISION_CONFIG}.").overlaid(top.fields(VISION_CONFIG) or Fields(top.file, {}))
    _check_served(tower)
    geometry = _geometry(tower)
    positions = tower.count("position_embedding_size")
    longest = geometry.most_tokens * geometry.pooling
    if positions < longest:
        raise tower.bad("position_embedding_size", f"must be at least {longest}, the patches of the longest side")
    rope = tower.fields("rope_parameters")
    begin, image, end = (_one_id(fields, name) for name in ("boi_token_id", "image_token_id", "eoi_token_id"))
    nested = top.fields("text_config") or top
    return Vision(
        geometry=geometry,
        ids=ImageTokenIds(begin=begin, image=image, end=end),
        norm_eps=tower.positive("rms_norm_eps", 1e-6),
        theta=_THETA if rope is None else rope.positive("rope_theta", _THETA),
        positions=positions,
        standardizes=tower.flag("standardize", default=False),
        clips=tower.flag("use_clipped_linears", default=False),
        both_ways=nested.raw("use_bidirectional_attention", "vision") == "vision",
    )


def _geometry(tower: Fields) -> VisionGeometry:
    geometry = VisionGeometry(
        hidden_size=tower.count("hidden_size"),
        intermediate_size=tower.count("intermediate_size"),
        layers=tower.count("num_hidden_layers", most=_MOST_LAYERS),
        heads=tower.count("num_attention_heads"),
        kv_heads=tower.count("num_key_value_heads"),
        head_dim=tower.count("head_dim"),
        patch_pixels=tower.count("patch_size", most=1024),
        pooling=tower.count("pooling_kernel_size", most=64),
        most_tokens=tower.count("default_output_length", most=2**16),
    )
    if geometry.heads % geometry.kv_heads:
        raise tower.bad("num_key_value_heads", f"must divide num_attention_heads, {geometry.heads}")
    if geometry.head_dim % 4:
        raise tower.bad("head_dim", "must be a multiple of 4: each half turns with one side of the image")
    return geometry


def _check_served(tower: Fields) -> None:
    activation = tower.text("hidden_activation", _ACTIVATION)
    if activation != _ACTIVATION:
        raise UnsupportedArtifactError(
            tower.file, f"{VISION_CONFIG}.hidden_activation {activation!r} is not supported; supported: {_ACTIVATION}"
        )
    if tower.flag("attention_bias", default=False):
        raise UnsupportedArtifactError(tower.file, f"{VISION_CONFIG}.attention_bias is not supported")
    rope = tower.fields("rope_parameters")
    kind = "default" if rope is None else rope.text("rope_type", "default")
    if kind != "default":
        raise UnsupportedArtifactError(
            tower.file, f"{VISION_CONFIG}.rope_parameters.rope_type {kind!r} is not supported; supported: default"
        )


def _one_id(fields: Fields, name: str) -> int:
    ids = fields.token_ids(name)
    if len(ids) != 1:
        raise CorruptArtifactError(fields.file, f"{name} must be one token id, got {len(ids)}")
    if ids[0] >= (vocab_size := fields.count("vocab_size")):
        raise fields.bad(name, f"must be an id below {vocab_size}, the size of the vocabulary")
    return ids[0]
