"""A resident model as the front door sees it, and the two halves of bringing it in.

The text half (files, tokenizer, template) is opened beside the loop while the engine thread prepares the runtime;
the tensor half is loaded on the engine thread alone.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from engine.artifacts.artifact import Artifact
    from engine.artifacts.chat_template import ChatTemplate
    from engine.artifacts.tokenizer import Tokenizer
    from engine.contracts.model import ModelInfo
    from engine.contracts.prefill import PrefillPolicy
    from engine.contracts.prompt import ChatPrompt
    from engine.execution.thread import Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to load and within which bounds.

    `model` is an alias, a Hugging Face id, a folder or a `.gguf` file. `device`, `dtype` and `blas` None mean
    automatic. `state_dir` keeps compiled kernels and remembered fingerprints.
    """

    model: str
    state_dir: Path
    device: str | None = None
    dtype: str | None = None
    blas: str | None = None
    max_queue: int = 64
    max_rows: int = 32
    prefill_step_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Everything of a model that deals in text, and the files that the rest is loaded from."""

    name: str
    artifact: Artifact
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def encode_chat(self, chat: ChatPrompt) -> tuple[str, list[int]]:
        """The text and the ids that a conversation becomes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded model: its facts, its text half, and how its prompts are cut."""

    info: ModelInfo
    text: TextModel
    prefill_policy: PrefillPolicy
