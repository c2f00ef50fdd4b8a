"""Which rows take part in the next step: a pure policy over what rows say of themselves. Units: tokens.

Every decoding row steps every time. Prefilling rows follow in order of admission while the step's budget of prompt
tokens lasts; the first one always moves, whatever its chunk, so that explicit chunk sizes stay exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Schedulable(Protocol):
    """What the policy sees of a row."""

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens remain."""

    @property
    def next_width(self) -> int:
        """Tokens that the row's next unit will hold."""


RowT = TypeVar("RowT", bound=Schedulable)


def plan_step(rows: Sequence[RowT], *, prefill_budget_tokens: int) -> list[RowT]:
    """Choose the rows of the next step, decoding rows first, each group in order of admission."""
    chosen = [row for row in rows if not row.is_prefilling]
    spent = 0
    for row in rows:
        if not row.is_prefilling:
            continue
        if spent and spent + row.next_width > prefill_budget_tokens:
            break
        chosen.append(row)
        spent += row.next_width
    return chosen
