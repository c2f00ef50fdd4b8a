"""How a generation uses the prefix store: what it may share, and where a prompt may be cut. Units: tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


def salt_mark(salt: str) -> str:
    """What the namespaces of `salt` end with, so that its entries can be found; nobody can read the salt from it."""
    return f"-{hashlib.sha256(salt.encode('utf-8')).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUse:
    """A row reads and feeds the entries of `namespace` alone, which ends with the `salt_mark` of its salt.

    `of_session` marks what it leaves as part of a conversation. `cut_tokens` above 1 asks for exactness: a row then
    begins only where a cold prompt would be cut too, with a state that was written by the same cuts. It begins with
    `least_tokens` at least, and shorter prompts leave nothing: where a state is quantized after its first chunk, the
    tokens of that chunk attend to each other as they are, so it must be as long as in a cold row.
    """

    namespace: str
    of_session: bool = False
    cut_tokens: int = 1
    least_tokens: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether a warm row must compute the very bits of a cold one."""
        return self.cut_tokens > 1
