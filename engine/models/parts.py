"""What the layers of every graph are made of: norms, feed-forwards, and the facts of one packed step.

Activations are [1, T, hidden] for T packed tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from engine.contracts.errors import GraphContractError
from engine.ops.activations import activation, gated
from engine.ops.attention import PackedAttention
from engine.ops.packed_recurrence import PackedRecurrence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.artifacts.config import ModelConfig
    from engine.artifacts.family import Family
    from engine.contracts.graph import PackedSegment, RecurrentGeometry
    from engine.models.reading import WeightReader
    from engine.ops.rope import Rope, Rotation
    from engine.runtime.host_kernels import HostKernels


class Step:
    """One packed step: its rows' stretches, their attention, and each rotation once."""

    __slots__ = ("_positions", "_recurrence", "_rotations", "attention", "layer_inputs", "segments")

    def __init__(
        self, segments: Sequence[PackedSegment], *, scale: float, softcap: float, kernels: HostKernels | None = None
    ) -> None:
        """Scores get the factor `scale` and the bound `softcap` in every layer; `kernels` attend where they can."""
        self.segments = segments
        self.attention = PackedAttention(segments, scale=scale, softcap=softcap, kernels=kernels)
        self._positions = _positions(segments)
        self._rotations: dict[Rope, Rotation] = {}
        self._recurrence: PackedRecurrence | None = None
        self.layer_inputs: mx.array | None = None

    def rotation(self, rope: Rope) -> Rotation:
        """How `rope` rotates the step's tokens."""
        if rope not in self._rotations:
            self._rotations[rope] = rope.at(self._positions)
        return self._rotations[rope]

    def recurrence(self, sizes: RecurrentGeometry) -> PackedRecurrence:
        """The recurrent part of the step, for layers of `sizes`, which are the same in all of them."""
        if self._recurrence is None:
            self._recurrence = PackedRecurrence(self.segments, sizes)
        return self._recurrence

    def layer_input(self, layer: int) -> mx.array:
        """The vectors [1, T, width] that `layer` gets of the step's tokens besides, once `layer_inputs` is set."""
        if self.layer_inputs is None:
            raise GraphContractError("the step has no inputs of layers")
        return self.layer_inputs[:, :, layer]


class Attending(Protocol):
    """How the tokens of a step see each other, and what came before them."""

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, layer: int, kept: bool = False
    ) -> mx.array:
        """Attend in `layer`. See `engine.ops.attention.PackedAttention`."""


class AttendingStep(Protocol):
    """All that layers of attention need of a step."""

    @property
    def attention(self) -> Attending:
        """The attention of the step."""

    def rotation(self, rope: Rope) -> Rotation:
        """How `rope` rotates the step's tokens."""


class Layer(Protocol):
    """One layer of a graph."""

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """The step's tokens `x` [1, T, hidden] after this layer."""


class Mixer(Protocol):
    """The part of a layer in which tokens see each other."""

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """Mix the step's tokens `x` [1, T, hidden], each with its own row's past; appends to the layer's state."""


class FeedForward(Protocol):
    """The part of a layer in which each token stands by itself."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return [1, T, hidden] of `x` [1, T, hidden]."""


class RmsNorm:
    """Divides by the root mean square and multiplies by a gain."""

    __slots__ = ("_eps", "_gain")

    def __init__(self, gain: mx.array, eps: float) -> None:
        """`gain` is [size]."""
        self._gain = gain
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """Norm the last axis of `x`. Source: Zhang and Sennrich 2019."""
        return mx.fast.rms_norm(x, self._gain, self._eps)


class LayerNorm:
    """Subtracts the mean, divides by the deviation, multiplies by a gain and adds a bias."""

    __slots__ = ("_bias", "_eps", "_gain")

    def __init__(self, gain: mx.array, bias: mx.array, eps: float) -> None:
        """`gain` and `bias` are [size]."""
        self._gain = gain
        self._bias = bias
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """Norm the last axis of `x`. Source: Ba et al. 2016."""
        return mx.fast.layer_norm(x, self._gain, self._bias, self._eps)


def read_norm(reader: WeightReader, config: ModelConfig, family: Family, module: str) -> RmsNorm | LayerNorm:
    """The norm called `module`, of the kind of `family`."""
    gain = reader.vector(f"{module}.weight")
    if family.norm == "layer":
        return LayerNorm(gain, reader.vector(f"{module}.bias"), config.norm_eps)
    return RmsNorm(1.0 + gain if config.gains_less_one else gain, config.norm_eps)


class GatedFeedForward:
    """down(activation(gate x) · up x); gate and up share one product."""

    def __init__(
        self,
        reader: WeightReader,
        family: Family,
        module: str,
        *,
        composed: bool,
        kernels: HostKernels | None = None,
    ) -> None:
        """Take the weights of `module` from `reader`; `kernels` compute the gates where they can."""
        self._gate_up = reader.projection(*(f"{module}.{name}" for name in family.feed_forward))
        self._down = reader.projection(f"{module}.{family.down}")
        self._gated = gated(family.activation, composed=composed, kernels=kernels)

    def __call__(self, x: mx.array) -> mx.array:
        """Return [1, T, hidden] of `x` [1, T, hidden]."""
        gate, up = mx.split(self._gate_up(x), 2, axis=-1)
        return self._down(self._gated(gate, up))


class PlainFeedForward:
    """down(activation(inner x))."""

    def __init__(self, reader: WeightReader, family: Family, module: str, *, composed: bool) -> None:
        """Take the weights of `module` from `reader`."""
        self._inner = reader.projection(*(f"{module}.{name}" for name in family.feed_forward))
        self._down = reader.projection(f"{module}.{family.down}")
        self._activation = activation(family.activation, composed=composed)

    def __call__(self, x: mx.array) -> mx.array:
        """Return [1, T, hidden] of `x` [1, T, hidden]."""
        return self._down(self._activation(self._inner(x)))


def _positions(segments: Sequence[PackedSegment]) -> mx.array:
    """Position of each packed token in its own row, [T] int32."""
    return mx.array(
        [
            position
            for segment in segments
            for position in range(segment.caches[0].offset, segment.caches[0].offset + segment.length)
        ],
        dtype=mx.int32,
    )
