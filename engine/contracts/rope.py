"""Parameters of rotary position embedding, as a configuration states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding. `dims` components of each head rotate; lengths are in tokens.

    `traditional` rotates neighbouring pairs (as GGUF llama files are laid out) instead of the two halves.
    `context_length` is the served length; `original_context_length` the one before scaling.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    traditional: bool = False
    dims: int
    factor: float = 1.0
    original_context_length: int = 0
    context_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
