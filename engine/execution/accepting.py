"""Turns a request into a row that can be queued: prompt to ids, options resolved, everything checked.

Runs beside the loop and touches no array; a refusal leaves nothing behind.
"""

from __future__ import annotations

import secrets
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.errors import InsufficientMemoryError, UnsupportedOptionError
from engine.contracts.events import GenerationStarted
from engine.contracts.kv_scheme import converts_at
from engine.contracts.prompt import ChatPrompt, TextPrompt
from engine.execution.state_room import charged_workspace_bytes, needed_bytes
from engine.execution.text_work import refuse_hopeless_prompt
from engine.generation.denoising_planning import refuse_for_denoising, resolve_denoising_options
from engine.generation.denoising_row import DenoisingRow
from engine.generation.memory import unit_tokens
from engine.generation.planning import (
    NO_CANVAS,
    check_prompt,
    refuse_for_autoregression,
    refuse_unavailable,
    resolve_execution,
    resolve_options,
    resolve_prefix,
)
from engine.generation.row import Row
from engine.generation.text import TextAssembler

if TYPE_CHECKING:
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.events import GenerationRequest
    from engine.contracts.execution import ResolvedExecution
    from engine.contracts.options import GenerateOptions, ResolvedOptions
    from engine.contracts.prefix import PrefixUse
    from engine.contracts.prompt import Prompt
    from engine.execution.resident import Resident
    from engine.execution.rows import JobRow
    from engine.execution.text_model import TextModel

FRESH_SEED_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A checked request: what it becomes is fixed, and nothing is held for it yet."""

    generation_id: str
    request_id: str
    prompt_ids: list[int]
    options: ResolvedOptions
    execution: ResolvedExecution
    prefix: PrefixUse | None
    chunk_is_exact: bool
    state_bytes: int
    context_tokens: int
    unit_tokens: int
    draft_blocks: bool

    def open_row(self, resident: Resident, signal: AbortSignal, submitted_at: float) -> JobRow:
        """A row for the engine thread."""
        text = TextAssembler(resident.text.tokenizer, self.options.stop_sequences)
        if self.options.denoising is not None:
            return DenoisingRow(
                prompt=self.prompt_ids,
                options=self.options,
                plan=self.options.denoising,
                signal=signal,
                text=text,
                submitted_at=submitted_at,
                clock=time.perf_counter,
                draft_blocks=self.draft_blocks,
            )
        return Row(
            prompt=self.prompt_ids,
            options=self.options,
            signal=signal,
            text=text,
            tail_split=resident.info.composition.prefill_tail_split,
            submitted_at=submitted_at,
            clock=time.perf_counter,
            chunk_is_exact=self.chunk_is_exact,
            converts_at=converts_at(resident.info.composition.kv),
        )

    def started(self, resident: Resident) -> GenerationStarted:
        """The event that tells the caller that the row was admitted."""
        return GenerationStarted(
            generation_id=self.generation_id,
            request_id=self.request_id,
            model=resident.info.name,
            weights_fingerprint=resident.info.fingerprint,
            descriptor=resident.info.descriptor,
            execution=self.execution,
            options=self.options,
            prompt_tokens=len(self.prompt_ids),
        )


def accept(resident: Resident, request: GenerationRequest) -> Acceptance:
    """Check `request` against the resident model.

    Raises:
        EngineError: the first reason to refuse it.
    """
    _refuse_what_the_method_lacks(resident, request)
    geometry = resident.info.geometry
    bound, context_length = request.max_prompt_tokens, geometry.context_length
    refuse_hopeless_prompt(request.prompt, resident.text.tokenizer, context_length, bound)
    field, prompt_ids = prompt_to_ids(resident.text, request.prompt)
    check_prompt(
        prompt_ids,
        vocab_size=geometry.vocab_size,
        context_length=context_length,
        field=field,
        max_prompt_tokens=bound,
    )
    options = _resolved(resident, request.options, len(prompt_ids))
    composition = resident.info.composition  # exact rows need cuts of the prompt that company does not change
    chunk_is_exact = request.options.prefill_chunk_size is not None or composition.row_tile_tokens is not None
    widest = min(len(prompt_ids), options.prefill_chunk_size)
    if not chunk_is_exact:
        widest = min(widest, resident.step_tokens)
    widest = unit_tokens(geometry, widest)
    context_tokens = len(prompt_ids) + options.max_tokens
    generation_id = uuid.uuid4().hex
    prefix = resolve_prefix(request.options, options, resident.info, store_is_on=resident.prefix_bytes > 0)
    return Acceptance(
        generation_id=generation_id,
        request_id=request.request_id or generation_id,
        prompt_ids=prompt_ids,
        options=options,
        execution=resolve_execution(composition, resident.info.declaration, prompt_cache=prefix is not None),
        prefix=prefix,
        chunk_is_exact=chunk_is_exact,
        state_bytes=_state_bytes(resident, len(prompt_ids), options, step_tokens=widest, context_tokens=context_tokens),
        context_tokens=context_tokens,
        unit_tokens=widest,
        draft_blocks=request.draft_blocks,
    )


def _refuse_what_the_method_lacks(resident: Resident, request: GenerationRequest) -> None:
    refuse_unavailable(request.options)
    if resident.info.declaration.method == "denoising":
        return refuse_for_denoising(request.options)
    if request.draft_blocks:
        raise UnsupportedOptionError("delivery.draft_blocks", NO_CANVAS)
    return refuse_for_autoregression(request.options)


def _resolved(resident: Resident, options: GenerateOptions, prompt_tokens: int) -> ResolvedOptions:
    """What will run, by the rules of the model's method."""
    fresh_seed = secrets.randbits(FRESH_SEED_BITS)
    if resident.info.declaration.method == "denoising":
        return resolve_denoising_options(
            options, resident.info, resident.prefill_policy, prompt_tokens=prompt_tokens, fresh_seed=fresh_seed
        )
    return resolve_options(
        options,
        resident.info,
        resident.prefill_policy,
        prompt_tokens=prompt_tokens,
        fresh_seed=fresh_seed,
        line_break_ids=resident.text.tokenizer.line_break_ids,
    )


def _state_bytes(
    resident: Resident, prompt_tokens: int, options: ResolvedOptions, *, step_tokens: int, context_tokens: int
) -> int:
    """What the row will hold at its longest; refused when that and its own steps could never fit."""
    needed = needed_bytes(
        resident.info.geometry,
        resident.info.composition,
        prompt_tokens=prompt_tokens,
        max_tokens=options.max_tokens,
        chunk_tokens=options.prefill_chunk_size,
    )
    alone = needed + charged_workspace_bytes(resident.memory, step_tokens=step_tokens, context_tokens=context_tokens)
    if alone > resident.state_bytes:
        raise InsufficientMemoryError(needed_bytes=alone, budget_bytes=resident.state_bytes)
    return needed


def prompt_to_ids(text: TextModel, prompt: Prompt) -> tuple[str, list[int]]:
    """The schema path of the prompt that was given, and its token ids."""
    match prompt:
        case ChatPrompt():
            return "prompt.chat", text.encode_chat(prompt)[1]
        case TextPrompt():
            return "prompt.text", text.tokenizer.encode(prompt.text, add_special_tokens=True, parse_special_tokens=True)
        case _:
            return "prompt.tokens.ids", list(prompt.ids)
