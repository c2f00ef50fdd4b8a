"""What a configuration says of layers that attend linearly, by the gated delta rule: which ones, and their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.contracts.errors import CorruptArtifactError, UnsupportedArtifactError
from engine.contracts.graph import LINEAR_ATTENTION, RecurrentGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.fields import Fields
    from engine.artifacts.tensor_header import TensorHeader

_INTERVAL: Final = 4
_OUTPUT_GATES: Final = ("swish", "silu")
_LONGEST_CONVOLUTION_TOKENS: Final = 64


def is_linear(fields: Fields, layer: int) -> bool:
    """Whether `layer` attends linearly where no types are stated: all but every n-th do."""
    return (layer + 1) % fields.count("full_attention_interval", _INTERVAL) != 0


def has_original_convolutions(tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether a convolution is stored [C, 1, K], as its authors do; MLX turns it to [C, K, 1]."""
    return any(name.endswith(".conv1d.weight") and header.shape[-1:] != (1,) for name, header in tensors.items())


def parse_recurrent(fields: Fields, kinds: tuple[str, ...]) -> RecurrentGeometry | None:
    """The sizes of the linear layers among `kinds`; None when there are none.

    Raises:
        UnsupportedArtifactError: an output is gated in another way, or not at all.
        MissingArtifactError, CorruptArtifactError: a size is absent or impossible.
    """
    if LINEAR_ATTENTION not in kinds:
        return None
    gate = fields.text("output_gate_type", _OUTPUT_GATES[0])
    if gate not in _OUTPUT_GATES:
        raise UnsupportedArtifactError(fields.file, f"output_gate_type {gate!r} is not supported")
    if not fields.flag("attn_output_gate", default=True):
        raise UnsupportedArtifactError(fields.file, "attn_output_gate false is not supported")
    sizes = RecurrentGeometry(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        convolution_tokens=fields.count("linear_conv_kernel_dim", most=_LONGEST_CONVOLUTION_TOKENS),
    )
    if sizes.value_heads % sizes.key_heads:
        raise CorruptArtifactError(
            fields.file, f"{sizes.value_heads} linear value heads cannot share {sizes.key_heads} key heads"
        )
    if sizes.convolution_tokens == 1:
        raise fields.bad("linear_conv_kernel_dim", "must be at least 2")
    return sizes
