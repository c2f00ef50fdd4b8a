"""Rows of one graph driven by a batch without threads, with every logit of every row noted down."""

import dataclasses
import itertools
import time

import mlx.core as mx

from engine.contracts.cancellation import AbortController, AbortReason
from engine.contracts.events import GenerationFinished, GenerationStarted
from engine.contracts.kv_scheme import PLAIN_KV, converts_at
from engine.contracts.options import ResolvedOptions
from engine.contracts.prefix import PrefixUse
from engine.execution.batch import Batch
from engine.execution.checkpoints import CheckpointKeeper, DurableRow
from engine.execution.job import Job
from engine.execution.packed_method import PackedMethod
from engine.execution.prefixes import BOUNDARY_TOKENS, PrefixKeeper
from engine.execution.scheduler import Limits
from engine.execution.stepper import MethodStepper
from engine.execution.tally import StepTally
from engine.generation.row import Row
from engine.generation.scopes import WiredScope
from engine.state.prefix_store import PrefixStore

CHUNK = 32


class NoText:
    """Text is not the subject."""

    matched_stop = None

    def push(self, token):
        return type("Pushed", (), {"token_bytes": b"", "text": "", "matched_stop": None})()

    def finish(self):
        return ""


class NotedGraph:
    """Passes everything on, and keeps the newest logits."""

    def __init__(self, graph):
        self._graph = graph
        self.logits = None

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def project(self, hidden):
        self.logits = self._graph.project(hidden)
        return self.logits


class NotingStepper(MethodStepper):
    """Notes for each row the logits that each of its tokens was drawn from."""

    def __init__(self, binding, limits, prefixes):
        self.graph = NotedGraph(binding.graph)
        method = PackedMethod(dataclasses.replace(binding, graph=self.graph))
        wired = WiredScope(limit_bytes=0, set_limit=lambda _: 0, synchronize=lambda: None)
        checkpoints = CheckpointKeeper(binding.cache_builder.restore)
        super().__init__(method, wired, limits, prefixes, checkpoints)
        self.notes = {}
        self.steps = 0

    def dispatch(self, rows, after):
        pending = super().dispatch(rows, after)
        for row in rows:
            if pending.place(row) is not None:
                self.notes.setdefault(row, []).append(self.graph.logits[0, pending.place(row)])
        return pending


class Rows:
    """A batch over `binding` with a prefix store of its own."""

    def __init__(self, binding, *, kind, exact=False, capacity_bytes=10**8, disk=None):
        self.kind = kind
        self.store = PrefixStore(capacity_bytes)
        self.keeper = PrefixKeeper(self.store, binding.cache_builder.restore, disk, states_are_cut=kind.cuts)
        limits = Limits(
            max_rows=8, prefill_step_tokens=64, prefill_chunk_tokens=64, mixed_prefill_tokens=64, state_bytes=10**9
        )
        self.stepper = NotingStepper(binding, limits, self.keeper)
        self.told = []
        self.batch = Batch(self.stepper, time.perf_counter, self.told.extend, StepTally())
        self.converts_at = converts_at(kind.composition.get("kv", PLAIN_KV))
        self.use = PrefixUse(
            namespace="", cut_tokens=CHUNK if exact else 1, least_tokens=CHUNK if self.converts_at == 0 else 0
        )
        self.numbers = itertools.count()
        self.jobs = []

    def reusable(self, shared, boundary, prompt_tokens):
        """Tokens with which a row must begin: of a state that can be cut, or at the end of a long enough prompt."""
        if self.use.is_exact:
            tokens = min(shared if self.kind.cuts else boundary, prompt_tokens - 1) // CHUNK * CHUNK
            return tokens if tokens >= self.kind.least_tokens else 0
        if not self.kind.cuts:
            return boundary if boundary >= BOUNDARY_TOKENS else 0
        return min(shared, prompt_tokens - 1) if shared >= self.kind.least_tokens else 0

    def submit(self, prompt, *, warm=True, max_tokens=6, durable=None, continuation=None, **changes):
        values = {"temperature": 0.0, "seed": 1, "seed_was_explicit": True} | changes
        options = ResolvedOptions(
            max_tokens=max_tokens,
            eos_token_ids=(),
            stop_sequences=(),
            prefill_chunk_size=CHUNK,
            top_p=0.0,
            top_k=0,
            min_p=0.0,
            min_tokens_to_keep=1,
            **values,
        )
        controller = AbortController()
        row = Row(
            prompt=prompt,
            options=options,
            signal=controller.signal,
            text=NoText(),
            tail_split=True,
            submitted_at=0.0,
            clock=time.perf_counter,
            chunk_is_exact=True,
            converts_at=self.converts_at,
        )
        started = dataclasses.replace(_started(), prompt_tokens=len(prompt))
        if continuation is not None:
            row.replay(continuation.generated)
        job = Job(
            row=row,
            mailbox=next(self.numbers),
            started=started,
            prefix=self.use if warm else None,
            durable=None if durable is None else DurableRow(row=row, use=durable),
            continuation=continuation,
        )
        self.batch.submit(job)
        self.jobs.append(job)
        return job, controller

    def finish(self):
        while len(self.batch):
            self.batch.advance()
        self.batch.settle()

    def rounds(self, count):
        for _ in range(count):
            self.batch.advance()

    def answer(self, prompt, **wishes):
        """Logits [n, V] of one row that runs to its end, and the tokens that it began with."""
        job, _ = self.submit(prompt, **wishes)
        self.finish()
        return self.logits(job), job.row.cached_tokens

    def logits(self, job):
        return mx.stack(self.stepper.notes[job.row][: job.row.options.max_tokens])

    def cancel_after(self, prompt, rounds, **wishes):
        job, controller = self.submit(prompt, **wishes)
        self.rounds(rounds)
        controller.abort(AbortReason.REQUESTED)
        self.finish()
        return job

    def ends(self):
        return [event for _, event in self.told if isinstance(event, GenerationFinished)]


def _started():
    return GenerationStarted(
        generation_id="",
        request_id="",
        model="",
        weights_fingerprint="",
        descriptor=None,
        execution=None,
        options=None,
        prompt_tokens=0,
    )
