"""What a sampler hands over: a token for each row, on the device, and whether it is final."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Choice:
    """Ids [Q] uint32, and whether each is certain to be right; one that is not has to be checked on the host."""

    tokens: mx.array
    sure: mx.array
