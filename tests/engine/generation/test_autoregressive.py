"""Steps dispatched ahead of the host: the same ids and the same books as steps that wait for each other."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from engine.contracts.cancellation import AbortSignal
from engine.contracts.composition import COMPOSITION_DEFAULTS, Composition
from engine.contracts.graph import GraphDeclaration
from engine.contracts.options import ResolvedOptions
from engine.contracts.results import SampledToken
from engine.generation.autoregressive import dispatch_packed_step
from engine.generation.bindings.autoregressive import MlxAutoregressiveBinding
from engine.generation.row import CORRECTION_MEMORY_TOKENS, Row, RowFault
from engine.models.foreign_state import ForeignStates
from engine.sampling.mass import log_softmax
from engine.state.block_pool import BlockPool
from engine.state.kv_cache import KvCache
from engine.state.kv_pool import KvPool
from engine.state.paged_cache import PagedKvCache
from engine.state.plain_codec import PlainCodec
from engine.state.recurrent_cache import RecurrentCache
from tests.engine.models import tiny_llama


class NoText:
    """Text is not the subject here."""

    matched_stop = None

    def push(self, token):
        return type("Pushed", (), {"token_bytes": b"", "text": "", "matched_stop": None})()

    def finish(self):
        return ""


def row(caches, prompt, *, converts_at=None, chunk_is_exact=False, **changes):
    options = {
        "max_tokens": 9,
        "eos_token_ids": (),
        "stop_sequences": (),
        "prefill_chunk_size": 4,
        "temperature": 0.0,
        "top_p": 0.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens_to_keep": 1,
        "seed": 3,
        "seed_was_explicit": True,
    }
    made = Row(
        prompt=prompt,
        options=ResolvedOptions(**(options | changes)),
        signal=AbortSignal(),
        text=NoText(),
        tail_split=True,
        submitted_at=0.0,
        clock=time.perf_counter,
        converts_at=converts_at,
        chunk_is_exact=chunk_is_exact,
    )
    made.admit(caches)
    return made


def committed(rows, drawn, ids):
    """Commit what was drawn; returns the rows that go on."""
    left = []
    for made, token in zip(rows, drawn, strict=True):
        if made.caches:
            if isinstance(token, RowFault):
                ids.setdefault(made, []).append(token)
                made.close()
                continue
            if token is not None:
                ids.setdefault(made, []).append(token.token)
                if made.commit(token)[2] is not None:
                    made.close()
                    continue
            left.append(made)
    return left


def waiting(binding, rows):
    ids, left = {}, list(rows)
    while left:
        left = committed(left, dispatch_packed_step(binding, left).read(), ids)
    return [ids[made] for made in rows]


def ahead(binding, rows):
    """Each step is dispatched before the one before it is read, with the rows that may follow."""
    ids, pending, stepping = {}, dispatch_packed_step(binding, rows), list(rows)
    overlapped = 0
    while stepping:
        following = [made for made in rows if made.caches and pending.may_follow(made)]
        after = dispatch_packed_step(binding, following, pending) if following else None
        overlapped += sum(pending.place(made) is not None for made in following)
        committed(stepping, pending.read(), ids)
        if after is None:
            following = [made for made in rows if made.caches]
            after = dispatch_packed_step(binding, following) if following else None
        pending, stepping = after, following
    return [ids[made] for made in rows], overlapped


def company(binding, **changes):
    prompts = [tiny_llama.random_prompt(seed, length) for seed, length in ((1, 3), (2, 11), (3, 1), (4, 6), (5, 9))]
    options = [{}, {"temperature": 0.9}, {"max_tokens": 1}, {"max_tokens": 2}, {"temperature": 0.7, "top_p": 0.8}]
    return [
        row(binding.make_cache(), prompt, **(option | changes)) for prompt, option in zip(prompts, options, strict=True)
    ]


@pytest.fixture
def binding(tmp_path):
    tiny_llama.write(tmp_path, scale=20.0)
    return tiny_llama.bind(tmp_path)


def test_steps_ahead_choose_the_ids_of_steps_that_wait(binding):
    wanted = waiting(binding, company(binding))
    found, overlapped = ahead(binding, company(binding))
    assert found == wanted
    assert [len(ids) for ids in found] == [9, 9, 1, 2, 9]
    assert overlapped >= 15


def test_a_row_that_ends_after_its_successor_was_dispatched_leaves_nothing(binding):
    wanted = waiting(binding, company(binding))
    eos = (wanted[0][3],)
    rows = company(binding, eos_token_ids=eos)
    found, _ = ahead(binding, rows)
    assert found == [[*ids[: ids.index(eos[0])], eos[0]] if eos[0] in ids else ids for ids in wanted]
    assert [made.caches for made in rows] == [[]] * 5


def test_caches_hold_what_was_fed_and_nothing_else(binding):
    made = row(binding.make_cache(), [1, 2, 3])
    while made.next_index == 0:
        committed([made], dispatch_packed_step(binding, [made]).read(), {})
    first = dispatch_packed_step(binding, [made])
    second = dispatch_packed_step(binding, [made], first)
    committed([made], first.read(), {})
    committed([made], second.read(), {})
    assert {cache.offset for cache in made.caches} == {5}
    assert len(made.stats().cache_tokens) == 5


VOCAB = 8192


@dataclass
class NearTies:
    """A graph of one step's memory whose two best scores are tied by rounding after every token."""

    plain: int
    composition: Composition = COMPOSITION_DEFAULTS

    def maintain(self, segments):
        pass

    def hidden(self, tokens, segments):
        for segment in segments:
            for cache in segment.caches:
                zeros = mx.zeros((1, 1, segment.length, 4))
                cache.attend(zeros, zeros, zeros, scale=1.0)
        return tokens[..., None].astype(mx.float32)

    def project(self, hidden):
        logits = mx.broadcast_to(near_tie(), (1, hidden.shape[1], VOCAB))
        # Whoever was fed the plain choice would go astray.
        return mx.where(hidden == self.plain, mx.arange(VOCAB)[None, None].astype(mx.float32), logits)


def near_tie():
    """Logits whose largest, at 7, is above the others by a quarter of a rounding step of their normalised scores."""
    logits = mx.full((VOCAB,), 3.0)
    logits[7] = 3.0 + 2.0**-22
    assert mx.argmax(logits).item() == 7
    assert mx.argmax(log_softmax(logits, composed=True)).item() == 0
    return logits


class NearTiesOfOneSum(NearTies):
    """The same over a state that no token can be taken back from: the sum of all that were fed."""

    def hidden(self, tokens, segments):
        (segment,) = segments
        (state,) = segment.caches
        total = tokens.sum() + (0 if state.caches[0][0] is None else state.caches[0][0])
        state.caches[0][0] = total
        state.advance(segment.length)
        return mx.where(total > 3, self.plain, 0) * mx.ones((1, segment.length, 1))


class NearTiesOfRecurrence(NearTies):
    """The same over recurrent states, of which each row keeps the one before: whoever fed a 7 strays for good."""

    def hidden(self, tokens, segments):
        parts, start = [], 0
        for segment in segments:
            (cache,) = segment.caches
            held = cache.read()
            fed = tokens[:, start : start + segment.length].astype(mx.float32).sum()
            total = fed if held is None else held[1] + fed
            cache.write(mx.zeros((1,)), total, tokens=segment.length)
            parts.append(mx.where(total > 3, self.plain, 0) * mx.ones((1, segment.length, 1)))
            start += segment.length
        return mx.concatenate(parts, axis=1)


def bound(graph, caches, *, packed=True):
    """A binding of a graph that nothing is known of but how it is stepped."""
    return MlxAutoregressiveBinding(
        graph=graph,
        descriptor=None,
        declaration=GraphDeclaration(packed_segments=packed),
        geometry=None,
        composition=graph.composition,
        prefill_policy=None,
        eos_token_ids=(),
        weights_bytes=0,
        cache_builder=SimpleNamespace(make_caches=getattr(caches, "make_caches", None), converts=False),
        experts=None,
    )


def test_a_state_that_cannot_step_back_is_made_anew_where_rounding_ties_scores():
    binding = bound(NearTiesOfOneSum(plain=7), ForeignStates(lambda: [ArraysCache(1)]), packed=False)

    def rows():
        return [row(binding.make_cache(), [1, 2]), row(binding.make_cache(), [3])]

    assert waiting(binding, rows()) == [[0] * 9] * 2
    found, overlapped = ahead(binding, rows())
    assert found == [[0] * 9] * 2
    assert overlapped > 0


CACHES = {
    "pooled": KvPool(1).make_caches,
    "in pages": lambda: [PagedKvCache(BlockPool(4), PlainCodec())],
    "in a window that has moved on": lambda: [KvCache(window=2)],
}


@pytest.mark.parametrize("make_caches", CACHES.values(), ids=CACHES)
def test_greedy_rows_follow_the_rule_even_where_rounding_ties_scores(make_caches):
    graph = bound(NearTies(plain=7), SimpleNamespace(make_caches=make_caches))
    prompts = [[*range(1, 60)], [3]]
    wanted = waiting(graph, [row(make_caches(), prompt) for prompt in prompts])
    assert wanted == [[0] * 9] * 2
    rows = [row(make_caches(), prompt) for prompt in prompts]
    found, overlapped = ahead(graph, rows)
    assert found == wanted
    assert overlapped > 0
    assert all(not row.caches for row in rows)


def test_recurrent_rows_take_a_wrong_guess_back_and_never_wait_for_it():
    graph = bound(NearTiesOfRecurrence(plain=7), None)

    def rows():
        return [row([RecurrentCache()], [1, 2]), row([RecurrentCache()], [3])]

    assert waiting(graph, rows()) == [[0] * 9] * 2
    found, overlapped = ahead(graph, rows())
    assert found == [[0] * 9] * 2
    assert overlapped > 0


class NearTiesAtFirst(NearTiesOfOneSum):
    """The same, but after ten tokens the scores are clear, whatever was fed."""

    def hidden(self, tokens, segments):
        (segment,) = segments
        (state,) = segment.caches
        fed = segment.length + (0 if state.caches[0][0] is None else state.caches[0][0].item())
        state.caches[0][0] = mx.array(fed)
        state.advance(segment.length)
        return mx.full((1, segment.length, 1), self.plain if fed > 10 else 0)


def test_a_row_whose_guesses_are_often_wrong_waits_for_its_tokens_and_tries_again_later():
    binding = bound(NearTiesAtFirst(plain=7), ForeignStates(lambda: [ArraysCache(1)]), packed=False)
    made = row(binding.make_cache(), [1, 2], max_tokens=150)
    restarts, restart = [], made.restart
    made.restart = lambda caches: restarts.append(made.next_index) or restart(caches)
    [found], overlapped = ahead(binding, [made])
    assert found == [0] * 9 + [VOCAB - 1] * 141
    assert restarts == [2]
    waited = 8 + CORRECTION_MEMORY_TOKENS
    assert overlapped == 1 + 149 - waited


def test_a_row_knows_which_tokens_its_state_holds_while_a_wrong_guess_is_in_it():
    pool = KvPool(1)
    graph = bound(NearTies(plain=7), pool)
    made = row(pool.make_caches(), [1, 2])
    while made.next_index == 0:
        committed([made], dispatch_packed_step(graph, [made]).read(), {})
    first = dispatch_packed_step(graph, [made])
    second = dispatch_packed_step(graph, [made], first)
    committed([made], first.read(), {})
    assert (made.state_tokens, [cache.offset for cache in made.caches]) == ((1, 2, 0), [4])
    second.read()
    assert (made.state_tokens, [cache.offset for cache in made.caches]) == ((1, 2, 0), [3])
    assert made.position == 3
    committed([made], dispatch_packed_step(graph, [made]).read(), {})
    assert (made.state_tokens, [cache.offset for cache in made.caches]) == ((1, 2, 0, 0), [4])


BAD_TOKEN = 90


@pytest.fixture
def bad_binding(tmp_path):
    """A model with one embedding that is not a number."""
    tiny_llama.write(tmp_path, scale=20.0, tie_word_embeddings=False)
    stored = mx.load(str(tmp_path / "model.safetensors"))
    stored["model.embed_tokens.weight"][BAD_TOKEN] = mx.nan
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    return tiny_llama.bind(tmp_path)


@pytest.mark.parametrize("stepping", [waiting, lambda *given: ahead(*given)[0]], ids=["waiting", "ahead"])
@pytest.mark.parametrize("change", [{}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_go_on(bad_binding, stepping, change):
    wanted = stepping(bad_binding, company(bad_binding))
    rows = company(bad_binding)
    rows.insert(1, row(bad_binding.make_cache(), [1, BAD_TOKEN, 2], **change))
    found = stepping(bad_binding, rows)
    assert found.pop(1) == [RowFault("its logits are not finite")]
    assert found == wanted
    assert stepping(bad_binding, company(bad_binding)) == wanted


@pytest.mark.parametrize(
    ("converts_at", "widths"),
    [
        (None, [5] * 7 + [4, 1]),
        (0, [16, 5, 5, 5, 5, 3, 1]),
        (18, [5, 5, 5, 3, 5, 5, 5, 5, 1, 1]),
        (3, [3, *[5] * 7, 1, 1]),
    ],
)
def test_company_never_decides_what_is_read_before_a_state_is_quantized(converts_at, widths):
    made = row([], range(40), converts_at=converts_at, prefill_chunk_size=16)
    found = []
    while made.is_prefilling:
        made.limit_next_unit(5)
        assert made.next_width(5) == len(made.next_unit().tokens)
        found.append(len(made.next_unit().tokens))
        made.settle(made.next_unit())
    assert found == widths


@pytest.mark.parametrize(
    ("converts_at", "widths"),
    [(None, [16, 16, 7, 1]), (0, [16, 16, 7, 1]), (18, [16, 2, 14, 7, 1]), (3, [3, 13, 16, 7, 1])],
)
def test_exact_chunks_end_at_their_multiples_again_after_a_state_was_quantized(converts_at, widths):
    """Where a prompt is cut is where another one can begin."""
    made = row([], range(40), converts_at=converts_at, chunk_is_exact=True, prefill_chunk_size=16)
    found = []
    while made.is_prefilling:
        made.limit_next_unit(5)
        found.append(len(made.next_unit().tokens))
        made.settle(made.next_unit())
    assert found == widths


@pytest.mark.parametrize("name", ["correct", "step_back"])
def test_a_row_that_cannot_take_back_a_wrong_guess_is_at_fault_alone(name):
    pool = KvPool(1)
    graph = bound(NearTies(plain=7), pool)
    rows = [row(pool.make_caches(), [1, 2 + index]) for index in range(4)]
    setattr(rows[1], name, mock.Mock(side_effect=RuntimeError(name)))
    found, _ = ahead(graph, rows)
    assert [found[0], *found[2:]] == [[0] * 9] * 3
    assert [isinstance(token, RowFault) for token in found[1]] == [*[False] * (len(found[1]) - 1), True]


@pytest.mark.parametrize(
    ("changes", "widths"),
    [({}, [4, 3, 1]), ({"converts_at": 2}, [2, 1, 1, 1, 1, 1, 1]), ({"chunk_is_exact": True}, [3, 1, 1, 1, 1, 1])],
)
def test_a_rebuilt_row_reads_generated_tokens_one_at_a_time_where_cuts_would_change_what_it_says(changes, widths):
    made = row([], [1, 2, 3, 4], **changes)
    for token in range(5):
        made.commit(SampledToken(token))
    made.restart([])
    read = []
    while made.is_prefilling:
        unit = made.next_unit()
        assert not unit.samples
        made.settle(unit)
        read.append(len(unit.tokens))
    assert read == widths
