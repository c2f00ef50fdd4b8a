"""How prompts with images are cut: no image is, each reaches the graph once, with its place in the unit."""

import numpy as np
import pytest

from engine.contracts.vision import PromptImage
from engine.generation.image_stretches import images_within, unit_end, widest_unit
from tests.engine.generation.scripted_denoiser import ScriptedGraph, make_row, run

PROMPT = tuple(range(2, 26))


def image(start, tokens):
    return PromptImage(start=start, tokens=tokens, pixels=np.zeros((2, 2, 3), dtype=np.uint8))


@pytest.mark.parametrize("chunk_tokens", range(1, 26))
@pytest.mark.parametrize("places", [[(0, 5)], [(3, 4), (9, 6)], [(20, 4)], [(1, 22)], [(2, 1), (3, 1)]], ids=str)
def test_units_cover_the_prompt_and_cut_no_image(places, chunk_tokens):
    images, start, seen, widths = [image(*place) for place in places], 0, [], []
    while start < len(PROMPT):
        end = min(unit_end(images, start, start + chunk_tokens), len(PROMPT))
        seen += [(start + one.start, one.tokens) for one in images_within(images, start, end)]
        assert all(one.start + one.tokens <= end - start for one in images_within(images, start, end))
        widths.append(end - start)
        start = end
    assert seen == places
    assert min(widths) > 0
    assert max(widths) <= widest_unit([tokens for _, tokens in places], chunk_tokens)


def test_a_row_gives_each_image_to_the_graph_with_the_unit_that_holds_it():
    graph = ScriptedGraph()
    row, _ = make_row(PROMPT, images=[image(3, 6), image(12, 2)], prefill_chunk_size=4, max_tokens=9)
    run(graph, row)
    assert [call[1] for call in graph.calls if call[0] in ("prefill", "extend")][:6] == [3, 6, 3, 4, 4, 4]
    assert graph.images == [(3, 0), (12, 0)]


def test_a_row_that_begins_anew_reads_its_images_again():
    row, _ = make_row(PROMPT, images=[image(3, 6)], max_tokens=9)
    row.admit([])
    first = row.next_unit()
    row.encoded(first.tokens)
    row.restart([])
    again = row.next_unit()
    assert (again.tokens, again.revises) == (first.tokens, first.revises)
    assert [(one.start, one.pixels is row._images[0].pixels) for one in again.images] == [(3, True)]
