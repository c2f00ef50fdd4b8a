"""What the tokens of one append see, in a row that attends by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from engine.state.codec import KvCodec


@dataclass(frozen=True, slots=True)
class CodedKeys:
    """See `engine.contracts.cache.HeldKeys`. `parts` are a codec's, of all tokens in sight; `window` counts tokens."""

    codec: KvCodec
    parts: Sequence[mx.array]
    window: int = 0

    def attend(self, queries: mx.array, *, scale: float, softcap: float = 0.0) -> mx.array:
        """See `engine.contracts.cache.HeldKeys.attend`."""
        return self.codec.attend(queries, self.parts, scale=scale, softcap=softcap, window=self.window)
