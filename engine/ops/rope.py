"""Rotary position embedding for packed tokens, in every scaling kind that configurations name.

Tables are built in float32. `frequencies` are θ^(2i/d), the form that `mx.fast.rope` takes.
Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Llama 3.1 model card (llama3); Ding et al. 2024 (LongRoPE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from engine.contracts.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTables:
    """What a kind of scaling changes: frequencies, and factors on positions and on the input."""

    frequencies: mx.array | None = None
    position_scale: float = 1.0
    input_scale: float = 1.0


class Rotation(Protocol):
    """Rotates the heads of one step's tokens; every layer of the step shares it."""

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate `x` [T, H, 1, D]; the shape is kept."""


class Rope:
    """Rotates the first `dims` components of each head by its token's position."""

    __slots__ = ("_composed", "_config", "_tables")

    def __init__(self, config: RopeConfig, *, composed: bool = False) -> None:
        """Build the tables of `config`, whose kind was validated when it was parsed.

        `composed` takes sines and cosines once a step, where the library would take them again in each layer.
        """
        self._config = config
        self._composed = composed
        self._tables = _TABLES[config.kind](config)

    def at(self, positions: mx.array) -> Rotation:
        """The rotation of tokens at `positions` [T] int32."""
        kind = _SharedRotation if self._composed else _LibraryRotation
        return kind(self._config, self._tables, positions)


class _LibraryRotation:
    """`mx.fast.rope`: one kernel where the device has it."""

    __slots__ = ("_config", "_positions", "_tables")

    def __init__(self, config: RopeConfig, tables: RopeTables, positions: mx.array) -> None:
        self._config = config
        self._tables = tables
        self._positions = positions

    def __call__(self, x: mx.array) -> mx.array:
        tables, dims = self._tables, self._config.dims
        if tables.input_scale != 1.0:
            scaled = x[..., :dims] * tables.input_scale
            x = scaled if dims == x.shape[-1] else mx.concatenate([scaled, x[..., dims:]], axis=-1)
        return mx.fast.rope(
            x,
            dims,
            traditional=self._config.traditional,
            base=self._config.theta if tables.frequencies is None else None,
            scale=tables.position_scale,
            offset=self._positions,
            freqs=tables.frequencies,
        )


class _SharedRotation:
    """x·cos + swap(x)·sin, where `swap` exchanges the two components of each rotated pair and sin carries the sign."""

    __slots__ = ("_cosines", "_dims", "_sines", "_traditional")

    def __init__(self, config: RopeConfig, tables: RopeTables, positions: mx.array) -> None:
        frequencies = _base_frequencies(config) if tables.frequencies is None else tables.frequencies
        angles = (positions.astype(mx.float32) * tables.position_scale)[:, None] / frequencies
        cosines, sines = (part * tables.input_scale for part in (mx.cos(angles), mx.sin(angles)))
        self._dims = config.dims
        self._traditional = config.traditional
        self._cosines = self._paired(cosines, cosines)
        self._sines = self._paired(-sines, sines)

    def __call__(self, x: mx.array) -> mx.array:
        rotated = x if self._dims == x.shape[-1] else x[..., : self._dims]
        rotated = rotated * self._cosines + self._swapped(rotated) * self._sines
        return rotated if self._dims == x.shape[-1] else mx.concatenate([rotated, x[..., self._dims :]], axis=-1)

    def _paired(self, first: mx.array, second: mx.array) -> mx.array:
        """[T, 1, 1, dims] whose pairs hold `first` and `second` [T, dims/2]."""
        joined = mx.stack([first, second], axis=-1 if self._traditional else -2)
        return joined.reshape(-1, 1, 1, self._dims)

    def _swapped(self, x: mx.array) -> mx.array:
        if self._traditional:
            return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
        half = self._dims // 2
        return mx.concatenate([x[..., half:], x[..., :half]], axis=-1)


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
    low, high = _correction_dim(config, config.beta_fast), _correction_dim(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    ramp = mx.clip((mx.arange(config.dims // 2, dtype=mx.float32) - low) / ((high - low) or 0.001), 0, 1)
    keep = 1.0 - ramp
    extrapolated = _base_frequencies(config)
    interpolated = config.factor * extrapolated
    scale = config.attention_factor
    if scale is None:
        scale = _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return RopeTables(
        frequencies=(interpolated * extrapolated) / (interpolated * keep + extrapolated * (1 - keep)),
        input_scale=scale,
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
