"""Rotary position embedding for packed tokens, in every scaling kind that configurations name.

Tables are built in float32. `frequencies` are θ^(2i/d), the form that `mx.fast.rope` takes.
Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Llama 3.1 model card (llama3); Ding et al. 2024 (LongRoPE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from engine.contracts.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTables:
    """What a kind of scaling changes: frequencies, and factors on positions and on the input."""

    frequencies: mx.array | None = None
    position_scale: float = 1.0
    input_scale: float = 1.0


class Rope:
    """Rotates the first `dims` components of each head by its token's position."""

    __slots__ = ("_base", "_dims", "_tables", "_traditional")

    def __init__(self, config: RopeConfig) -> None:
        """Build the tables of `config`, whose kind was validated when it was parsed."""
        self._dims = config.dims
        self._traditional = config.traditional
        self._tables = _TABLES[config.kind](config)
        self._base = config.theta if self._tables.frequencies is None else None

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rotate `x` [T, H, 1, D] by `positions` [T] int32; the shape is kept."""
        tables = self._tables
        if tables.input_scale != 1.0:
            scaled = x[..., : self._dims] * tables.input_scale
            x = scaled if self._dims == x.shape[-1] else mx.concatenate([scaled, x[..., self._dims :]], axis=-1)
        return mx.fast.rope(
            x,
            self._dims,
            traditional=self._traditional,
            base=self._base,
            scale=tables.position_scale,
            offset=positions,
            freqs=tables.frequencies,
        )


def _plain(_config: RopeConfig) -> RopeTables:
    """Default; also "dynamic", whose base changes only past the trained context, which we do not serve."""
    return RopeTables()


def _linear(config: RopeConfig) -> RopeTables:
    return RopeTables(position_scale=1.0 / config.factor)


def _llama3(config: RopeConfig) -> RopeTables:
    original = config.original_context_length
    long_wave, short_wave = original / config.low_freq_factor, original / config.high_freq_factor
    frequencies = _base_frequencies(config)
    wavelengths = 2 * math.pi * frequencies
    smooth = (original / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = frequencies / ((1 - smooth) / config.factor + smooth)
    stretched = mx.where(wavelengths > long_wave, frequencies * config.factor, frequencies)
    medium = (wavelengths > short_wave) & (wavelengths < long_wave)
    return RopeTables(frequencies=mx.where(medium, blended, stretched))


def _yarn(config: RopeConfig) -> RopeTables:
    low = max(math.floor(_correction_dim(config, config.beta_fast)), 0)
    high = min(math.ceil(_correction_dim(config, config.beta_slow)), config.dims - 1)
    ramp = mx.clip((mx.arange(config.dims // 2, dtype=mx.float32) - low) / ((high - low) or 0.001), 0, 1)
    keep = 1.0 - ramp
    extrapolated = _base_frequencies(config)
    interpolated = config.factor * extrapolated
    return RopeTables(
        frequencies=(interpolated * extrapolated) / (interpolated * keep + extrapolated * (1 - keep)),
        input_scale=_mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim),
    )


def _longrope(config: RopeConfig) -> RopeTables:
    stretch = config.context_length / config.original_context_length
    scale = config.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(stretch) / math.log(config.original_context_length)) if stretch > 1 else 1.0
    frequencies = mx.array(config.long_factor, dtype=mx.float32) * _base_frequencies(config)
    return RopeTables(frequencies=frequencies, input_scale=scale)


def _proportional(config: RopeConfig) -> RopeTables:
    rotated = int(config.partial_rotary_factor * config.dims)
    rotating = config.factor * config.theta ** (mx.arange(0, rotated, 2, dtype=mx.float32) / config.dims)
    return RopeTables(frequencies=mx.concatenate([rotating, mx.full(((config.dims - rotated) // 2,), mx.inf)]))


_TABLES = {
    "default": _plain,
    "dynamic": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _base_frequencies(config: RopeConfig) -> mx.array:
    return config.theta ** (mx.arange(0, config.dims, 2, dtype=mx.float32) / config.dims)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _correction_dim(config: RopeConfig, rotations: float) -> float:
    turns = config.original_context_length / (rotations * 2 * math.pi)
    return config.dims * math.log(turns) / (2 * math.log(config.theta))
