"""The gated delta rule: linear attention whose state is one matrix for each head, decayed and corrected by each token.

For a head with key k, value v, query q, decay g in (0, 1] and strength β the state S [Dv, Dk] becomes
S ← g·S + β·(v - g·S·k)·kᵀ, and the token reads y = S·q. Stretches are computed in chunks, whose tokens meet in matrix
products and one triangular inverse; the results are those of single steps but for rounding. All in float32.
Source: Yang et al. 2024, "Gated Delta Networks", sections 3.1 and 3.3; decision 0013.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_TOKENS = 64
"""Tokens that meet in one chunk; a power of two."""
FEWEST_CHUNKED_TOKENS = 4
"""Shorter stretches go token by token."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What R rows of L tokens bring. H counts value heads; keys and queries are repeated for those that share them.

    queries, keys: [R, L, H, Dk]; values: [R, L, H, Dv]; log_decays (ln g, at most 0), strengths (β): [R, L, H].
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    log_decays: mx.array
    strengths: mx.array

    @property
    def length(self) -> int:
        """L."""
        return self.keys.shape[1]

    def part(self, start: int, end: int) -> DeltaInputs:
        """The tokens in [start, end)."""
        return self._mapped(lambda array: array[:, start:end])

    def filled(self, length: int) -> DeltaInputs:
        """`length` tokens, those added without any effect on the state: no decay, no strength."""
        missing = length - self.length
        return self._mapped(lambda array: mx.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2)))

    def _mapped(self, change: Callable[[mx.array], mx.array]) -> DeltaInputs:
        return DeltaInputs(*(change(getattr(self, name)) for name in self.__slots__))


def gated_delta(inputs: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """Read and update the states of rows.

    Args:
        inputs: R rows of L tokens.
        state: [R, H, Dv, Dk] before them.

    Returns:
        What the tokens read, [R, L, H, Dv], and the states after them.
    """
    read = []
    width = CHUNK_TOKENS if inputs.length >= FEWEST_CHUNKED_TOKENS else 1
    for start in range(0, inputs.length, width):
        part = inputs.part(start, start + width)
        mixed, state = _one(part, state) if width == 1 else _chunk(part, state)
        read.append(mixed)
    return read[0] if len(read) == 1 else mx.concatenate(read, axis=1), state


def _one(inputs: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """One token of each row: key and query meet the old state in one product."""
    query, key, value = (array[:, 0] for array in (inputs.queries, inputs.keys, inputs.values))
    decay, strength = mx.exp(inputs.log_decays[:, 0])[..., None], inputs.strengths[:, 0][..., None]
    recalled = decay[..., None] * (state @ mx.stack([key, query], axis=-1))
    correction = strength * (value - recalled[..., 0])
    read = recalled[..., 1] + correction * mx.sum(key * query, axis=-1, keepdims=True)
    return read[:, None], decay[..., None] * state + correction[..., None] * key[..., None, :]


def _chunk(inputs: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """Up to `CHUNK_TOKENS` tokens of each row.

    With D_ij the decay from token j to token i, the corrections u_i solve the triangular system
    u_i + β_i·Σ_{j<i} D_ij·(k_i·k_j)·u_j = β_i·(v_i - D_i·S·k_i), D_i being the decay from before the chunk.
    """
    tokens = inputs.length
    width = 1 << (tokens - 1).bit_length()
    filled = inputs.filled(width)
    queries, keys, values = (array.swapaxes(1, 2) for array in (filled.queries, filled.keys, filled.values))
    strengths = filled.strengths.swapaxes(1, 2)[..., None]
    log_decays = filled.log_decays.swapaxes(1, 2)[..., None]
    between = _decays_between(log_decays)
    before = mx.exp(mx.cumsum(log_decays, axis=-2))
    system = mx.tril(strengths * between * (keys @ keys.swapaxes(-1, -2)), -1)
    wanted = strengths * (values - before * (keys @ state.swapaxes(-1, -2)))
    corrections = unit_triangular_inverse(system) @ wanted
    meeting = mx.tril(between * (queries @ keys.swapaxes(-1, -2)))
    read = before * (queries @ state.swapaxes(-1, -2)) + meeting @ corrections
    remaining = between[..., -1, :, None]
    state = before[..., -1:, :] * state + (remaining * corrections).swapaxes(-1, -2) @ keys
    return read.swapaxes(1, 2)[:, :tokens], state


def _decays_between(log_decays: mx.array) -> mx.array:
    """Decay from token j to a later token i, [.., C, C] of [.., C, 1]; ones elsewhere.

    Each is a sum of its own: the difference of two sums from the first token on would lose the digits that a strong
    decay before both takes up.
    """
    width = log_decays.shape[-2]
    after = mx.tril(mx.broadcast_to(log_decays, (*log_decays.shape[:-1], width)), -1)
    return mx.exp(mx.cumsum(after, axis=-2))


def unit_triangular_inverse(lower: mx.array) -> mx.array:
    """Inverse of I + `lower`, [.., C, C], for a strictly lower triangular `lower`; C is a power of two.

    Halves are inverted before wholes: the inverse of [[A, 0], [B, D]] is [[A', 0], [-D'·B·A', D']]. No power of the
    matrix is formed, so that similar keys, whose products are near one, lose no digits.
    """
    size = lower.shape[-1]
    inverse = mx.broadcast_to(mx.eye(size, dtype=lower.dtype), lower.shape)
    half = 1
    while half < size:
        off_diagonal = _lower_left_blocks(size, half, lower.dtype)
        inverse = inverse - inverse @ (lower * off_diagonal) @ inverse
        half *= 2
    return inverse


def _lower_left_blocks(size: int, half: int, dtype: mx.Dtype) -> mx.array:
    """Ones where the row is in the second and the column in the first half of one block of 2·`half`; [size, size]."""
    place = mx.arange(size)
    block, second = place // (2 * half), (place // half) % 2
    same = block[:, None] == block[None, :]
    return (same & (second[:, None] == 1) & (second[None, :] == 0)).astype(dtype)
