"""Sends what no client would send to a running server: messages of any content, and bytes that nearly are one.

Hypothesis makes the messages, and a seeded hand damages them, so that every run sends the same.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings, strategies
from hypothesis.internal.conjecture.providers import HypothesisProvider

from tests.service.harness import details_of
from tests.service.message_fuzzer import messages, mutated

AT_ONCE = 64
# None takes a second; this only ends a test that hangs, however slow its machine is.
CALL_SECONDS = 120

Outcomes: TypeAlias = "Counter[tuple[str, grpc.StatusCode]]"


@dataclass(frozen=True)
class RawCall:
    """Bytes that are sent as the request of a method."""

    channel: grpc.aio.Channel
    method: MethodDescriptor
    request_bytes: bytes

    async def outcome(self) -> tuple[str, grpc.StatusCode]:
        """The method's name and how the call ends; a failure must bring its details."""
        path = f"/{self.method.containing_service.full_name}/{self.method.name}"
        try:
            if self.method.server_streaming:
                call = self.channel.unary_stream(path)(self.request_bytes, timeout=CALL_SECONDS)
                while await call.read() is not grpc.aio.EOF:
                    pass
            else:
                await self.channel.unary_unary(path)(self.request_bytes, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if not details_of(error):
                raise AssertionError(f"{path}: {error} has no details") from error
            return self.method.name, error.code()
        return self.method.name, grpc.StatusCode.OK


async def outcomes(calls: Sequence[RawCall]) -> Outcomes:
    """How `calls`, made at once, end."""
    return Counter(await asyncio.gather(*(call.outcome() for call in calls)))


async def send_fuzzed(
    methods: Sequence[MethodDescriptor],
    channel_of: Callable[[MethodDescriptor], grpc.aio.Channel],
    *,
    requests: int,
    mutants_of_each: int,
) -> Outcomes:
    """Send at least so many requests, of which each made message brings so many damaged ones; how all of them end."""
    loop = asyncio.get_running_loop()
    seen: Outcomes = Counter()
    calls: list[RawCall] = []

    def send() -> None:
        seen.update(asyncio.run_coroutine_threadsafe(outcomes(calls), loop).result(2 * CALL_SECONDS))
        calls.clear()

    @settings(
        max_examples=requests // (mutants_of_each + 1) + 1,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=strategies.data(), method=strategies.sampled_from(methods), seed=strategies.integers(0, 2**32))
    def fuzz(data: Any, method: MethodDescriptor, seed: int) -> None:
        encoded = data.draw(messages(method.input_type)).SerializeToString(deterministic=True)
        rng = random.Random(seed)
        variants = [encoded, *(mutated(encoded, rng) for _ in range(mutants_of_each))]
        calls.extend(RawCall(channel_of(method), method, variant) for variant in variants)
        if len(calls) >= AT_ONCE:
            send()

    with pytest.MonkeyPatch.context() as patch:
        # Else one draw in twenty is a constant of whatever modules happen to be loaded.
        patch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
        await asyncio.to_thread(fuzz)
    seen.update(await outcomes(calls))
    return seen
