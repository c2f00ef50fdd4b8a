"""Rotary parameters from Hugging Face configurations: every spelling of them that is in use.

θ stands at the top (`rope_theta`) or, in newer files, inside `rope_parameters` beside the kind; the kind is spelled
`type` or `rope_type`. Where a file has both `rope_parameters` and the older `rope_scaling`, the newer wins field by
field. Sliding layers may rotate in their own way: `rope_parameters` then holds an object for each layer type, or, in
older files, `rope_local_base_freq` is their θ. Defaults per kind. Source: reference, model families §4.3 (rope kinds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.artifacts.fields import Fields
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.rope import RopeConfig, RopeKind

if TYPE_CHECKING:
    from collections.abc import Mapping

_KINDS: Final[Mapping[str, RopeKind]] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "deepseek_yarn": "yarn",
    "telechat3-yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "proportional": "proportional",
}
_ORIGINAL_CONTEXT: Final[Mapping[str, int]] = {"llama3": 8192, "yarn": 4096, "longrope": 4096}
_SLIDING: Final = "sliding_attention"
_LAYER_TYPES: Final = ("full_attention", _SLIDING)
_LOCAL_THETA: Final = "rope_local_base_freq"
_NEED_FACTOR: Final = frozenset({"linear", "dynamic", "llama3", "yarn"})


def parse_rope(config: Fields, *, layer_type: str, head_dim: int, context_length: int) -> RopeConfig:
    """Read the rotary parameters of the layers of `layer_type` from `config`.

    Raises:
        UnsupportedArtifactError: an unknown kind.
        MissingArtifactError, CorruptArtifactError: a parameter that the kind needs is absent or out of range.
    """
    older = config.fields("rope_scaling") or Fields(config.file, {}, "rope_parameters.")
    newer = config.fields("rope_parameters") or Fields(config.file, {})
    if any(isinstance(newer.raw(kind), dict) for kind in _LAYER_TYPES):
        older, newer = Fields(config.file, {}), _of_layer_type(newer, layer_type)
    elif layer_type == _SLIDING and _LOCAL_THETA in config:
        return RopeConfig(
            dims=head_dim,
            context_length=context_length,
            original_context_length=context_length,
            theta=config.positive(_LOCAL_THETA),
        )
    stated = older.overlaid(newer)
    kind = _kind(newer, older)
    partial = stated.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0))
    dims = head_dim if kind == "proportional" else _rotating(config.file, head_dim, partial)
    original = config.count("original_max_position_embeddings", _ORIGINAL_CONTEXT.get(kind, context_length))
    return RopeConfig(
        kind=kind,
        dims=dims,
        context_length=context_length,
        theta=stated.positive("rope_theta", config.positive("rope_theta", 10000.0)),
        traditional=config.flag("rope_traditional", default=False),
        factor=stated.positive("factor", None if kind in _NEED_FACTOR else 1.0),
        original_context_length=stated.count("original_max_position_embeddings", original),
        low_freq_factor=stated.positive("low_freq_factor", 1.0),
        high_freq_factor=stated.positive("high_freq_factor", 4.0),
        beta_fast=stated.positive("beta_fast", 32.0),
        beta_slow=stated.positive("beta_slow", 1.0),
        mscale=stated.number("mscale", 1.0),
        mscale_all_dim=stated.number("mscale_all_dim", 0.0),
        short_factor=_pair_factors(stated, "short_factor", kind, dims),
        long_factor=_pair_factors(stated, "long_factor", kind, dims),
        attention_factor=stated.positive("attention_factor") if "attention_factor" in stated else None,
        truncate=stated.flag("truncate", default=True),
        partial_rotary_factor=partial,
    )


def _of_layer_type(parameters: Fields, layer_type: str) -> Fields:
    own = parameters.fields(layer_type)
    if own is None:
        raise MissingArtifactError(parameters.file, f"rope_parameters has none for {layer_type}")
    return own


def _kind(newer: Fields, older: Fields) -> RopeKind:
    names = next((names for place in (newer, older) if (names := _kind_names(place))), ("default",))
    for name in names:
        if name not in _KINDS:
            raise UnsupportedArtifactError(newer.file, f"rotary embedding of kind {name!r} is not supported")
    if len({_KINDS[name] for name in names}) > 1:
        raise CorruptArtifactError(
            newer.file, f"rotary embedding is stated as type {names[0]!r}, rope_type {names[1]!r}"
        )
    return _KINDS[names[0]]


def _kind_names(stated: Fields) -> tuple[str, ...]:
    """The kind in every spelling that is there; they must agree."""
    return tuple(name for field in ("type", "rope_type") if (name := stated.text(field)))


def _rotating(file: str, head_dim: int, partial: float) -> int:
    dims = int(head_dim * partial)
    if partial > 1 or dims < 2 or dims % 2:
        raise CorruptArtifactError(file, f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {dims}")
    return dims


def _pair_factors(stated: Fields, name: str, kind: RopeKind, dims: int) -> tuple[float, ...]:
    """One factor per rotating pair; "longrope" cannot do without them."""
    if kind != "longrope":
        return ()
    factors = stated.numbers(name)
    if len(factors) != dims // 2:
        raise CorruptArtifactError(stated.file, f"{name} holds {len(factors)} factors, {dims // 2} pairs rotate")
    return factors
