"""How much memory rows need, and whether it is there: the one prediction that admission and estimates share.

Pure arithmetic on what headers say. Units: bytes and tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.errors import InvalidRequestError, PromptTooLongError, UnsupportedOptionError
from engine.contracts.memory import MemoryEstimate
from engine.contracts.vision import LEAST_IMAGE_TOKENS, MAX_IMAGES
from engine.generation.image_stretches import widest_unit
from engine.generation.memory import ELEMENT_BYTES, images_bytes, row_bytes, unit_tokens, workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry
    from engine.contracts.memory import MemoryLoad
    from engine.contracts.model import ModelInfo
    from engine.contracts.prefill import PrefillPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a prediction is made from: sizes, forms, and the memory for rows.

    `state_bytes` are for their states alone where the operator stated them, else for the workspace of a step too:
    `holds_workspace`.
    """

    geometry: GraphGeometry
    composition: Composition
    prefill_policy: PrefillPolicy
    weights_bytes: int
    step_tokens: int
    state_bytes: int
    holds_workspace: bool


def needed_bytes(
    geometry: GraphGeometry,
    composition: Composition,
    *,
    prompt_tokens: int,
    max_tokens: int,
    chunk_tokens: int,
    images: Sequence[int] = (),
) -> int:
    """Bytes that a row's state takes at its longest; `images` of its prompt have so many tokens each."""
    state = row_bytes(
        geometry,
        prompt_tokens + max_tokens,
        ELEMENT_BYTES[composition.compute_dtype],
        kv=composition.kv,
        chunk_tokens=min(prompt_tokens, chunk_tokens),
    )
    return state + images_bytes(geometry, composition, images)


def smallest_row_bytes(model: ModelInfo) -> int:
    """Bytes of the state of a row with a prompt of one token and one token of output."""
    return needed_bytes(model.geometry, model.composition, prompt_tokens=1, max_tokens=1, chunk_tokens=1)


def smallest_request_bytes(facts: MemoryFacts) -> int:
    """Bytes of `facts.state_bytes` that the smallest request takes while nobody else is there."""
    step_tokens = _step_tokens(facts, 1, 1)
    return _row_bytes(facts, 1, 1) + charged_workspace_bytes(facts, step_tokens=step_tokens, context_tokens=2)


def charged_workspace_bytes(facts: MemoryFacts, *, step_tokens: int, context_tokens: int) -> int:
    """Bytes of `facts.state_bytes` that a step takes, as `workspace_bytes` counts them."""
    if not facts.holds_workspace:
        return 0
    return workspace_bytes(facts.geometry, facts.composition, step_tokens=step_tokens, context_tokens=context_tokens)


def estimate(facts: MemoryFacts, load: MemoryLoad) -> MemoryEstimate:
    """Predict `load`; like admission, it cuts completions to the room that the context leaves.

    A step's workspace is that of the load's own rows: long contexts cost those who use them.

    Raises:
        InvalidRequestError: it has more images than a request may, or than its prompt has tokens for.
        PromptTooLongError: no room for one new token.
        UnsupportedOptionError: it has images, and the model takes none.
    """
    images = _images(facts, load)
    longest = facts.geometry.context_length
    if load.prompt_tokens >= longest:
        raise PromptTooLongError(prompt_tokens=load.prompt_tokens, context_length=longest)
    completion_tokens = min(load.max_tokens, max(0, longest - load.prompt_tokens))
    tokens = load.prompt_tokens + completion_tokens
    kv_bytes = load.rows * _row_bytes(facts, load.prompt_tokens, completion_tokens, images) if tokens else 0
    step_tokens = widest_unit(images, _step_tokens(facts, load.prompt_tokens, load.rows))
    workspace = workspace_bytes(facts.geometry, facts.composition, step_tokens=step_tokens, context_tokens=tokens)
    charged = workspace if facts.holds_workspace else 0
    return MemoryEstimate(
        weights_bytes=facts.weights_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=workspace,
        budget_bytes=facts.weights_bytes + facts.state_bytes + workspace - charged,
        fits=kv_bytes + charged <= facts.state_bytes,
        max_context_tokens=_longest_alone(facts, images),
    )


def _longest_alone(facts: MemoryFacts, images: Sequence[int]) -> int:
    """The longest prompt with `images` that fits while nobody else is there; 0 where none does."""
    contexts = range(1, facts.geometry.context_length + 1)
    tokens = bisect_right(contexts, facts.state_bytes, key=lambda tokens: _bytes_alone(facts, tokens, images))
    return tokens if tokens >= LEAST_IMAGE_TOKENS * len(images) else 0


def _bytes_alone(facts: MemoryFacts, tokens: int, images: Sequence[int]) -> int:
    """What a row with a prompt of `tokens` and `images` takes of the memory for rows while nobody else is there."""
    step_tokens = widest_unit(images, _step_tokens(facts, tokens, 1))
    return _row_bytes(facts, tokens, 0, images) + charged_workspace_bytes(
        facts, step_tokens=step_tokens, context_tokens=tokens
    )


def _step_tokens(facts: MemoryFacts, prompt_tokens: int, rows: int) -> int:
    """The widest step of so many rows with such prompts."""
    chunk_tokens = min(prompt_tokens, facts.prefill_policy.chunk_size(max(1, prompt_tokens)))
    if facts.geometry.canvas_length:
        return unit_tokens(facts.geometry, chunk_tokens)
    return min(facts.step_tokens, rows * max(1, chunk_tokens))


def _images(facts: MemoryFacts, load: MemoryLoad) -> list[int]:
    """The tokens of each image of a prompt of `load`, each as large as images become."""
    vision = facts.geometry.vision
    if load.images and vision is None:
        raise UnsupportedOptionError("images", "the served model takes text alone")
    if load.images > MAX_IMAGES:
        raise InvalidRequestError.of("images", f"at most {MAX_IMAGES} are taken in a request, got {load.images}")
    least_tokens = LEAST_IMAGE_TOKENS * load.images
    if least_tokens > load.prompt_tokens:
        raise InvalidRequestError.of(
            "images",
            f"{load.images} images take at least {least_tokens} of a prompt's tokens, and prompt_tokens is "
            f"{load.prompt_tokens}",
        )
    return [] if vision is None else [vision.most_tokens] * load.images


def _row_bytes(facts: MemoryFacts, prompt_tokens: int, max_tokens: int, images: Sequence[int] = ()) -> int:
    chunk_tokens = facts.prefill_policy.chunk_size(max(1, prompt_tokens))
    return needed_bytes(
        facts.geometry,
        facts.composition,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        chunk_tokens=chunk_tokens,
        images=images,
    )
