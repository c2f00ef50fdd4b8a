"""Parameters of rotary position embedding, as configuration files state them.

Kinds whose formula needs a value always carry it: whoever parses a file fills in the documented default.
`dims` counts the components of a head that rotate; context lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding.

    `traditional` pairs neighbouring components (2i, 2i+1) instead of the two halves (i, i + dims/2).
    `attention_factor` None means that the formula of the kind decides; `long_factor` and `short_factor` hold one
    value per pair of components and are empty for other kinds than "longrope". `truncate` widens the range over which
    "yarn" blends to whole components.
    """

    dims: int
    context_length: int
    kind: RopeKind = "default"
    theta: float = 10000.0
    traditional: bool = False
    factor: float = 1.0
    original_context_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
