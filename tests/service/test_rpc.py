"""The edge of an RPC: conversions that could hold up the loop do not run on it."""

from __future__ import annotations

import threading

import pytest

from mlxstream.v1 import prompt_pb2
from service.rpc import INLINE_BYTES, off_loop_if_large


@pytest.mark.parametrize(("text_bytes", "on_loop"), [(10, True), (INLINE_BYTES + 1, False)])
async def test_large_messages_are_converted_beside_the_loop(text_bytes: int, on_loop: bool) -> None:
    message = prompt_pb2.TextPrompt(text="x" * text_bytes)
    thread = await off_loop_if_large(message, threading.current_thread)
    assert (thread is threading.current_thread()) is on_loop
