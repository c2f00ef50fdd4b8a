"""Plays scenarios on rows, in the place of a model. Runs on the engine thread; clock values are seconds.

Where a row stands in its scenario is said by the tokens that it has committed, so a row that was taken back or resumed
goes on where it was.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.results import SampledToken, TokenLogprobs, TopLogprob
from engine.execution.checkpoints import CheckpointKeeper
from engine.execution.prefixes import PrefixKeeper
from engine.execution.scripted.script import END_ID, Failure
from engine.execution.scripted.text import bytes_of
from engine.generation.denoising_row import RevisedCanvas
from engine.generation.row import RowFault
from engine.state.prefix_store import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.contracts.cache import Cache
    from engine.contracts.durability import DurableStore
    from engine.contracts.snapshot import LayerSnapshot
    from engine.execution.job import Pending
    from engine.execution.scheduler import Limits
    from engine.execution.scripted.script import Moment, Revision, Scenario, Script
    from engine.generation.denoising_row import DenoisingRow, DenoisingUnit
    from engine.generation.row import Row, RowUnit

LONGEST_WAIT_SECONDS: Final = 0.01
"""While no row is due the thread looks so often for new work and for rows that were aborted."""
LOGPROB: Final = -0.25
"""Of every token that is said; candidates that are not have one less each."""


class EngineDiedError(Exception):
    """A scenario has asked for it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a row waits for: when it is due, and what happens then, which gives what the row receives."""

    row: Any
    due_at: float
    happens: Callable[[], Any]


class ScriptedStepper:
    """See `engine.execution.job.Stepper`."""

    def __init__(
        self,
        script: Script,
        limits: Limits,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        store: DurableStore | None = None,
    ) -> None:
        """Play `script`; `sleep` waits for so many seconds, and `store` is closed in the end."""
        self.limits = limits
        self.adapters = None
        self.held_bytes = 0
        self.prefixes = PrefixKeeper(PrefixStore(0), _nothing_kept)
        self.checkpoints = CheckpointKeeper(_nothing_kept, store)
        self._script = script
        self._clock = clock
        self._sleep = sleep
        self._scenarios: weakref.WeakKeyDictionary[Any, Scenario] = weakref.WeakKeyDictionary()
        self._since: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._is_dead = False

    def make_caches(self) -> list[Cache]:
        """A scripted row keeps no state."""
        return []

    def dispatch(self, rows: Sequence[Any], after: Pending | None) -> ScriptedStep:  # noqa: ARG002 - nothing follows
        """Begin to wait for the first of `rows` that is due."""
        return ScriptedStep(self, [self._part(row) for row in rows])

    def play(self, parts: Sequence[_Part]) -> list[Any]:
        """Wait for a while, and advance the rows that are due.

        Raises:
            EngineDiedError: a scenario says so.
        """
        earliest = min(part.due_at for part in parts)
        if (wait := earliest - self._clock()) > 0:
            self._sleep(min(wait, LONGEST_WAIT_SECONDS))
        now = self._clock()
        return [self._happened(part) if part.due_at <= now else None for part in parts]

    def ended(self) -> None:
        """Nothing is kept of a row."""

    def probe(self) -> None:
        """Raise once a scenario has ended the engine."""
        if self._is_dead:
            raise EngineDiedError("the script ends the engine here")

    def resume(self) -> None:
        """Nothing is held."""

    def rest(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Let what is kept of durable generations be written."""
        self.checkpoints.close()

    def _happened(self, part: _Part) -> Any:
        self._since[part.row] = part.due_at
        return part.happens()

    def _scenario_of(self, row: Any) -> Scenario:
        """What `row` plays, from when it is first asked for."""
        scenario = self._scenarios.get(row)
        if scenario is None:
            scenario = self._scenarios[row] = self._script.scenario_of(bytes_of(row.prompt))
            self._since[row] = self._clock()
        return scenario

    def _part(self, row: Any) -> _Part:
        """The next unit of a row of the autoregressive method."""
        scenario, unit = self._scenario_of(row), row.next_unit()
        moment = scenario.moment(row.next_index) if unit.samples else None
        seconds = 0.0 if moment is None else moment.pause_seconds
        if row.is_prefilling:
            seconds += scenario.prefill_seconds * len(unit.tokens) / row.prompt_tokens
        return _Part(row, self._since[row] + seconds, lambda: self._advance(row, unit, moment))

    def _advance(self, row: Row, unit: RowUnit, moment: Moment | None) -> SampledToken | RowFault | None:
        if moment is not None and moment.failure is not None:
            return self._fail(moment.failure)
        row.settle(unit)
        return None if moment is None else _sampled(row, moment.token)

    def _fail(self, failure: Failure) -> RowFault:
        if failure is Failure.GENERATION:
            return RowFault("the script ends the generation here")
        self._is_dead = True
        raise EngineDiedError("the script ends the engine here")


class CanvasStepper(ScriptedStepper):
    """The same over rows of the denoising method: scenarios say canvases under revision."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As its parent; all scenarios of the script revise."""
        super().__init__(*arguments, **named)
        self._revised: weakref.WeakKeyDictionary[DenoisingRow, int] = weakref.WeakKeyDictionary()

    def _part(self, row: Any) -> _Part:
        """The next unit of a row of the denoising method."""
        scenario, unit = self._scenario_of(row), row.next_unit()
        if not unit.revises:
            seconds = scenario.prefill_seconds * len(unit.tokens) / row.prompt_tokens
            return _Part(row, self._since[row] + seconds, lambda: row.encoded(unit.tokens))
        revision = scenario.revision(self._revised.get(row, 0))
        return _Part(row, self._since[row] + revision.pause_seconds, lambda: self._revise(row, unit, revision))

    def _revise(self, row: DenoisingRow, unit: DenoisingUnit, revision: Revision) -> RevisedCanvas:
        if unit.tokens:
            row.encoded(unit.tokens)
        self._revised[row] = self._revised.get(row, 0) + 1
        return RevisedCanvas(revision.tokens, revision.ends)


class ScriptedStep:
    """See `engine.execution.job.Pending`. Rows that are not due when it is read stand where they stood."""

    def __init__(self, stepper: ScriptedStepper, parts: Sequence[_Part]) -> None:
        self._stepper = stepper
        self._parts = parts

    def may_follow(self, row: Any) -> bool:  # noqa: ARG002 - the Protocol's parameter
        """Never: all rows wait together, so that none waits for another's pause."""
        return False

    def read(self) -> list[Any]:
        """Wait for the first row, at most for a while; rows that are not due have no token."""
        return self._stepper.play(self._parts)


def _sampled(row: Row, token: int) -> SampledToken:
    options = row.options
    if not (options.logprobs or options.top_logprobs):
        return SampledToken(token)
    others = (other for other in range(END_ID) if other != token)
    candidates = [token, *(next(others) for _ in range(options.top_logprobs - 1))] if options.top_logprobs else []
    top = tuple(TopLogprob(candidate, LOGPROB - place) for place, candidate in enumerate(candidates))
    return SampledToken(token, TokenLogprobs(LOGPROB if options.logprobs else None, top))


def _nothing_kept(_snapshots: Sequence[LayerSnapshot], _tokens: int) -> list[Cache]:
    raise RuntimeError("a scripted engine keeps no states")
