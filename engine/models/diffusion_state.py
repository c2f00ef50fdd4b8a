"""What the encoder of a denoising model has left in its layers of one row, and the two ways of attending to it.

A reading step appends its tokens and attends causally, but for the tokens of one image, which see each other both ways
where the model has it so; a canvas step appends nothing, and its tokens see each other both ways. A sliding layer keeps
only what a later token or a canvas can still see, its window but one, in temporal order.
Units: tokens. Numeric reference: `mlx_vlm.models.diffusion_gemma.language`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.ops.attention import causal_attention, mask_with_stretches, masked_attention, open_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.option_groups import AdapterSelection
    from engine.ops.rope import Rope, Rotation


class EncoderState:
    """Keys and values [1, Hkv, N, D] of every layer of one row. Belongs to the row, and to the engine thread."""

    __slots__ = ("_layers", "_offset", "_windows", "adapters")

    def __init__(self, windows: Sequence[int], adapters: tuple[AdapterSelection, ...] = ()) -> None:
        """Start empty.

        Args:
            windows: how far a token sees in each layer, itself included; 0 means no limit.
            adapters: what every pass over this row applies.
        """
        self.adapters = adapters
        self._windows = tuple(windows)
        self._layers: list[tuple[mx.array, mx.array] | None] = [None] * len(self._windows)
        self._offset = 0

    @property
    def offset(self) -> int:
        """Tokens read so far: the position of the next one, and of a canvas' first."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""
        return [array for held in self._layers if held is not None for array in held]

    def window(self, layer: int) -> int:
        """How far a token sees in `layer`; 0 means no limit."""
        return self._windows[layer]

    def with_held(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What `layer` holds, followed by `keys` and `values` [1, Hkv, L, D]; keeps nothing of them."""
        held = self._layers[layer]
        if held is None:
            return keys, values
        return mx.concatenate([held[0], keys], axis=2), mx.concatenate([held[1], values], axis=2)

    def keep(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Hold `keys` and `values` in `layer`, or as many of the newest as can still be seen."""
        window = self._windows[layer]
        surplus = keys.shape[2] - (window - 1) if window else 0
        if surplus > 0:
            keys, values = (mx.contiguous(part[:, :, surplus:]) for part in (keys, values))
        self._layers[layer] = (keys, values)

    def advance(self, tokens: int) -> None:
        """Count `tokens` that were kept in every layer."""
        self._offset += tokens

    def close(self) -> None:
        """Release the arrays; again is harmless. The state must not be used any more."""
        self._layers = [None] * len(self._windows)


class _Step:
    """One pass over `length` tokens that follow what a state holds; each rotation is made once."""

    __slots__ = ("_composed", "_positions", "_rotations", "_scale", "_state")

    def __init__(self, state: EncoderState, length: int, *, scale: float, composed: bool) -> None:
        """Scores get the factor `scale`; `composed` avoids the library's exponential."""
        self._state = state
        self._scale = scale
        self._composed = composed
        self._positions = mx.arange(state.offset, state.offset + length, dtype=mx.int32)
        self._rotations: dict[Rope, Rotation] = {}

    def rotation(self, rope: Rope) -> Rotation:
        """How `rope` rotates the step's tokens."""
        if rope not in self._rotations:
            self._rotations[rope] = rope.at(self._positions)
        return self._rotations[rope]


class ReadingStep(_Step):
    """Appends tokens to a state; each sees what came before it, within its layer's window.

    Those of one stretch see all of it besides.
    """

    __slots__ = ("_length", "_masks", "_stretches")

    encodes = True

    def __init__(
        self,
        state: EncoderState,
        length: int,
        *,
        scale: float,
        composed: bool,
        stretches: Sequence[tuple[int, int]] = (),
    ) -> None:
        """As other steps; `stretches` are starts and ends among the step's tokens."""
        super().__init__(state, length, scale=scale, composed=composed)
        self._length = length
        self._stretches = stretches
        self._masks: dict[tuple[int, int], mx.array] = {}

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        layer: int,
        kept: bool = False,  # noqa: ARG002 - the Protocol's parameter; no layer attends to another's keys
    ) -> mx.array:
        """See `engine.models.parts.Attending`."""
        window = self._state.window(layer)
        keys, values = self._state.with_held(layer, _as_row(keys), _as_row(values))
        self._state.keep(layer, keys, values)
        if self._stretches:
            mask = self._mask(keys.shape[2], window)
            mixed = masked_attention(_as_row(queries), keys, values, mask, scale=self._scale, composed=self._composed)
        else:
            mixed = causal_attention(
                _as_row(queries), keys, values, scale=self._scale, window=window, composed=self._composed
            )
        return _as_tokens(mixed)

    def _mask(self, held: int, window: int) -> mx.array:
        """The mask of layers that hold so much and see so far; made once for all of them."""
        if (held, window) not in self._masks:
            self._masks[held, window] = mask_with_stretches(self._length, held, window, self._stretches)
        return self._masks[held, window]


class CanvasStep(_Step):
    """Leaves a state as it is; each token of the canvas sees the whole canvas, and what its layer holds."""

    __slots__ = ()

    encodes = False

    def attention(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        layer: int,
        kept: bool = False,  # noqa: ARG002 - the Protocol's parameter; no layer attends to another's keys
    ) -> mx.array:
        """See `engine.models.parts.Attending`."""
        keys, values = self._state.with_held(layer, _as_row(keys), _as_row(values))
        return _as_tokens(open_attention(_as_row(queries), keys, values, scale=self._scale, composed=self._composed))


def _as_row(packed: mx.array) -> mx.array:
    """[T, H, 1, D] as [1, H, T, D]."""
    return packed.transpose(2, 1, 0, 3)


def _as_tokens(mixed: mx.array) -> mx.array:
    """[1, H, T, D] as [1, T, H·D]."""
    return mixed.swapaxes(1, 2).flatten(2)
