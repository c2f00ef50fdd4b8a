"""What a graph is and what it declares: descriptor, geometry, capabilities, packed segments, operations.

A graph declares its capabilities once; bindings check each promise against the operation that it needs.
Importing this module never imports mlx: arrays appear in annotations alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from engine.contracts.adapters import AdapterTargets
    from engine.contracts.cache import Cache
    from engine.contracts.composition import Composition
    from engine.contracts.option_groups import AdapterSelection
    from engine.contracts.vision import VisionGeometry

BACKEND_MLX = "mlx"
GRAPH_ABI_AUTOREGRESSIVE = "mlx-hidden-bsh-v1"
STATE_ABI_CACHE_ARRAY = "legacy-cache-array-v1"
STATE_ABI_FOREIGN = "mlx-lm-cache-v1"
LINEAR_ATTENTION = "linear_attention"

Method = Literal["autoregressive", "denoising"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDescriptor:
    """Identity of a bound graph: what it is, and the contracts its tensors and state follow."""

    id: str
    backend: str
    graph_abi: str
    state_abi: str
    artifact: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentGeometry:
    """The state of one recurrent layer: a matrix for each value head, and the newest inputs of a convolution.

    `convolution_tokens` counts the tokens that the convolution sees, the newest included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution_tokens: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of one token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def nbytes(self, element_bytes: int) -> int:
        """Bytes of one layer's state, whatever the tokens; the matrices are float32, the inputs activations."""
        tail = (self.convolution_tokens - 1) * self.channels
        return self.value_heads * self.value_dim * self.key_dim * 4 + tail * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphGeometry:
    """The sizes that policies read. Counts of heads are per layer; `context_length` is in tokens.

    `layer_types` holds "full_attention", "sliding_attention" or "linear_attention" per layer; `sliding_window` is 0
    without one, and `recurrent` describes the state of layers with linear attention.
    `layer_key_values` holds the values that one token's keys take in each layer, 0 where a layer keeps none of its
    own; it is empty when every layer keeps `kv_heads` keys of `head_dim` values. Layers without any state are the last.
    `canvas_length` holds the positions that a denoising graph revises together; 0 for other methods. `vision` holds
    the sizes of the tower of a graph that sees images.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    layer_types: tuple[str, ...]
    sliding_window: int = 0
    layer_key_values: tuple[int, ...] = ()
    recurrent: RecurrentGeometry | None = None
    canvas_length: int = 0
    vision: VisionGeometry | None = None

    @property
    def key_values(self) -> tuple[int, ...]:
        """The values that one token's keys take in each layer; its values take as many."""
        return self.layer_key_values or (self.kv_heads * self.head_dim,) * self.layers

    @property
    def state_layers(self) -> int:
        """Layers that keep a state, which are the first ones: a row has one cache for each."""
        sizes = zip(self.layer_types, self.key_values, strict=True)
        return sum(values > 0 or kind == LINEAR_ATTENTION for kind, values in sizes)

    @property
    def recurrent_layers(self) -> int:
        """Layers whose state does not grow with the tokens."""
        return 0 if self.recurrent is None else self.layer_types.count(LINEAR_ATTENTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCapability:
    """Whether adapters can be mounted, and whether rows with adapters may share a step."""

    batched: bool = True
    mountable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaCapability:
    """How media reach the graph."""

    input: Literal["embeddings", "embeddings+positions", "pixels"]
    video: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCapability:
    """A draft head that ships inside the graph."""

    kind: str
    num_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCapability:
    """`bounded_workspace`: the attention workspace must be bounded at long context."""

    bounded_workspace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapability:
    """`dense_reads`: attention reads plain keys and values only. `delayed_affine`: who may convert late."""

    dense_reads: bool = False
    delayed_affine: Literal["none", "ordinary", "all"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCapability:
    """Which features a speculating row of this graph may combine."""

    adapters: bool = True
    logprobs: bool = True
    affine_kv: bool = True
    turbo_kv: bool = True
    external_tokens: bool = True
    grammar_proposals: bool = True
    immediate_affine4: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDeclaration:
    """Everything a graph promises. Source: reference, autoregressive §1.3 (fields and defaults)."""

    method: Method = "autoregressive"
    packed_segments: bool = True
    adapters: AdapterCapability = field(default_factory=AdapterCapability)
    media: MediaCapability | None = None
    paged_attention: bool = False
    compiled_decode: bool = False
    sparse_attention: bool = False
    embeddings: bool = False
    hidden_layer_taps: bool = False
    native_draft: DraftCapability | None = None
    prefill: PrefillCapability = field(default_factory=PrefillCapability)
    kv: KvCapability = field(default_factory=KvCapability)
    speculation: SpeculationCapability = field(default_factory=SpeculationCapability)


class ExpertRuntime(Protocol):
    """What a graph that keeps accounts of its experts' use offers, such as one that does not hold all of them."""

    @property
    def planned_bytes(self) -> int:
        """Bytes that resident experts will hold; 0 when unknown."""

    def finish_usage(self) -> None:
        """Write the accounts down. Called on the engine thread whenever a generation has ended, on any path."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """One row's stretch of a packed step: `length` tokens, appended at the end of that row's caches.

    `adapters` are mounted ones, applied in this order. `ends_alone` lets the last of three tokens or more attend by
    itself, with the arithmetic of a step of its own; only for a row whose caches are seated.
    """

    length: int
    caches: Sequence[Cache]
    adapters: tuple[AdapterSelection, ...] = ()
    ends_alone: bool = False


class ResidentGraph(Protocol):
    """Any graph that is in memory: it says what it is before anything is asked of it."""

    @property
    def model_type(self) -> str:
        """The family's name in configuration files, such as "llama"."""

    @property
    def graph_capabilities(self) -> GraphDeclaration:
        """What the graph promises."""

    @property
    def geometry(self) -> GraphGeometry:
        """The sizes that policies read."""

    @property
    def composition(self) -> Composition | None:
        """Facts resolved before the graph was built; None means the defaults."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, in the order in which the model's files name them."""

    @property
    def weights_bytes(self) -> int:
        """Bytes that the resident weights hold, those of mounted adapters included."""

    @property
    def experts(self) -> ExpertRuntime | None:
        """The accounts of its experts' use; None for a graph that keeps none, such as one that holds every expert."""

    @property
    def adapters(self) -> AdapterTargets | None:
        """Where adapters attach; None for a graph that takes none, or whose composition leaves them out."""

    def close(self) -> None:
        """Release the weights."""


class TokenGraph(ResidentGraph, Protocol):
    """A graph that the autoregressive method can drive. Shapes: T packed tokens, P positions, V vocabulary."""

    def hidden(self, tokens: mx.array, segments: Sequence[PackedSegment]) -> mx.array:
        """Final hidden states [1, T, hidden] of packed `tokens` [1, T] uint32; appends to each cache."""

    def project(self, hidden: mx.array) -> mx.array:
        """Logits [1, P, V] of selected hidden states [1, P, hidden]."""
