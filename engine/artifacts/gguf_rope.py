"""Rotary parameters from the metadata and the factor tensors of a GGUF file.

Scaling is read as llama.cpp reads it. Source: the GGUF specification (standard keys).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from engine.artifacts.gguf_architectures import ARCHITECTURES
from engine.artifacts.model_files import open_file
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.rope import RopeConfig

if TYPE_CHECKING:
    from engine.artifacts.fields import Fields
    from engine.artifacts.gguf import GgufHeader
    from engine.artifacts.tensor_header import TensorHeader

_FACTORS: Final = "rope_freqs.weight"
_LONG_FACTORS: Final = "rope_factors_long.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
FACTOR_TENSORS: Final = frozenset({_FACTORS, _LONG_FACTORS, _SHORT_FACTORS})
"""Tensors that are part of the configuration."""


def rotations(
    fields: Fields, name: str, header: GgufHeader, *, head_dim: int, context_length: int
) -> tuple[RopeConfig, RopeConfig]:
    """How full and how sliding layers of architecture `name` rotate.

    Raises:
        UnsupportedArtifactError: a kind of scaling, or a form of factors, that we do not read.
        MissingArtifactError, CorruptArtifactError: a parameter is absent or out of range.
    """
    full = _full(fields, name, header, head_dim, context_length)
    return full, _sliding(fields, name, full)


def _sliding(fields: Fields, name: str, rope: RopeConfig) -> RopeConfig:
    """How sliding layers rotate: as all do, save in a family that gives them a θ of their own and no scaling."""
    if "rope_local_base_freq" not in ARCHITECTURES[name].family.defaults:
        return rope
    return RopeConfig(
        dims=rope.dims,
        context_length=rope.context_length,
        original_context_length=rope.context_length,
        theta=fields.positive(f"{name}.rope.freq_base_swa", 10000.0),
    )


def _full(fields: Fields, name: str, header: GgufHeader, head_dim: int, context_length: int) -> RopeConfig:
    scaling = f"{name}.rope.scaling."
    rope = RopeConfig(
        dims=fields.count(f"{name}.rope.dimension_count", head_dim),
        context_length=context_length,
        theta=fields.positive(f"{name}.rope.freq_base", 10000.0),
        traditional=ARCHITECTURES[name].traditional,
        original_context_length=fields.count(f"{scaling}original_context_length", context_length),
    )
    if rope.dims > head_dim or rope.dims % 2:
        raise CorruptArtifactError(fields.file, f"rotates {rope.dims} of {head_dim} components of a head")
    if _LONG_FACTORS in header.tensors:
        return _long(fields, name, header, rope)
    kind, factor_key = _scaling(fields, name)
    if _FACTORS in header.tensors:
        return _with_factors(header.tensors[_FACTORS], rope, kind)
    if kind == "none":
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=fields.positive(factor_key))
    if kind == "yarn":
        return replace(
            rope,
            kind="yarn",
            factor=fields.positive(factor_key),
            beta_fast=fields.positive(f"{scaling}yarn_beta_fast", rope.beta_fast),
            beta_slow=fields.positive(f"{scaling}yarn_beta_slow", rope.beta_slow),
        )
    raise UnsupportedArtifactError(fields.file, f"rotary embedding of kind {kind!r} is not supported")


def _scaling(fields: Fields, name: str) -> tuple[str, str]:
    """The kind of scaling, and the key of its factor.

    As llama.cpp reads it: a kind that is not stated is linear, a linear factor of 0 or 1 (or none) scales nothing,
    and old files call the factor `rope.scale_linear`.
    """
    for neutral in ("attn_factor", "yarn_attn_factor"):
        if fields.number(key := f"{name}.rope.scaling.{neutral}", 1.0) != 1.0:
            raise UnsupportedArtifactError(fields.file, f"{key} {fields.raw(key)!r} is not supported")
    newer, older = f"{name}.rope.scaling.factor", f"{name}.rope.scale_linear"
    factor_key = newer if newer in fields or older not in fields else older
    if fields.number(factor_key, 0.0) < 0:
        raise fields.bad(factor_key, "must be at least 0")
    kind = fields.text(f"{name}.rope.scaling.type", "linear")
    if kind == "linear" and fields.number(factor_key, 0.0) in (0.0, 1.0):
        kind = "none"
    return kind, factor_key


def _with_factors(tensor: TensorHeader, rope: RopeConfig, kind: str) -> RopeConfig:
    """Stored factors, one per pair, stretch the plain wavelengths: "longrope" without its scaling of the input."""
    if kind != "none":
        raise UnsupportedArtifactError(tensor.file.name, f"{_FACTORS} with {kind!r} scaling is not supported")
    factors = _read_factors(tensor, rope)
    return replace(rope, kind="longrope", long_factor=factors, short_factor=factors, attention_factor=1.0)


def _long(fields: Fields, name: str, header: GgufHeader, rope: RopeConfig) -> RopeConfig:
    """Factors for long contexts, and what they cost in attention; they hold at every length, as in folders."""
    if _SHORT_FACTORS not in header.tensors:
        raise MissingArtifactError(fields.file, f"has {_LONG_FACTORS} and no {_SHORT_FACTORS}")
    return replace(
        rope,
        kind="longrope",
        long_factor=_read_factors(header.tensors[_LONG_FACTORS], rope),
        short_factor=_read_factors(header.tensors[_SHORT_FACTORS], rope),
        attention_factor=fields.positive(f"{name}.rope.scaling.attn_factor", 1.0),
    )


def _read_factors(tensor: TensorHeader, rope: RopeConfig) -> tuple[float, ...]:
    """One float32 per pair."""
    if tensor.dtype != "F32" or tensor.shape != (rope.dims // 2,):
        raise UnsupportedArtifactError(
            tensor.file.name, f"{tensor.name} of {tensor.dtype} {list(tensor.shape)} for {rope.dims} components"
        )
    with open_file(tensor.file) as file:
        file.seek(tensor.offset_bytes)
        factors = struct.unpack(f"<{rope.dims // 2}f", file.read(tensor.nbytes))
    if not all(0 < factor < float("inf") for factor in factors):
        raise CorruptArtifactError(tensor.file.name, f"{tensor.name} holds a factor that is no positive number")
    return factors
