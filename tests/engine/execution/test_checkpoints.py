"""A row that goes on from a checkpoint gives what the uninterrupted one gave, however its state is kept."""

import dataclasses
import itertools
import threading

import mlx.core as mx
import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.durability import Continuation, DurableIdentity, DurableUse
from engine.state.checkpoint_file import HEAD, PIECE
from engine.state.durable_disk import DurableDisk
from tests.engine.execution.state_kinds import KINDS, ROUNDING, rows_of, text, write_folders

EVERY_TOKENS = 5
MAX_TOKENS = 40
IDENTITY = DurableIdentity(model="m", weights="w", tokenizer="t", kv_storage="k", adapters="[]", arithmetic="a")
KEY = "ab" * 32
PENALISED = {
    "temperature": 0.9,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "frequency_context_size": 9,
    "seed": 7,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory)


@pytest.fixture(params=KINDS)
def rows(request, folders):
    return rows_of(folders, KINDS[request.param])


@pytest.fixture
def plain_rows(folders):
    return rows_of(folders, KINDS["alone"])


class Server:
    """Disks on one folder, as servers that die one after the other have them."""

    def __init__(self, folder):
        self.folder = folder
        self.ids = (f"{number:032x}" for number in itertools.count(1))
        self.disk = self.start()

    def start(self, **changes):
        return DurableDisk(self.folder, **{"capacity_bytes": 10**9, "max_age_seconds": 10**6} | changes)

    def use(self, folder):
        return DurableUse(folder=folder, identity=IDENTITY, every_tokens=EVERY_TOKENS)

    def new(self):
        return self.use(self.disk.create(next(self.ids), KEY))

    def dies(self, use):
        """All that was offered is written, nothing else is done, and another server opens what there is."""
        assert self.disk.wait_idle(60)
        use.folder._lock.unlock()
        self.disk.close()
        self.disk = self.start()
        return self.disk.open(use.folder.generation_id)


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.disk.close()


def outcome(rows, job):
    return job.row.known_tokens[job.row.prompt_tokens :], rows.logits(job)


def uninterrupted(rows, prompt, **options):
    job, _ = rows.submit(prompt, warm=False, max_tokens=MAX_TOKENS, **options)
    rows.finish()
    return outcome(rows, job)


def interrupted(rows, server, use, prompt, *, after_tokens, continuation=None, **options):
    """A durable row that is given up after so many tokens, and what the next server finds of it."""
    job, controller = rows.submit(
        prompt, warm=False, max_tokens=MAX_TOKENS, durable=use, continuation=continuation, **options
    )
    while job.row.next_index < after_tokens:
        rows.rounds(1)
        server.disk.wait_idle(60)  # no checkpoint is skipped
    controller.abort(AbortReason.REQUESTED)
    rows.finish()
    return server.dies(use)


def continued(rows, prompt, continuation, *, durable=None, **options):
    job, _ = rows.submit(
        prompt, warm=False, max_tokens=MAX_TOKENS, durable=durable, continuation=continuation, **options
    )
    rows.finish()
    return outcome(rows, job)


def assert_goes_on(rows, found, wanted, known):
    """Every id, and the logits that each new one was drawn from."""
    ids, logits = found
    wanted_ids, wanted_logits = wanted
    assert ids == wanted_ids
    assert logits.shape == wanted_logits[known:].shape
    if rows.use.is_exact or rows.kind.composition.get("library_arithmetic"):
        assert mx.array_equal(logits, wanted_logits[known:]).item()
    else:
        assert mx.abs(logits - wanted_logits[known:]).max().item() < ROUNDING


@pytest.mark.parametrize("length", [1, 40, 300])
def test_a_row_goes_on_from_its_checkpoint_as_if_nothing_had_happened(rows, server, length):
    prompt = text(1, length)
    wanted = uninterrupted(rows, prompt)
    kept = interrupted(rows, server, server.new(), prompt, after_tokens=23)
    assert kept.damaged == ()
    assert kept.facts.state_tokens == length + 20
    assert kept.facts.tokens == (*prompt, *wanted[0][:21])
    found = continued(rows, prompt, Continuation(generated=wanted[0][:21], seed=1, state=kept.state))
    assert_goes_on(rows, found, wanted, known=21)


@pytest.mark.parametrize("known", [22, 39])
def test_what_came_after_the_checkpoint_is_fed_again_as_it_was(rows, server, known):
    prompt = text(1, 60)
    wanted = uninterrupted(rows, prompt)
    kept = interrupted(rows, server, server.new(), prompt, after_tokens=23)
    found = continued(rows, prompt, Continuation(generated=wanted[0][:known], seed=1, state=kept.state))
    assert_goes_on(rows, found, wanted, known)


@pytest.mark.parametrize("known", [1, 30])
def test_a_state_is_rebuilt_from_the_ids_alone(rows, known):
    prompt = text(1, 60)
    wanted = uninterrupted(rows, prompt)
    found = continued(rows, prompt, Continuation(generated=wanted[0][:known], seed=1))
    assert_goes_on(rows, found, wanted, known)


def test_a_row_that_dies_again_and_again_comes_to_the_same_end(rows, server):
    prompt = text(1, 137)
    wanted = uninterrupted(rows, prompt, **PENALISED)
    use, continuation = server.new(), None
    for after_tokens in (8, 14, 31):
        kept = interrupted(rows, server, use, prompt, after_tokens=after_tokens, continuation=continuation, **PENALISED)
        generated = kept.facts.tokens[137:]
        assert generated == wanted[0][: len(generated)]
        assert len(generated) == after_tokens // EVERY_TOKENS * EVERY_TOKENS + 1
        continuation = Continuation(generated=generated, seed=7, state=kept.state)
        use = server.use(kept.folder)
    found = continued(rows, prompt, continuation, **PENALISED)
    assert found[0] == wanted[0]


def test_a_checkpoint_costs_what_it_adds_and_two_are_kept(rows, server):
    prompt = text(1, 300)
    kept = interrupted(rows, server, server.new(), prompt, after_tokens=33)
    names = sorted(path.name for path in kept.folder.path.iterdir())
    assert [name for name in names if HEAD.fullmatch(name)] == [
        "checkpoint-0000000325.safetensors",
        "checkpoint-0000000330.safetensors",
    ]
    pieces = [kept.folder.path / name for name in names if PIECE.fullmatch(name)]
    assert len(names) == len(pieces) + 2
    if rows.kind.cuts:
        assert len(pieces) == 6
        assert pieces[-1].stat().st_size * 5 < pieces[0].stat().st_size
    assert len(kept.state.take_snapshots()) == len(rows.stepper.make_caches())


def test_in_company_too(rows, server):
    prompts = [text(seed, 30 + 7 * seed) for seed in range(1, 4)]
    wanted = [uninterrupted(rows, prompt)[0] for prompt in prompts]
    uses = [server.new() for _ in prompts]
    started = [
        rows.submit(prompt, warm=False, max_tokens=MAX_TOKENS, durable=use)
        for prompt, use in zip(prompts, uses, strict=True)
    ]
    while min(job.row.next_index for job, _ in started) < 23:
        rows.rounds(1)
        server.disk.wait_idle(60)
    for _, controller in started:
        controller.abort(AbortReason.DISCONNECTED)
    rows.finish()
    assert server.disk.wait_idle(60)
    for use in uses:
        use.folder._lock.unlock()
    kept = [server.disk.open(use.folder.generation_id) for use in uses]
    jobs = [
        rows.submit(
            prompt,
            warm=False,
            max_tokens=MAX_TOKENS,
            continuation=Continuation(generated=one.facts.tokens[len(prompt) :], seed=1, state=one.state),
        )[0]
        for prompt, one in zip(prompts, kept, strict=True)
    ]
    rows.finish()
    assert [job.row.known_tokens[job.row.prompt_tokens :] for job in jobs] == wanted


def test_after_a_failed_step_the_next_checkpoint_adds_to_nothing_older(plain_rows, server, monkeypatch):
    """The state is rebuilt by other cuts then, and must not be joined to pieces of the one before."""
    rows, use = plain_rows, server.new()
    real, calls = rows.stepper.dispatch, itertools.count()

    def failing(*given):
        if next(calls) == 20:
            raise RuntimeError("the device hiccuped")
        return real(*given)

    monkeypatch.setattr(rows.stepper, "dispatch", failing)
    prompt = text(1, 60)
    kept = interrupted(rows, server, use, prompt, after_tokens=23)
    assert [piece.layers[0].start for piece in use.folder._heads[-1].pieces] == [0]
    monkeypatch.setattr(rows.stepper, "dispatch", real)
    wanted = uninterrupted(rows, prompt)
    found = continued(rows, prompt, Continuation(generated=wanted[0][:21], seed=1, state=kept.state))
    assert found[0] == wanted[0]


def test_a_slow_disk_costs_checkpoints_and_nobody_waits_for_it(plain_rows, server, monkeypatch):
    rows, use = plain_rows, server.new()
    gate, offering, real, offered = threading.Event(), threading.Event(), use.folder._write, []

    def held_up(*given):
        offered.append(given[0].state_tokens)
        offering.set()
        gate.wait(60)
        real(*given)

    monkeypatch.setattr(use.folder, "_write", held_up)
    job, controller = rows.submit(text(1, 30), warm=False, max_tokens=MAX_TOKENS, durable=use)
    while job.row.next_index < 33:
        rows.rounds(1)
    assert offering.wait(60)
    assert offered == [35], "one is on its way, and none is taken beside it"
    gate.set()
    assert server.disk.wait_idle(60)
    while job.row.next_index < 39:
        rows.rounds(1)
    assert server.disk.wait_idle(60)
    assert offered[0] == 35
    assert offered[1] in (63, 64), "the next one adds all that has come since"
    assert use.folder._heads[-1].state_tokens == offered[-1]
    controller.abort(AbortReason.REQUESTED)
    rows.finish()


def test_a_state_that_cannot_be_taken_or_used_costs_nobody_anything(plain_rows, server, monkeypatch):
    rows, prompt = plain_rows, text(1, 40)
    wanted = uninterrupted(rows, prompt)
    kept = interrupted(rows, server, server.new(), prompt, after_tokens=23)
    monkeypatch.setattr("engine.state.kv_cache.KvCache.added_since", lambda *_: 1 / 0)
    unlucky = server.new()
    assert continued(rows, prompt, None, durable=unlucky)[0] == wanted[0]
    assert server.disk.wait_idle(60)
    monkeypatch.setattr(rows.batch._checkpoints, "_restore", lambda *_: 1 / 0)
    found = continued(rows, prompt, Continuation(generated=wanted[0][:21], seed=1, state=kept.state))
    assert_goes_on(rows, found, wanted, known=21)


def test_a_generation_that_has_come_to_its_end_leaves_no_checkpoint(plain_rows, server):
    use = server.new()
    job, _ = plain_rows.submit(text(1, 30), warm=False, max_tokens=MAX_TOKENS, durable=use)
    while job.row.next_index < 30:
        plain_rows.rounds(1)
        server.disk.wait_idle(60)
    assert list(use.folder.path.iterdir())
    plain_rows.finish()
    assert server.disk.wait_idle(60)
    assert list(use.folder.path.iterdir()) == []
    assert plain_rows.batch._checkpoints._rows == {}


def test_rows_that_leave_are_forgotten(plain_rows, server):
    use = server.new()
    interrupted(plain_rows, server, use, text(1, 30), after_tokens=13)
    assert plain_rows.batch._checkpoints._rows == {}


def test_statistics_of_a_row_that_goes_on(plain_rows, server):
    prompt = text(1, 40)
    kept = interrupted(plain_rows, server, server.new(), prompt, after_tokens=23)
    generated = kept.facts.tokens[40:]
    job, _ = plain_rows.submit(
        prompt,
        warm=False,
        max_tokens=MAX_TOKENS,
        continuation=Continuation(generated=generated, seed=1, state=kept.state),
    )
    plain_rows.finish()
    stats = plain_rows.ends()[-1].stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (40, 40, MAX_TOKENS)
    assert (stats.prefill_ms, stats.prefill_tps) == (0.0, 0.0)
    assert stats.decode_tps == pytest.approx(1000 * (MAX_TOKENS - len(generated)) / stats.decode_ms)
    assert stats.cache_tokens == job.row.known_tokens[:-1]


def test_identities_say_what_differs():
    others = {"weights": "x", "kv_storage": "y"}
    assert IDENTITY.differences(dataclasses.replace(IDENTITY, **others)) == ("weights", "kv_storage")
    assert IDENTITY.differences(IDENTITY) == ()
