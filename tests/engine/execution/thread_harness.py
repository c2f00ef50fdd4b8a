"""An engine thread over a scripted stepper: rows that feed and emit by numbers, and faults where a test wants them."""

import asyncio
import threading
import time

from engine.contracts.cancellation import AbortController
from engine.contracts.errors import (
    GenerationAborted,
)
from engine.contracts.events import GenerationFinished, GenerationStarted, PrefillProgress, TokensGenerated
from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats
from engine.execution.checkpoints import CheckpointKeeper
from engine.execution.delivery import Dispatcher, Mailbox
from engine.execution.job import Job
from engine.execution.prefixes import PrefixKeeper
from engine.execution.scheduler import Limits
from engine.execution.thread import EngineThread
from engine.state.prefix_store import PrefixStore

STARTED = object.__new__(GenerationStarted)


class FakeCache:
    is_seated = False

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


class FakeRow:
    """Feeds `prompt` tokens one by one, then emits tokens until `length`; a restart feeds everything again."""

    def __init__(self, signal, *, prompt=1, length=3, faulty=False):
        self.signal = signal
        self.prompt_tokens = prompt
        self.cached_tokens = 0
        self.caches = []
        self.known = prompt
        self.fed = 0
        self.position = 0
        self.length = length
        self.faulty = faulty
        self.tokens = []
        self.closed = 0
        self.restarts = 0
        self.told = 0
        self.limit = None

    @property
    def is_prefilling(self):
        return self.fed < self.known

    @property
    def next_index(self):
        return len(self.tokens)

    @property
    def is_rebuilding(self):
        return self.position < self.prompt_tokens + len(self.tokens)

    @property
    def unfed_tokens(self):
        return self.known - self.fed

    def next_width(self, limit_tokens):
        return 1

    def limit_next_unit(self, tokens):
        self.limit = tokens

    def new_progress(self):
        fed = min(self.fed, self.prompt_tokens)
        if self.tokens or fed <= self.told:
            return None
        self.told = fed
        return PrefillProgress(self.told, self.prompt_tokens)

    def restart(self, caches):
        self.restarts += 1
        self.known = self.prompt_tokens + max(0, len(self.tokens) - 1)
        self.fed = self.position = 0

    def admit(self, caches, cached_tokens=0, *, joins_tail=True):
        self.caches = caches

    def receive(self, token):
        if token is None:
            progress = self.new_progress()
            return ([] if progress is None else [progress]), None
        if self.faulty:
            raise RuntimeError("a fault in this row")
        self.tokens.append(token)
        end = self.finished(FinishReason.LENGTH) if len(self.tokens) >= self.length else None
        shown = GeneratedToken(token=token, index=len(self.tokens) - 1)
        return [TokensGenerated((shown,), str(token))], end

    def aborted(self):
        return "", self.finished(FinishReason.CANCELLED, error=GenerationAborted(self.signal.reason))

    def finished(self, reason, error=None):
        return GenerationFinished(
            finish_reason=reason, stats=GenerateStats(generated_tokens=len(self.tokens)), error=error
        )

    def close(self):
        self.closed += 1


class FakePending:
    """A started step: prompts have moved on, tokens are known when it is read."""

    def __init__(self, stepper, rows):
        self.stepper, self.rows = stepper, rows
        self.positions = [row.position for row in rows]
        for row in rows:
            if row.is_prefilling:
                row.fed += 1
            row.position += 1
        self.samples = [not row.is_prefilling and not row.is_rebuilding for row in rows]

    def may_follow(self, row):
        if row not in self.rows or not self.samples[self.rows.index(row)]:
            return True
        return 0 < len(row.tokens) < row.length - 1

    def read(self):
        self.stepper.run(self.rows, self.positions)
        token = self.stepper.fault or 7
        return [token if samples else None for samples in self.samples]


class FakeStepper:
    limits = Limits(
        max_rows=2, prefill_step_tokens=8, prefill_chunk_tokens=8, mixed_prefill_tokens=8, state_bytes=10**9
    )

    def __init__(self):
        self.prefixes = PrefixKeeper(PrefixStore(0), restore=None)
        self.checkpoints = CheckpointKeeper(restore=None)
        self.fault = None
        self.dispatch_faults = 0
        self.guilty = None
        self.guilty_at = 0
        self.most_together = 10**9
        self.dead = False
        self.gate = threading.Semaphore(0)
        self.gated = False
        self.at_gate = False
        self.faults = 0
        self.closed = False
        self.ended_generations = 0
        self.rests = 0
        self.steps = 0

    def make_caches(self):
        return [FakeCache()]

    def dispatch(self, rows, after):
        if self.dispatch_faults:
            self.dispatch_faults -= 1
            raise RuntimeError("no step could be started")
        assert after is None or all(after.may_follow(row) for row in rows if row in after.rows)
        return FakePending(self, list(rows))

    def run(self, rows, positions):
        """The device's part: whatever goes wrong shows when a step is read."""
        if self.gated:
            self.at_gate = True
            assert self.gate.acquire(timeout=60)
        self.steps += 1
        if self.faults:
            self.faults -= 1
            raise RuntimeError("the device hiccuped")
        if self.guilty in rows and positions[rows.index(self.guilty)] >= self.guilty_at:
            raise RuntimeError("this row is poison")
        if len(rows) > self.most_together:
            raise RuntimeError("not enough memory for so many")

    def ended(self):
        self.ended_generations += 1

    def probe(self):
        if self.dead:
            raise RuntimeError("the device is gone")

    def resume(self):
        pass

    def rest(self):
        self.rests += 1

    def close(self):
        self.closed = True


class Harness:
    def __init__(self, *, max_queue=4, load=None, clock=time.perf_counter):
        self.stepper = FakeStepper()
        self.ends = []
        self.submitted = 0
        self.thread = EngineThread(
            load=load or (lambda: self.stepper),
            dispatcher=Dispatcher(asyncio.get_running_loop()),
            on_end=self.ends.append,
            max_queue=max_queue,
            clock=clock,
        )

    def submit(self, *, predicted_bytes=0, **row):
        controller, mailbox = AbortController(), Mailbox(on_finished=lambda: None)
        row = FakeRow(controller.signal, **row)
        job = Job(row=row, mailbox=mailbox, started=STARTED, predicted_bytes=predicted_bytes)
        self.thread.submit(job)
        self.submitted += 1
        return job, controller

    async def stop(self):
        self.stepper.gated = False
        self.stepper.gate.release(100)
        self.thread.stop()
        await asyncio.to_thread(self.thread.join)


async def end_of(job):
    return await asyncio.wait_for(job.mailbox.finished(), 60)


async def events_of(job):
    events = []
    while True:
        events.append(await asyncio.wait_for(job.mailbox.next_event(), 60))
        if isinstance(events[-1], GenerationFinished):
            return events
