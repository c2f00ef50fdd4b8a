"""The vision tower of a denoising model: an image becomes as many vectors of the text model as it has tokens.

A transformer over patches that see each other both ways, then the mean of each square of patches, projected. One image
at a time, and nothing is padded. Shapes: P patches, n tokens, S the tower's hidden size.
Numeric reference: `mlx_vlm.models.gemma4.vision`; source: reference, denoising-and-models §2.6.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from engine.artifacts.vision_shapes import BOUNDS, LAYER_NORMS, PATCHES, POSITIONS, PROJECTION, TOWER, layer_module
from engine.models.parts import RmsNorm
from engine.ops.activations import gated
from engine.ops.attention import open_attention

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.artifacts.vision_fields import Vision
    from engine.models.reading import WeightReader
    from engine.ops.linear import Product

_HEAD_NORM_EPS: Final = 1e-6
_FUSED_HEAD_DIMS: Final = (64, 80, 128)
"""Sizes of heads for which the library has a kernel that does not write scores down."""


class VisionTower:
    """A resident tower. Nothing is evaluated here."""

    def __init__(self, vision: Vision, reader: WeightReader, *, composed: bool) -> None:
        """Take the tower's weights from `reader`; `composed` avoids the library's exponential."""
        self._vision = vision
        self._patches = reader.linear(PATCHES)
        self._truncates = f"{PATCHES}.scales" in reader
        self._positions = reader.vector(POSITIONS)
        self._layers = [
            _TowerLayer(vision, reader, layer_module(layer), composed=composed)
            for layer in range(vision.geometry.layers)
        ]
        self._standard = (
            (reader.vector(f"{TOWER}.std_bias"), reader.vector(f"{TOWER}.std_scale")) if vision.standardizes else None
        )
        self._projection = reader.linear(PROJECTION)

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> mx.array:
        """What the text model reads in the place of an image, [1, n, hidden].

        Args:
            pixels: [H, W, 3] of 8 bits; both sides are whole tokens.
        """
        side = self._vision.geometry.patch_pixels
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        x = self._embedded(_patches(mx.array(pixels), side), rows, columns)
        turns = _turns(self._vision, rows, columns, x.dtype)
        for layer in self._layers:
            x = layer(x, turns)
        x = self._pooled(x, rows, columns)
        if self._standard is not None:
            bias, scale = self._standard
            x = (x - bias) * scale
        return self._projection(mx.fast.rms_norm(x, None, self._vision.norm_eps))

    def _embedded(self, patches: mx.array, rows: int, columns: int) -> mx.array:
        """Patches [1, P, 3·side²] of numbers from 0 to 1 as [1, P, S], with what their place adds."""
        dtype = self._positions.dtype
        centred = 2 * (patches - 0.5)
        if self._truncates:  # both Python references cast to the packed matrix's own type
            centred = centred.astype(mx.uint32)
        across = mx.broadcast_to(self._positions[0, :columns], (rows, columns, self._positions.shape[2]))
        down = self._positions[1, :rows][:, None]
        return self._patches(centred.astype(dtype)) + (across + down).reshape(1, rows * columns, -1)

    def _pooled(self, x: mx.array, rows: int, columns: int) -> mx.array:
        """The mean of each square of patches, times the root of S: [1, n, S]."""
        side, size = self._vision.geometry.pooling, x.shape[2]
        squares = x.astype(mx.float32).reshape(rows // side, side, columns // side, side, size)
        means = (squares * (1 / side**2)).sum(axis=(1, 3)).reshape(1, -1, size)
        return means.astype(x.dtype) * math.sqrt(size)


class _TowerLayer:
    """x + after(attention(before x)), and the same around a gated feed-forward."""

    __slots__ = ("_attention", "_down", "_gate", "_gated", "_norms", "_up")

    def __init__(self, vision: Vision, reader: WeightReader, module: str, *, composed: bool) -> None:
        self._norms = [RmsNorm(reader.vector(f"{module}.{name}.weight"), vision.norm_eps) for name in LAYER_NORMS]
        self._attention = _TowerAttention(vision, reader, f"{module}.self_attn", composed=composed)
        self._gate, self._up, self._down = (
            _product(vision, reader, f"{module}.mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        )
        self._gated = gated("gelu_tanh", composed=composed)

    def __call__(self, x: mx.array, turns: _Turns) -> mx.array:
        before, after, before_inner, after_inner = self._norms
        x = x + after(self._attention(before(x), turns))
        inner = before_inner(x)
        return x + after_inner(self._down(self._gated(self._gate(inner), self._up(inner))))


class _TowerAttention:
    """Every patch sees every patch; heads of queries, keys and values are normed, queries and keys turned."""

    __slots__ = ("_composed", "_key", "_key_gain", "_output", "_query", "_query_gain", "_sizes", "_value")

    def __init__(self, vision: Vision, reader: WeightReader, module: str, *, composed: bool) -> None:
        self._sizes = vision.geometry
        self._composed = composed
        self._query, self._key, self._value, self._output = (
            _product(vision, reader, f"{module}.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self._query_gain = reader.vector(f"{module}.q_norm.weight")
        self._key_gain = reader.vector(f"{module}.k_norm.weight")

    def __call__(self, x: mx.array, turns: _Turns) -> mx.array:
        sizes = self._sizes
        queries = turns(_normed(self._heads(self._query(x), sizes.heads), self._query_gain))
        keys = turns(_normed(self._heads(self._key(x), sizes.kv_heads), self._key_gain))
        values = _normed(self._heads(self._value(x), sizes.kv_heads), None)
        parts = [part.transpose(0, 2, 1, 3) for part in (queries, keys, values)]
        if not self._composed:
            parts = [_widened(part) for part in parts]
        mixed = open_attention(*parts, scale=1.0, composed=self._composed)[..., : sizes.head_dim]
        return self._output(mixed.transpose(0, 2, 1, 3).flatten(2))

    def _heads(self, joined: mx.array, heads: int) -> mx.array:
        return joined.reshape(1, -1, heads, self._sizes.head_dim)


class _ClippedProduct:
    """A product whose input and result are kept within bounds."""

    __slots__ = ("_bounds", "_product")

    def __init__(self, product: Product, bounds: list[mx.array]) -> None:
        self._product = product
        self._bounds = bounds

    def __call__(self, x: mx.array) -> mx.array:
        least, most, least_result, most_result = self._bounds
        return mx.clip(self._product(mx.clip(x, least, most)), least_result, most_result)


class _Turns:
    """Turns the first half of a head with a patch's column, the second with its row; cosines are [1, P, 1, D/2]."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[tuple[mx.array, mx.array]]) -> None:
        self._parts = parts

    def __call__(self, heads: mx.array) -> mx.array:
        """Turn `heads` [1, P, H, D]."""
        halves = mx.split(heads, 2, axis=-1)
        turned = []
        for half, (cosines, sines) in zip(halves, self._parts, strict=True):
            first, second = mx.split(half, 2, axis=-1)
            turned.append(half * cosines + mx.concatenate([-second, first], axis=-1) * sines)
        return mx.concatenate(turned, axis=-1)


def _turns(vision: Vision, rows: int, columns: int, dtype: mx.Dtype) -> _Turns:
    """The rotation of an image's patches. Source: Su et al. 2021, in two dimensions."""
    dims = vision.geometry.head_dim // 2
    exponents = (2.0 / dims) * mx.arange(0, dims // 2).astype(mx.float32)
    lengths = mx.power(vision.theta, exponents)
    across = mx.broadcast_to(mx.arange(columns)[None, :], (rows, columns))
    down = mx.broadcast_to(mx.arange(rows)[:, None], (rows, columns))
    parts = []
    for places in (across, down):
        angles = places.reshape(1, -1, 1, 1).astype(mx.float32) / lengths
        twice = mx.concatenate([angles, angles], axis=-1)
        parts.append((mx.cos(twice).astype(dtype), mx.sin(twice).astype(dtype)))
    return _Turns(parts)


def _product(vision: Vision, reader: WeightReader, module: str) -> Product | _ClippedProduct:
    product = reader.linear(f"{module}.linear")
    if not vision.clips:
        return product
    return _ClippedProduct(product, [reader.vector(f"{module}.{bound}") for bound in BOUNDS])


def _normed(heads: mx.array, gain: mx.array | None) -> mx.array:
    """Each head over its root mean square, in float32 throughout. Source: Zhang and Sennrich 2019."""
    precise = heads.astype(mx.float32)
    normed = precise * mx.rsqrt(mx.mean(precise**2, axis=-1, keepdims=True) + _HEAD_NORM_EPS)
    return (normed if gain is None else normed * gain.astype(mx.float32)).astype(heads.dtype)


def _widened(heads: mx.array) -> mx.array:
    """Heads [1, H, P, D] with zeros behind them, up to a size that the library has a kernel for."""
    size = heads.shape[3]
    wanted = next((fused for fused in _FUSED_HEAD_DIMS if size <= fused), size)
    return mx.pad(heads, [(0, 0), (0, 0), (0, 0), (0, wanted - size)]) if wanted > size else heads


def _patches(pixels: mx.array, side: int) -> mx.array:
    """Pixels [H, W, 3] of 8 bits as patches [1, P, side·side·3] of numbers from 0 to 1, row by row."""
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    scaled = pixels.astype(mx.float32) * (1 / 255)
    return scaled.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(1, rows * columns, -1)
