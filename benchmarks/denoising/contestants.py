"""Both sides of the comparison: the same requests, to the end. What they say must be equal."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.contracts.cancellation import AbortController
from engine.contracts.events import GenerationFinished, TokensGenerated
from engine.contracts.option_groups import DenoisingOptions
from engine.contracts.options import ResolvedOptions
from engine.generation.denoising_row import DenoisingRow
from engine.generation.denoising_schedule import plan_denoising
from engine.generation.text import PushedText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.execution.stepper import MethodStepper

END = 1


@dataclass(frozen=True)
class Request:
    """One generation. `sampler` as in `DenoisingOptions`."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    passes: int
    sampler: str


@dataclass(frozen=True)
class Answer:
    """What was said, and with how many passes."""

    tokens: tuple[int, ...]
    passes: int


class NoText:
    """Stands for a detokenizer: neither side is timed with one."""

    matched_stop = None
    last_segment = ""

    def push(self, token: int) -> PushedText:  # noqa: ARG002
        """Nothing."""
        return PushedText(token_bytes=b"", text="")

    def finish(self) -> str:
        """Nothing."""
        return ""

    def add_token(self, token: int, skip_special_token_ids: Sequence[int] = ()) -> None:
        """Nothing, for mlx-vlm."""

    def finalize(self) -> None:
        """Nothing, for mlx-vlm."""


def ours(stepper: MethodStepper, requests: Sequence[Request]) -> list[Answer]:
    """Run all of `requests` at the same time in the engine's own batch."""
    from engine.execution.batch import Batch
    from engine.execution.job import Job
    from engine.execution.tally import StepTally

    told: dict[int, list[Any]] = {index: [] for index in range(len(requests))}

    def hear(events: Any) -> None:
        for box, event in events:
            told[box].append(event)

    batch = Batch(stepper, lambda: 0.0, hear, StepTally())
    for index, request in enumerate(requests):
        started: Any = None
        batch.submit(Job(row=_row(request), mailbox=index, started=started))  # type: ignore[arg-type]
    while len(batch):
        batch.advance()
    return [_answer(events) for events in told.values()]


def mlx_vlm(model: Any, requests: Sequence[Request]) -> list[Answer]:
    """Run `requests` one after the other: mlx-vlm denoises one canvas at a time."""
    import mlx.core as mx

    diffusion: Any = importlib.import_module("mlx_vlm.generate.diffusion")
    diffusion.make_streaming_detokenizer = lambda _: NoText()
    tokenizer = SimpleNamespace(stopping_criteria=lambda token: token == END, decode=str, vocab={})
    answers = []
    for request in requests:
        mx.random.seed(request.seed)
        results = list(
            diffusion.stream_diffusion_generate(
                model, tokenizer, tokenizer, mx.array([request.prompt], dtype=mx.int32), None, None,
                max_tokens=request.max_tokens, skip_special_token_ids=[], temperature=0.0,
                max_denoising_steps=request.passes, diffusion_sampler=request.sampler,
            )
        )  # fmt: skip
        shown = [one for one in results[:-1] if not one.diffusion_block_complete]
        answers.append(Answer(tuple(one.token for one in shown), results[-1].diffusion_denoising_steps))
    return answers


def _row(request: Request) -> DenoisingRow:
    from benchmarks.denoising.models import CANVAS_TOKENS

    options = ResolvedOptions(
        max_tokens=request.max_tokens, eos_token_ids=(END,), stop_sequences=(), prefill_chunk_size=2048,
        temperature=0.0, top_p=0.0, top_k=0, min_p=0.0, min_tokens_to_keep=1, seed=request.seed, seed_was_explicit=True,
    )  # fmt: skip
    asked = DenoisingOptions(max_denoising_steps=request.passes, sampler=request.sampler)  # type: ignore[arg-type]
    return DenoisingRow(
        prompt=request.prompt,
        options=options,
        plan=plan_denoising(asked, canvas_length=CANVAS_TOKENS),
        signal=AbortController().signal,
        text=NoText(),  # type: ignore[arg-type]
        submitted_at=0.0,
        clock=lambda: 0.0,
    )


def _answer(events: Sequence[Any]) -> Answer:
    tokens = [token.token for event in events if isinstance(event, TokensGenerated) for token in event.tokens]
    end = events[-1]
    if not isinstance(end, GenerationFinished) or end.error is not None or end.stats.denoising is None:
        raise RuntimeError(f"a generation has failed: {end}")
    return Answer(tuple(tokens), end.stats.denoising.steps)
