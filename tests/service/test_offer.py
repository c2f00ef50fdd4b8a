"""What the server's gRPC is told, shown by what it does."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import grpc.aio

from service.offer import Offer

CONNECTIONS, CALLS_EACH = 2, 900
"""Together more than gRPC lets wait by its own default, from where on it ends some at random."""


async def test_a_burst_that_finds_the_loop_busy_is_taken_whole() -> None:
    async def answer(request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return request

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server(options=Offer().channel_options())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("burst", {"Answer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with contextlib.ExitStack() as opened:
        calls = []
        for _ in range(CONNECTIONS):
            own = [("grpc.use_local_subchannel_pool", 1)]
            channel = opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=own))
            await asyncio.to_thread(grpc.channel_ready_future(channel).result, 60)
            calls.append(channel.unary_unary("/burst/Answer"))
        answers = [call.future(b"x", timeout=50) for call in calls for _ in range(CALLS_EACH)]
        time.sleep(1.5)  # noqa: ASYNC251 - the loop is busy with something else
        codes = await asyncio.to_thread(lambda: {one.code() for one in answers})
    await server.stop(None)
    assert codes == {grpc.StatusCode.OK}
