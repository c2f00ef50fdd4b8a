"""What a slow reader finds in its mailbox: tokens joined, and of each block the newest canvas, in order."""

from engine.contracts.events import CanvasRevised, GenerationFinished, TokensGenerated
from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats
from engine.execution.delivery import Mailbox

END = GenerationFinished(finish_reason=FinishReason.STOP, stats=GenerateStats())


def canvas(block, step, *, committed=False):
    return CanvasRevised(block_index=block, step=step, tokens=(step,), committed=committed)


def generated(*tokens):
    shown = tuple(GeneratedToken(token=token, index=token) for token in tokens)
    return TokensGenerated(shown, "".join(map(str, tokens)))


async def read(mailbox, count):
    return [await mailbox.next_event() for _ in range(count)]


async def test_of_one_block_only_the_newest_canvas_waits():
    mailbox = Mailbox(on_finished=lambda: None)
    for step in (1, 2, 3):
        mailbox.put(canvas(0, step))
    mailbox.put(END)
    assert await read(mailbox, 2) == [canvas(0, 3), END]


async def test_a_canvas_comes_before_its_tokens_and_they_before_the_next_canvas():
    mailbox = Mailbox(on_finished=lambda: None)
    events = [canvas(0, 1), canvas(0, 2, committed=True), generated(1, 2), canvas(1, 1), canvas(1, 2), generated(3)]
    for event in events:
        mailbox.put(event)
    mailbox.put(END)
    assert await read(mailbox, 5) == [
        canvas(0, 2, committed=True), generated(1, 2), canvas(1, 2), generated(3), END
    ]  # fmt: skip


async def test_tokens_of_several_steps_are_joined():
    mailbox = Mailbox(on_finished=lambda: None)
    mailbox.put(generated(1))
    mailbox.put(generated(2, 3))
    mailbox.put(END)
    assert await read(mailbox, 2) == [generated(1, 2, 3), END]


async def test_a_reader_who_keeps_up_sees_every_canvas():
    mailbox = Mailbox(on_finished=lambda: None)
    for step in (1, 2):
        mailbox.put(canvas(0, step))
        assert await mailbox.next_event() == canvas(0, step)
