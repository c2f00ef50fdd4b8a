"""The method over a scripted graph: units in order, commits block by block, ends, restarts, and statistics."""

import pytest

from engine.contracts.cancellation import AbortReason
from engine.contracts.events import CanvasRevised, PrefillProgress, TokensGenerated
from engine.contracts.results import DenoisingStats, FinishReason
from engine.generation.bindings.denoising import bind_denoising_model
from engine.generation.denoising import dispatch_denoising_unit
from engine.generation.row import RowFault
from tests.engine.generation.scripted_denoiser import CANVAS, ScriptedGraph, advance, letters, make_row, run

PROMPT = (9, 8, 7, 6, 5)
MANY = {"max_denoising_steps": 40}


def ids(told):
    return [token.token for event in told if isinstance(event, TokensGenerated) for token in event.tokens]


def text(told):
    return "".join(event.text for event in told if isinstance(event, TokensGenerated))


def test_an_answer_is_committed_block_by_block_until_the_budget_is_used_up():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=20)
    told, finished = run(graph, row)
    commits = [event for event in told if isinstance(event, TokensGenerated)]
    assert [len(event.tokens) for event in commits] == [CANVAS, CANVAS, 4]
    assert ids(told) == graph.said(len(PROMPT), 20)
    assert [token.index for event in commits for token in event.tokens] == list(range(20))
    assert text(told) == letters(ids(told))
    assert finished.finish_reason is FinishReason.LENGTH


def test_a_block_takes_several_passes_and_ends_early_once_all_of_it_is_revealed():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=CANVAS, denoising=MANY)
    _, finished = run(graph, row)
    assert 1 < finished.stats.denoising.steps < 40
    assert len(graph.passes()) == finished.stats.denoising.steps


def test_a_finished_canvas_is_encoded_whole_where_the_prompt_ends_before_the_next_block():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=2 * CANVAS + 1)
    run(graph, row)
    appended = [call for call in graph.calls if call[0] != "pass"]
    assert appended == [("prefill", 5), ("extend", CANVAS, 5), ("extend", CANVAS, 5 + CANVAS)]
    assert graph.states[0].tokens == [*PROMPT, *graph.said(5, 2 * CANVAS)]
    assert [call[2] for call in graph.passes()] == sorted(call[2] for call in graph.passes())


def test_the_first_pass_of_every_block_has_no_feedback_and_every_other_one_has():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=2 * CANVAS)
    run(graph, row)
    offsets = [offset for _, _, offset, _ in graph.passes()]
    firsts = [offset not in offsets[:index] for index, offset in enumerate(offsets)]
    assert [not has_feedback for *_, has_feedback in graph.passes()] == firsts


def test_a_canvas_is_never_shorter_than_the_least_and_its_surplus_is_dropped():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=3, denoising={"min_canvas_length": 6})
    told, finished = run(graph, row)
    assert {call[1] for call in graph.passes()} == {6}
    assert ids(told) == graph.said(5, 3)
    assert finished.stats.denoising.canvas_tokens == 6


def test_an_end_token_ends_the_answer_and_is_neither_delivered_nor_counted():
    graph = ScriptedGraph(script=(*range(2, 13), 1, *range(13, 30)))
    row, _ = make_row(PROMPT, max_tokens=20)
    told, finished = run(graph, row)
    assert ids(told) == graph.said(5, 6)
    assert graph.said(5, 7)[-1] == 1
    assert finished.finish_reason is FinishReason.STOP
    assert finished.stats.generated_tokens == 6


def test_an_end_token_counts_against_the_budget():
    graph = ScriptedGraph(script=(2, 2, 2, 2, 2, 7, 1, *range(8, 20)))
    row, _ = make_row(PROMPT, max_tokens=2)
    told, finished = run(graph, row)
    assert ids(told) == [7]
    assert finished.finish_reason is FinishReason.STOP


def test_a_stop_sequence_cuts_the_text_of_a_block():
    graph = ScriptedGraph()
    said = letters(graph.said(5, 20))
    row, _ = make_row(PROMPT, max_tokens=20, stops=[said[9:11]])
    told, finished = run(graph, row)
    assert text(told) == said[:9]
    assert finished.finish_reason is FinishReason.STOP
    assert finished.matched_stop == said[9:11]
    assert len(ids(told)) == finished.stats.generated_tokens == 11
    assert finished.stats.denoising.blocks == 2


def test_a_prompt_is_read_in_chunks_and_tells_how_far_it_is():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=1, prefill_chunk_size=2)
    told, _ = run(graph, row)
    assert [event for event in told if isinstance(event, PrefillProgress)] == [
        PrefillProgress(2, 5), PrefillProgress(4, 5), PrefillProgress(5, 5)
    ]  # fmt: skip
    assert graph.calls[:3] == [("prefill", 2), ("extend", 2, 2), ("extend", 1, 4)]
    assert graph.states[0].tokens == list(PROMPT)


@pytest.mark.parametrize("token", [0, 1, 2, 31])
def test_a_prompt_keeps_every_id_whatever_the_canvas_is_filled_with(token):
    """No id marks what is to be denoised: a canvas is a place of its own, behind all that was encoded."""
    graph = ScriptedGraph()
    prompt = (token, 5, token, token)
    row, _ = make_row(prompt, max_tokens=2 * CANVAS)
    told, _ = run(graph, row)
    assert graph.states[0].tokens[:4] == list(prompt)
    assert ids(told) == graph.said(4, 2 * CANVAS)


def test_canvases_are_shown_only_to_those_who_ask():
    row, _ = make_row(PROMPT, max_tokens=2 * CANVAS)
    told, _ = run(ScriptedGraph(), row)
    assert not [event for event in told if isinstance(event, CanvasRevised)]


def test_every_pass_shows_what_the_block_would_become_and_the_last_is_what_is_committed():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=CANVAS + 3, draft_blocks=True)
    told, finished = run(graph, row)
    shown = [event for event in told if isinstance(event, CanvasRevised)]
    first = [event for event in shown if event.block_index == 0]
    assert len(shown) == finished.stats.denoising.steps
    assert [event.step for event in first] == list(range(1, len(first) + 1))
    assert [event.committed for event in first] == [False] * (len(first) - 1) + [True]
    assert list(first[-1].tokens) == ids(told)[:CANVAS]
    commit = told.index(first[-1])
    assert isinstance(told[commit + 1], TokensGenerated)


def test_a_row_draws_the_same_alone_and_between_the_units_of_another():
    def answers(rows, graph):
        binding, told = bind_denoising_model(graph), [[] for _ in rows]
        for row in rows:
            row.admit([])
        left = list(range(len(rows)))
        while left:
            for index in list(left):
                events, finished = advance(binding, rows[index])
                told[index] += events
                if finished is not None:
                    left.remove(index)
        return told

    wanted = {"max_tokens": 2 * CANVAS, "draft_blocks": True, "denoising": {"max_denoising_steps": 3}}
    graph, shared = ScriptedGraph(), ScriptedGraph()
    (alone,) = answers([make_row(PROMPT, seed=3, **wanted)[0]], graph)
    together = answers([make_row(PROMPT, seed=seed, **wanted)[0] for seed in (3, 4)], shared)
    assert together[0] == alone
    assert shared.canvases[::2] == graph.canvases
    assert not set(shared.canvases[1::2]) & set(graph.canvases), "another seed must show"


@pytest.mark.parametrize("units", range(1, 8))
def test_a_row_that_is_restarted_says_the_same_as_one_that_is_not(units):
    wanted = {"max_tokens": 2 * CANVAS + 3, "denoising": {"max_denoising_steps": 4}, "prefill_chunk_size": 3}
    undisturbed, end = run(ScriptedGraph(), make_row(PROMPT, **wanted)[0])
    graph, (row, _) = ScriptedGraph(), make_row(PROMPT, **wanted)
    binding, told, finished = bind_denoising_model(graph), [], None
    row.admit([])
    for unit in range(1000):
        if unit == units:
            row.restart([])
        events, finished = advance(binding, row)
        told += events
        if finished is not None:
            break
    assert (ids(told), text(told)) == (ids(undisturbed), text(undisturbed))
    assert finished.stats.denoising == end.stats.denoising
    assert graph.states[0].closed == 1


def test_a_row_whose_scores_are_no_numbers_is_at_fault_and_says_so():
    graph = ScriptedGraph(not_a_number=True)
    row, _ = make_row(PROMPT)
    binding = bind_denoising_model(graph)
    row.admit([])
    advance(binding, row)
    assert dispatch_denoising_unit(binding, row).read() == RowFault("its logits are not finite")


@pytest.mark.parametrize(
    "denoising",
    [
        {"max_denoising_steps": 1},
        {"threshold": 0.0},
        {"threshold": 1.0},
        {"t_min": 5e-324, "t_max": 5e-324},
        {"t_min": 1e308, "t_max": 1e308},
        {"stability_threshold": 0, "confidence_threshold": 1e308},
        {"stability_threshold": 2**32 - 1, "confidence_threshold": 1e308},
        {"stability_threshold": 2, "confidence_threshold": 0.0},
        {"sampler": "entropy-bound", "entropy_bound": 0.0},
        {"sampler": "entropy-bound", "entropy_bound": 1e308},
        {"max_canvas_length": 1},
        {"max_canvas_length": 2**32 - 1, "full_canvas": True},
    ],
)
def test_options_at_the_ends_of_their_ranges_come_to_an_end(denoising):
    row, _ = make_row(PROMPT, max_tokens=3, denoising={"max_denoising_steps": 6} | denoising)
    told, finished = run(ScriptedGraph(), row)
    assert finished.error is None
    assert len(ids(told)) == finished.stats.generated_tokens <= 3


def test_an_aborted_row_keeps_what_was_committed_and_drops_the_block_in_hand():
    graph = ScriptedGraph()
    row, controller = make_row(PROMPT, max_tokens=20)
    binding, told = bind_denoising_model(graph), []
    row.admit([])
    while not ids(told):
        told += advance(binding, row)[0]
    advance(binding, row)
    controller.abort(AbortReason.REQUESTED)
    rest, finished = row.aborted()
    assert rest == ""
    assert finished.finish_reason is FinishReason.CANCELLED
    assert finished.stats.generated_tokens == CANVAS
    assert finished.stats.denoising.blocks == 1
    assert finished.stats.denoising.steps == len(graph.passes())
    assert finished.stats.denoising.canvas_tokens == CANVAS


def test_a_closed_row_has_let_go_of_its_state_once():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT)
    run(graph, row)
    row.close()
    assert [state.closed for state in graph.states] == [1]
    assert row.state is None
    assert row.block is None


def test_statistics_count_delivered_tokens_and_take_the_prompt_into_decoding():
    ticks = iter(float(second) for second in range(1000))
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, max_tokens=2 * CANVAS, clock=lambda: next(ticks))
    _, finished = run(graph, row)
    stats = finished.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (5, 2 * CANVAS)
    assert (stats.cached_tokens, stats.prefill_ms, stats.prefill_tps, stats.cache_tokens) == (0, 0.0, 0.0, ())
    assert (stats.time_to_first_token_ms, stats.decode_ms) == (1000, 2000), "admitted at 0, first token at 1, end at 2"
    assert stats.decode_tps == CANVAS
    assert stats.denoising == DenoisingStats(steps=len(graph.passes()), blocks=2, canvas_tokens=2 * CANVAS)


def test_a_row_that_was_never_admitted_has_waited_and_nothing_else():
    row, _ = make_row(PROMPT, clock=lambda: 3.0)
    stats = row.stats()
    assert stats.queue_ms == 3000.0
    assert (stats.decode_ms, stats.decode_tps, stats.time_to_first_token_ms) == (0.0, 0.0, 0.0)
    assert stats.denoising == DenoisingStats()
