"""What a graph offers to the denoising method (block diffusion), and what it keeps of one row.

A row's prompt is encoded once; then canvases of random tokens are revised in passes that attend to what was encoded
and leave it as it is, until a canvas is appended to it and the next begins. One row at a time: nothing is packed.
Importing this module never imports mlx: arrays appear in annotations alone.
Shapes: N tokens, L canvas positions, V vocabulary, H hidden size. Source: reference, denoising-and-models §1 and §2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from engine.contracts.graph import ResidentGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from engine.contracts.option_groups import AdapterSelection
    from engine.contracts.vision import PromptImage

GRAPH_ABI_DENOISING: Final = "mlx-denoising-v1"
DEFAULT_STOPPING_IDS: Final = (1, 106)
"""Ids that end a completion of this method whatever else does. Source: reference, denoising-and-models §3."""


def stopping_ids(vocab_size: int) -> tuple[int, ...]:
    """Those of them that a vocabulary of this size has; what a model's own files name is not read."""
    return tuple(token for token in DEFAULT_STOPPING_IDS if token < vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingPlan:
    """How one generation is denoised: `DenoisingOptions` after defaults, lengths within the model's canvas.

    A stable block ends early only where both `stability_threshold` and `confidence_threshold` are set.
    Source: reference, denoising-and-models §1.1 (names, defaults, meaning).
    """

    max_canvas_length: int
    min_canvas_length: int
    full_canvas: bool = False
    max_denoising_steps: int = 48
    sampler: Literal["confidence-threshold", "entropy-bound"] = "confidence-threshold"
    threshold: float = 0.9
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int | None = None
    confidence_threshold: float | None = None


class DenoisingState(Protocol):
    """Keys and values of one row's encoded tokens, in every layer. Belongs to that row and to the engine thread."""

    @property
    def offset(self) -> int:
        """Tokens encoded, which is the position of the first token of the next canvas."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that must be evaluated for the state to be settled."""

    def close(self) -> None:
        """Release the arrays. The state must not be used again."""


class DenoisingGraph(ResidentGraph, Protocol):
    """A graph that the denoising method can drive. Its operations are lazy: nothing is evaluated in them."""

    @property
    def canvas_length(self) -> int:
        """Positions of the canvas that the model was made for, which is the longest that it takes."""

    @property
    def embed_scale(self) -> float:
        """Factor on embeddings: the root of the hidden size."""

    def prefill(
        self, tokens: mx.array, adapters: tuple[AdapterSelection, ...] = (), images: Sequence[PromptImage] = ()
    ) -> DenoisingState:
        """Encode the first `tokens` [1, N] int32 of a row into a new state.

        `adapters` are mounted ones, applied in this order; they stay with the state, for every pass over it. `images`
        are as in `extend_prefill`.
        """

    def extend_prefill(self, tokens: mx.array, state: DenoisingState, images: Sequence[PromptImage] = ()) -> None:
        """Encode `tokens` [1, N] int32 at the positions from `state.offset` on, and append them.

        `images`, in order and whole, start at places among `tokens`; only for a graph that declares media.
        """

    def decoder_logits(self, canvas: mx.array, state: DenoisingState, feedback: mx.array | None) -> mx.array:
        """Logits [1, L, V] float32, soft-capped, of `canvas` [1, L] int32; `state` stays as it is.

        `feedback` [1, L, H] are the soft embeddings of the pass before; None in a canvas's first pass.
        """

    def dequant_embed_weight(self) -> mx.array:
        """The embedding table [V, H] as plain numbers. Where it is dense, always the same array: the weights' own."""

    def soft_embeddings(self, probabilities: mx.array, table: mx.array) -> mx.array:
        """Expected embeddings [1, L, H] in the dtype of `table`, scaled, under `probabilities` [1, L, V] float32."""
