"""Turns a request into a row that can be queued: prompt to ids, options resolved, everything checked.

Runs beside the loop and touches no array; a refusal leaves nothing behind.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from engine.contracts.durability import DEFAULT_EVERY_TOKENS
from engine.contracts.errors import InsufficientMemoryError, InvalidRequestError, UnsupportedOptionError
from engine.contracts.events import GenerationStarted
from engine.contracts.kv_scheme import converts_at
from engine.contracts.prompt import ChatPrompt, TextPrompt
from engine.execution.state_identity import adapter_namespace, durable_identity
from engine.execution.state_room import charged_workspace_bytes, needed_bytes
from engine.execution.text_bounds import refuse_hopeless_prompt
from engine.generation.checkpoint_identity import generation_checkpoint_key
from engine.generation.denoising_planning import refuse_for_denoising, resolve_denoising_options
from engine.generation.denoising_row import DenoisingRow
from engine.generation.image_stretches import widest_unit
from engine.generation.memory import images_bytes, unit_tokens
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
from engine.state.checkpoint_file import FORMAT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.artifacts.image_prompt import ImagePlace
    from engine.contracts.cancellation import AbortSignal
    from engine.contracts.durability import Continuation, DurableIdentity
    from engine.contracts.events import GenerationRequest
    from engine.contracts.execution import ResolvedExecution
    from engine.contracts.options import GenerateOptions, ResolvedOptions
    from engine.contracts.prefix import PrefixUse
    from engine.contracts.prompt import Prompt
    from engine.contracts.vision import PromptImage
    from engine.execution.resident import Resident
    from engine.execution.rows import JobRow
    from engine.execution.text_model import TextModel

FRESH_SEED_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A checked request: what it becomes on `resident` is fixed, and nothing is held for it yet.

    `images` are those at its `places`, once they are decoded.
    """

    resident: Resident
    generation_id: str
    request_id: str
    prompt_ids: list[int]
    options: ResolvedOptions
    execution: ResolvedExecution
    prefix: PrefixUse | None
    chunk_is_exact: bool
    submitted_at: float
    state_bytes: int
    context_tokens: int
    unit_tokens: int
    draft_blocks: bool
    places: tuple[ImagePlace, ...]
    images: tuple[PromptImage, ...] = ()

    def open_row(self, signal: AbortSignal) -> JobRow:
        """A row for the engine thread."""
        if self.options.denoising is None:
            return self.autoregressive_row(signal)
        return DenoisingRow(
            prompt=self.prompt_ids,
            options=self.options,
            plan=self.options.denoising,
            signal=signal,
            text=self._text(),
            submitted_at=self.submitted_at,
            clock=time.perf_counter,
            draft_blocks=self.draft_blocks,
            images=self.images,
        )

    def autoregressive_row(self, signal: AbortSignal) -> Row:
        """The same, where it is known that the model generates a token at a time."""
        return Row(
            prompt=self.prompt_ids,
            options=self.options,
            signal=signal,
            text=self._text(),
            tail_split=self.resident.info.composition.prefill_tail_split,
            submitted_at=self.submitted_at,
            clock=time.perf_counter,
            chunk_is_exact=self.chunk_is_exact,
            converts_at=converts_at(self.resident.info.composition.kv),
        )

    def _text(self) -> TextAssembler:
        return TextAssembler(self.resident.text.tokenizer, self.options.stop_sequences)

    def started(self) -> GenerationStarted:
        """The event that tells the caller that the row was admitted."""
        return GenerationStarted(
            generation_id=self.generation_id,
            request_id=self.request_id,
            model=self.resident.info.name,
            weights_fingerprint=self.resident.info.fingerprint,
            descriptor=self.resident.info.descriptor,
            execution=self.execution,
            options=self.options,
            prompt_tokens=len(self.prompt_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableAcceptance(Acceptance):
    """A checked request for a durable generation: by what it is found again, and to what it is tied."""

    checkpoint_key: str
    identity: DurableIdentity
    every_tokens: int

    def continuing(self, generation_id: str, continuation: Continuation) -> DurableAcceptance:
        """The same, under the name and with the seed of the generation that goes on."""
        options = replace(self.options, seed=continuation.seed)
        return replace(self, generation_id=generation_id, options=options)


def accept(resident: Resident, request: GenerationRequest, submitted_at: float) -> Acceptance:
    """Check `request`, which came at `submitted_at` of the performance counter, against the resident model.

    Raises:
        EngineError: the first reason to refuse it.
    """
    if request.options.checkpoint_every_tokens is not None:
        raise InvalidRequestError.of("options.checkpoint_every_tokens", "has no meaning unless delivery.durable is set")
    return _accepted(resident, request, submitted_at)


def accept_durable(resident: Resident, request: GenerationRequest, submitted_at: float) -> DurableAcceptance:
    """Check `request` for a durable generation. Raises what `accept` raises."""
    resident.durable.require()
    accepted = _accepted(resident, request, submitted_at)
    info, adapters = resident.info, accepted.options.adapters
    salt = "" if request.options.cache is None else request.options.cache.salt
    key = generation_checkpoint_key(
        accepted.prompt_ids,
        accepted.options,
        cache_namespace=json.dumps([salt, adapter_namespace(info, adapters)]),
        execution=accepted.execution,
        binding_identity={
            "artifact": info.fingerprint,
            "implementation": info.descriptor.id,
            "stateAbi": info.descriptor.state_abi,
            "codec": str(FORMAT),
        },
    )
    return DurableAcceptance(
        **{one.name: getattr(accepted, one.name) for one in fields(accepted)},
        checkpoint_key=key,
        identity=durable_identity(info, resident.text.tokenizer.fingerprint, adapters),
        every_tokens=request.options.checkpoint_every_tokens or DEFAULT_EVERY_TOKENS,
    )


def _accepted(resident: Resident, request: GenerationRequest, submitted_at: float) -> Acceptance:
    _refuse_what_the_method_lacks(resident, request)
    geometry = resident.info.geometry
    bound, context_length = request.max_prompt_tokens, geometry.context_length
    refuse_hopeless_prompt(request.prompt, resident.text.tokenizer, context_length, bound)
    field, prompt_ids, places = prompt_to_ids(resident.text, request.prompt)
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
    image_tokens = [place.tokens for place in places]
    widest = unit_tokens(geometry, widest_unit(image_tokens, widest))
    context_tokens = len(prompt_ids) + options.max_tokens
    state_bytes = _state_bytes(
        resident, len(prompt_ids), options, step_tokens=widest, context_tokens=context_tokens, images=image_tokens
    )
    generation_id = uuid.uuid4().hex
    prefix = resolve_prefix(request.options, options, resident.info, store_is_on=resident.prefix_bytes > 0)
    return Acceptance(
        resident=resident,
        generation_id=generation_id,
        request_id=request.request_id or generation_id,
        prompt_ids=prompt_ids,
        options=options,
        execution=resolve_execution(composition, resident.info.declaration, prompt_cache=prefix is not None),
        prefix=prefix,
        chunk_is_exact=chunk_is_exact,
        submitted_at=submitted_at,
        state_bytes=state_bytes,
        context_tokens=context_tokens,
        unit_tokens=widest,
        draft_blocks=request.draft_blocks,
        places=places,
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
    if resident.info.declaration.method == "denoising":
        return resolve_denoising_options(
            options, resident.info, resident.prefill_policy, prompt_tokens=prompt_tokens, fresh_seed=fresh_seed()
        )
    return resolve_options(
        options,
        resident.info,
        resident.prefill_policy,
        prompt_tokens=prompt_tokens,
        fresh_seed=fresh_seed(),
        line_break_ids=resident.text.tokenizer.line_break_ids,
    )


def fresh_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(FRESH_SEED_BITS)


def _state_bytes(
    resident: Resident,
    prompt_tokens: int,
    options: ResolvedOptions,
    *,
    step_tokens: int,
    context_tokens: int,
    images: Sequence[int],
) -> int:
    """What the row will hold at its longest; refused when that and its own steps could never fit."""
    needed = needed_bytes(
        resident.info.geometry,
        resident.info.composition,
        prompt_tokens=prompt_tokens,
        max_tokens=options.max_tokens,
        chunk_tokens=options.prefill_chunk_size,
        images=images,
    )
    alone = needed + charged_workspace_bytes(resident.memory, step_tokens=step_tokens, context_tokens=context_tokens)
    if alone > resident.state_bytes:
        raise InsufficientMemoryError(
            needed_bytes=alone,
            budget_bytes=resident.state_bytes,
            images_bytes=images_bytes(resident.info.geometry, resident.info.composition, images),
        )
    return needed


def prompt_to_ids(text: TextModel, prompt: Prompt) -> tuple[str, list[int], tuple[ImagePlace, ...]]:
    """The schema path of the prompt that was given, its token ids, and the images among them."""
    match prompt:
        case ChatPrompt():
            return "prompt.chat", *text.place_chat(prompt)[1:]
        case TextPrompt():
            ids = text.tokenizer.encode(prompt.text, add_special_tokens=True, parse_special_tokens=True)
            return "prompt.text", ids, ()
        case _:
            return "prompt.tokens.ids", list(prompt.ids), ()
