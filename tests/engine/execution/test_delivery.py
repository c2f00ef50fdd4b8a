"""What a slow reader finds in its mailbox: tokens joined, and of each block the newest canvas, in order."""

import asyncio
from unittest import mock

from engine.contracts.errors import GenerationFailedError
from engine.contracts.events import CanvasRevised, GenerationFinished, TokensGenerated
from engine.contracts.results import FinishReason, GeneratedToken, GenerateStats
from engine.execution.delivery import Dispatcher, Mailbox

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


async def test_a_mailbox_that_fails_ends_alone_and_the_others_of_the_step_hear_what_they_are_due():
    mailboxes = [Mailbox(on_finished=lambda: None) for _ in range(4)]
    mailboxes[1].put = mock.Mock(side_effect=RuntimeError("a fault"))
    dispatcher = Dispatcher(asyncio.get_running_loop())
    dispatcher.deliver([(one, event) for event in (generated(1), END) for one in mailboxes])
    for mailbox in (mailboxes[0], *mailboxes[2:]):
        assert await read(mailbox, 2) == [generated(1), END]
    assert isinstance((await mailboxes[1].next_event()).error, GenerationFailedError)


async def test_an_end_is_heard_although_who_waits_for_it_first_fails():
    mailbox = Mailbox(on_finished=mock.Mock(side_effect=RuntimeError("a fault")))
    reader = asyncio.ensure_future(mailbox.next_event())
    await asyncio.sleep(0)
    Dispatcher(asyncio.get_running_loop()).deliver([(mailbox, END)])
    assert await asyncio.wait_for(reader, 60) == END
