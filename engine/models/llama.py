"""The llama family as a packed graph: pre-norm blocks, grouped-query attention, SwiGLU.

Also serves architectures that differ in names alone (see the registry). Activations are [1, T, hidden] for T packed
tokens. Numeric reference: `mlx_lm.models.llama`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.graph import AdapterCapability, GraphDeclaration, SpeculationCapability
from engine.ops.attention import PackedAttention
from engine.ops.exponential import swiglu
from engine.ops.rope import Rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.artifacts.config import ModelConfig
    from engine.contracts.composition import Composition
    from engine.contracts.graph import GraphGeometry, PackedSegment
    from engine.models.reading import Product, WeightReader
    from engine.ops.rope import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaBlock:
    """Weights of one layer; query, key and value share one product, and so do gate and up."""

    input_norm: mx.array
    query_key_value: Product
    output: Product
    post_attention_norm: mx.array
    gate_up: Product
    down: Product


class LlamaGraph:
    """A resident llama model."""

    def __init__(self, config: ModelConfig, reader: WeightReader, composition: Composition) -> None:
        """Take every weight of `config` from `reader`; raises the reader's errors."""
        self._config = config
        self._composition = composition
        self._geometry = config.geometry()
        self._scale = config.head_dim**-0.5
        self._rope = Rope(config.rope, composed=composition.composes_exponentials)
        self._table = reader.embedding("model.embed_tokens")
        self._blocks = [_read_block(reader, f"model.layers.{layer}") for layer in range(config.layers)]
        self._norm = reader.vector("model.norm.weight")
        self._head = reader.tied_head(self._table) if config.tie_word_embeddings else reader.linear("lm_head")
        self._weights_bytes = reader.resident_bytes

    @property
    def model_type(self) -> str:
        """The family's name in configuration files."""
        return self._config.model_type

    @property
    def graph_capabilities(self) -> GraphDeclaration:
        """What the graph promises: nothing that no request can ask of it yet."""
        return GraphDeclaration(
            adapters=AdapterCapability(batched=False, mountable=False),
            speculation=SpeculationCapability(
                adapters=False,
                logprobs=False,
                affine_kv=False,
                turbo_kv=False,
                external_tokens=False,
                grammar_proposals=False,
            ),
        )

    @property
    def geometry(self) -> GraphGeometry:
        """The sizes that policies read."""
        return self._geometry

    @property
    def composition(self) -> Composition:
        """Facts resolved before the graph was built."""
        return self._composition

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return self._config.eos_token_ids

    @property
    def weights_bytes(self) -> int:
        """Bytes that the resident weights hold."""
        return self._weights_bytes

    def hidden(self, tokens: mx.array, segments: Sequence[PackedSegment]) -> mx.array:
        """Final hidden states [1, T, hidden] of packed `tokens` [1, T]; appends to each segment's caches."""
        rotation = self._rope.at(_positions(segments))
        attention = PackedAttention(segments, scale=self._scale)
        x = self._table(tokens)
        for layer, block in enumerate(self._blocks):
            x = x + self._attention(block, self._normed(x, block.input_norm), rotation, attention, layer)
            x = x + self._feed_forward(block, self._normed(x, block.post_attention_norm))
        return self._normed(x, self._norm)

    def project(self, hidden: mx.array) -> mx.array:
        """Logits [1, P, V] of selected hidden states [1, P, hidden]."""
        return self._head(hidden)

    def close(self) -> None:
        """Release the weights."""
        self._blocks.clear()
        del self._table, self._head

    def _normed(self, x: mx.array, gain: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, gain, self._config.norm_eps)

    def _attention(
        self,
        block: LlamaBlock,
        x: mx.array,
        rotation: Rotation,
        attention: PackedAttention,
        layer: int,
    ) -> mx.array:
        heads, kv_heads = self._geometry.heads, self._geometry.kv_heads
        joined = block.query_key_value(x).reshape(-1, heads + 2 * kv_heads, 1, self._geometry.head_dim)
        rotated = rotation(joined[:, : heads + kv_heads])
        mixed = attention(rotated[:, :heads], rotated[:, heads:], joined[:, heads + kv_heads :], layer=layer)
        return block.output(mixed)

    def _feed_forward(self, block: LlamaBlock, x: mx.array) -> mx.array:
        gate, up = mx.split(block.gate_up(x), 2, axis=-1)
        return block.down(swiglu(gate, up, composed=self._composition.composes_exponentials))


def _read_block(reader: WeightReader, path: str) -> LlamaBlock:
    return LlamaBlock(
        input_norm=reader.vector(f"{path}.input_layernorm.weight"),
        query_key_value=reader.linear(*(f"{path}.self_attn.{part}_proj" for part in "qkv")),
        output=reader.linear(f"{path}.self_attn.o_proj"),
        post_attention_norm=reader.vector(f"{path}.post_attention_layernorm.weight"),
        gate_up=reader.linear(f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"),
        down=reader.linear(f"{path}.mlp.down_proj"),
    )


def _positions(segments: Sequence[PackedSegment]) -> mx.array:
    """Position of each packed token in its own row, [T] int32."""
    return mx.array(
        [
            position
            for segment in segments
            for position in range(segment.caches[0].offset, segment.caches[0].offset + segment.length)
        ],
        dtype=mx.int32,
    )
