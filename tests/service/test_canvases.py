"""Canvases on the wire: sent to those who ask, numbered block by block, and never instead of committed tokens."""

from __future__ import annotations

from engine.contracts.events import CanvasRevised
from engine.contracts.results import FinishReason
from tests.service.fake_engine import FakeGeneration
from tests.service.harness import Serving, read_all, text_request


async def two_blocks(generation: FakeGeneration) -> None:
    """A script of two blocks, each revised before it is committed."""
    generation.start()
    for block in (0, 1):
        for step, committed in ((1, False), (3, True)):
            canvas = CanvasRevised(block_index=block, step=step, tokens=(step, block), committed=committed)
            await generation.revise(canvas)
        generation.say("ab"[block])
    generation.end(FinishReason.LENGTH)


async def test_canvases_are_sent_between_the_chunks_as_they_are_revised(serving: Serving) -> None:
    serving.engine.script = two_blocks
    responses, error = await read_all(serving.generation.Generate(text_request(delivery={"draft_blocks": True})))
    assert error is None
    updates = [response.block for response in responses if response.WhichOneof("event") == "block"]
    assert [(one.block_index, one.revision, one.step, one.committed) for one in updates] == [
        (0, 0, 1, False), (0, 1, 3, True), (1, 0, 1, False), (1, 1, 3, True)
    ]  # fmt: skip
    assert [list(one.tokens) for one in updates] == [[1, 0], [3, 0], [1, 1], [3, 1]]
    assert "".join(response.chunk.text for response in responses) == "ab"
    assert [response.sequence for response in responses] == list(range(1, len(responses) + 1))


async def test_the_engine_hears_whether_canvases_are_wanted(serving: Serving) -> None:
    await read_all(serving.generation.Generate(text_request(delivery={"draft_blocks": True})))
    await read_all(serving.generation.Generate(text_request()))
    assert [request.draft_blocks for request in serving.engine.requests] == [True, False]
