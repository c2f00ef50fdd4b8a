"""The Protocol of a prefill policy: how many prompt tokens one chunk may hold."""

from __future__ import annotations

from typing import Protocol


class PrefillPolicy(Protocol):
    """Chooses the chunk width of a prompt once, from its full length."""

    def chunk_size(self, prompt_tokens: int) -> int:
        """Tokens per prefill chunk (at least 1) for a prompt of `prompt_tokens`."""
