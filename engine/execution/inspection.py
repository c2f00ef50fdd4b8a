"""Explains a model without loading it: what it is, how it is stored, what it would hold here, and what is missing.

Reads headers, configuration and the text half; never a tensor. The device is the one that serving would choose, and its
memory what serving would go by: an accelerator is asked through mlx, a CPU without it. Units: bytes and tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from engine.artifacts import catalogue
from engine.artifacts.artifact import open_artifact
from engine.artifacts.consistency import listed, surplus_tensors
from engine.artifacts.storage_summary import StoredForm, stored_forms
from engine.artifacts.vision_shapes import PATCHES
from engine.contracts.cache import GROWTH_TOKENS
from engine.contracts.denoising import stopping_ids
from engine.contracts.errors import EngineError
from engine.contracts.memory import MemoryLoad
from engine.execution.estimating import memory_here, unloaded_facts
from engine.execution.resident import EngineSettings
from engine.execution.state_room import estimate
from engine.execution.text_model import open_text_model
from engine.generation.memory import ELEMENT_BYTES, row_bytes
from engine.models import declarations
from engine.runtime.policy import fits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.artifact import Artifact
    from engine.contracts.graph import GraphDeclaration, GraphGeometry
    from engine.contracts.options import OptionDefaults
    from engine.runtime.memory import DeviceMemory

_PACKED_OR_DENSE: Final = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"})
"""What a GGUF file can hold that stays as it is on a device that reads packed weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReport:
    """What the files hold. `dtypes` counts bytes by the dtype or block type in which tensors are stored."""

    files: tuple[str, ...]
    nbytes: int
    parameters: int
    dtypes: Mapping[str, int]
    forms: tuple[StoredForm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What the model would hold on this machine, as serving predicts it; `available_bytes` are those of the device.

    `token_bytes` is what one more token adds to a row, `context_bytes` what a row of the whole context holds.
    `largest_context` is 0 when the weights leave no room.
    """

    device: str
    compute_dtype: str
    weights_bytes: int
    available_bytes: int
    token_bytes: int
    context_bytes: int
    largest_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """The text half. `eos_tokens` and `bos_token` are as written, with "" for ids that the vocabulary lacks."""

    vocabulary: int
    control_tokens: int
    bos_token: str
    eos_token_ids: tuple[int, ...]
    eos_tokens: tuple[str, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """Everything that is known of a model before it is loaded.

    `problems` are reasons why it cannot be served, `notes` what it cannot do or does otherwise than one might expect.
    """

    name: str
    kind: Literal["huggingface", "gguf"]
    model_type: str
    graph: Literal["native", "mlx-lm"]
    declaration: GraphDeclaration
    geometry: GraphGeometry
    intermediate_size: int
    experts: int
    experts_per_token: int
    rotations: tuple[str, ...]
    tied_head: bool
    option_defaults: OptionDefaults
    storage: StorageReport
    memory: MemoryReport
    text: TextReport | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableModel:
    """A model whose files do not say enough for a report; `problems` says why it cannot be served."""

    name: str
    problems: tuple[str, ...]


def explain_model(reference: str, memory: DeviceMemory | None = None) -> ModelReport | UnreadableModel:
    """`inspect_model`, with a refusal as a report of its own."""
    name = reference
    try:
        name = catalogue.resolve(reference).name
        return inspect_model(reference, memory)
    except EngineError as error:
        return UnreadableModel(name=name, problems=(str(error),))


def inspect_model(reference: str, memory: DeviceMemory | None = None) -> ModelReport:
    """Explain the model `reference`: an alias, a path, or the name of a repository that is on this machine.

    Args:
        reference: which model.
        memory: of the device that would hold it; None: of the one that serving would choose here.

    Raises:
        EngineError: it is not here, or its files do not even say what it is; the message names what is wrong.
    """
    location = catalogue.resolve(reference)
    artifact = open_artifact(location.path)
    config = artifact.config
    text, problems = _text(artifact)
    held = _memory(reference, memory or memory_here())
    if artifact.graph == "native":
        problems += _surplus(artifact)
    if not fits(held.weights_bytes, held.available_bytes):
        problems.append(f"the weights would take {held.weights_bytes} bytes, {held.available_bytes} are available here")
    elif not held.largest_context:
        problems.append("beside the weights, memory is left for no request at all")
    return ModelReport(
        name=location.name,
        kind=artifact.kind,
        model_type=config.model_type,
        graph=artifact.graph,
        declaration=declarations.native(config) if artifact.graph == "native" else declarations.FOREIGN,
        geometry=config.geometry(),
        intermediate_size=config.intermediate_size,
        experts=config.mixture.experts if config.mixture else 0,
        experts_per_token=config.mixture.chosen if config.mixture else 0,
        rotations=tuple(dict.fromkeys("none" if rope is None else rope.kind for rope in config.layer_ropes)),
        tied_head=config.tie_word_embeddings,
        option_defaults=config.option_defaults,
        storage=_storage(artifact),
        memory=held,
        text=text,
        problems=tuple(problems),
        notes=tuple(_notes(artifact, held, text)),
    )


def _storage(artifact: Artifact) -> StorageReport:
    dtypes: Counter[str] = Counter()
    for header in artifact.tensors.values():
        dtypes[header.dtype] += header.nbytes
    return StorageReport(
        files=tuple(file.name for file in artifact.weight_files),
        nbytes=artifact.weights_bytes,
        parameters=artifact.parameters,
        dtypes=dict(dtypes.most_common()),
        forms=stored_forms(artifact),
    )


def _memory(reference: str, memory: DeviceMemory) -> MemoryReport:
    """What serving the model with our settings' defaults would predict."""
    facts = unloaded_facts(EngineSettings(model=reference, state_dir=Path()), memory)
    element_bytes = ELEMENT_BYTES[facts.composition.compute_dtype]
    longest = facts.geometry.context_length
    short, long = (row_bytes(facts.geometry, tokens, element_bytes) for tokens in (GROWTH_TOKENS, 2 * GROWTH_TOKENS))
    return MemoryReport(
        device=facts.composition.device,
        compute_dtype=facts.composition.compute_dtype,
        weights_bytes=facts.weights_bytes,
        available_bytes=memory.available_bytes(),
        token_bytes=(long - short) // GROWTH_TOKENS,
        context_bytes=row_bytes(facts.geometry, longest, element_bytes),
        largest_context=estimate(facts, MemoryLoad(prompt_tokens=longest - 1, max_tokens=1)).max_context_tokens,
    )


def _text(artifact: Artifact) -> tuple[TextReport | None, list[str]]:
    """The text half, or why there is none."""
    try:
        text = open_text_model(artifact)
    except EngineError as error:
        return None, [str(error)]
    tokenizer, ends = text.tokenizer, _ends(artifact)
    written = {id_: token for token, id_ in tokenizer.control_tokens.items()}
    return TextReport(
        vocabulary=tokenizer.vocab_size,
        control_tokens=len(written),
        bos_token=tokenizer.bos_token,
        eos_token_ids=ends,
        eos_tokens=tuple(written.get(id_, "") for id_ in ends),
        has_chat_template=text.template is not None,
    ), []


def _ends(artifact: Artifact) -> tuple[int, ...]:
    """The ids that end an answer: the method's own where a model is denoised, else those that its files name."""
    config = artifact.config
    return config.eos_token_ids if config.denoising is None else stopping_ids(config.vocab_size)


def _surplus(artifact: Artifact) -> list[str]:
    names = surplus_tensors(artifact.config, artifact.tensors)
    family = artifact.config.model_type
    return [f"holds tensors that a {family} model has no use for: {listed(names)}"] if names else []


def _notes(artifact: Artifact, memory: MemoryReport, text: TextReport | None) -> list[str]:
    notes = []
    if artifact.graph == "mlx-lm":
        notes.append("has no graph here and is served by mlx-lm: rows are computed one by one")
        notes.append("whether mlx-lm takes its fields and tensors shows only when it is loaded")
        if artifact.config.recurrent is None:
            notes.append("what its rows keep is not known: memory counts keys and values for every layer and token")
    if artifact.config.denoising is not None and artifact.config.vision is None:
        notes.append("reads no images: it has no vision tower, or does not describe one")
    if f"{PATCHES}.scales" in artifact.tensors:
        notes.append("sees little of an image: its patches' projection is quantized, and takes whole numbers alone")
    if text is not None and not text.has_chat_template:
        notes.append("has no chat template: conversations are refused, plain prompts work")
    if not _ends(artifact):
        notes.append("names no end token: only max_tokens and stop sequences end an answer")
    if 0 < memory.largest_context < artifact.config.context_length:
        notes.append(f"memory for {memory.largest_context} of {artifact.config.context_length} tokens of context")
    unpacked = sorted({header.dtype for header in artifact.tensors.values()} - _PACKED_OR_DENSE)
    if artifact.kind == "gguf" and unpacked and memory.device != "cpu":
        notes.append(f"{', '.join(unpacked)} have no packed form here: such tensors are held in {memory.compute_dtype}")
    return notes
