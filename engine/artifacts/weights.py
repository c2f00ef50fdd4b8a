"""The stored tensors of one model, handed out one by one and accounted for.

A store belongs to the engine thread. Each tensor can be taken once and is not kept, so that loading holds little more
than what the graph holds; `audit` then proves that the graph left nothing behind. Names are canonical.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.artifacts import gguf_blocks, safetensors
from engine.artifacts.consistency import drop_rules, listed, logical_shape, scheme_of
from engine.artifacts.model_files import require_regular
from engine.artifacts.tensors import DenseTensor, QuantizedTensor, StoredTensor
from engine.contracts.errors import (
    CorruptArtifactError,
    GraphContractError,
    MissingArtifactError,
    UnsupportedArtifactError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from engine.artifacts.artifact import Artifact
    from engine.artifacts.tensor_header import TensorHeader

__all__ = ["DenseTensor", "QuantizedTensor", "StoredTensor", "WeightStore", "dense"]


class WeightStore:
    """Tensors of one artifact that were not taken yet."""

    def __init__(self, artifact: Artifact, *, unpacked_dtype: mx.Dtype = mx.float32) -> None:
        """Read `artifact`; `unpacked_dtype` is for the GGUF blocks that only the host can unpack."""
        self._artifact = artifact
        self._unpacked_dtype = unpacked_dtype
        self._left = dict(artifact.tensors)
        self._taken_bytes = 0
        self._files: dict[Path, dict[str, mx.array]] = {}
        self._unchanged: set[Path] = set()

    @property
    def name(self) -> str:
        """The artifact's name, for errors that no single file is at fault for."""
        return self._artifact.path.name

    @property
    def weights_bytes(self) -> int:
        """Bytes of all stored tensors, taken or not, from headers alone."""
        return self._artifact.weights_bytes

    @property
    def values(self) -> int:
        """Values of all stored tensors, taken or not."""
        return self._artifact.parameters

    @property
    def tensors(self) -> int:
        """How many tensors are stored, taken or not."""
        return len(self._artifact.tensors)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the tensors that were taken."""
        return self._taken_bytes

    def has(self, name: str) -> bool:
        """Whether the artifact stores `name`, taken or not."""
        return name in self._artifact.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name` in values, taken or not; raises `MissingArtifactError`."""
        self.require([name])
        return logical_shape(self._artifact.config, self._artifact.tensors, name)

    def require(self, names: Iterable[str]) -> None:
        """Raise `MissingArtifactError` listing every one of `names` that is not stored (up to 12)."""
        missing = [name for name in names if not self.has(name)]
        if missing:
            raise MissingArtifactError(self._artifact.path.name, f"has no {listed(missing)}")

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Load tensor `name` and forget it; a matrix with `.scales` comes packed, with them.

        Args:
            name: full canonical name, such as "model.layers.0.self_attn.q_proj.weight".
            shape: the shape in values that the graph needs.

        Raises:
            MissingArtifactError: it is not stored.
            CorruptArtifactError: it has another shape, or its file has changed.
            GraphContractError: it was taken before.
        """
        self._require_left(name)
        found = logical_shape(self._artifact.config, self._artifact.tensors, name)
        if shape is not None and found != shape:
            file = self._artifact.tensors[name].file.name
            raise CorruptArtifactError(file, f"{name} has the shape {list(found)}, the model needs {list(shape)}")
        if self._artifact.kind == "gguf":
            return gguf_blocks.load_tensor(self._pop(name), self._unpacked_dtype)
        return self._take_parts(name)

    def take_optional(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor | None:
        """`take`, or None when `name` is not stored."""
        return self.take(name, shape) if self.has(name) else None

    def matrix_form(self, name: str) -> str | None:
        """How matrix `name` is stored, such as "Q4_1" or "BF16"; None for what `take_stored` cannot give."""
        header = self._artifact.tensors.get(name)
        return header.dtype if header is not None and len(header.shape) == 2 else None

    def take_stored(self, name: str) -> TensorHeader:
        """Forget matrix `name`, which has a `matrix_form`, and leave the reading of it to the caller.

        Raises:
            MissingArtifactError: it is not stored.
            CorruptArtifactError: its file has changed.
            GraphContractError: it was taken before.
        """
        self._require_left(name)
        if self._artifact.kind == "huggingface":
            self._require_unchanged(self._left[name].file)
        return self._pop(name)

    def audit(self, extra_drops: Iterable[str] = ()) -> None:
        """Prove that every tensor was taken or may be dropped, and let go of the files.

        Dropped are rotary `inv_freq` tables, `lm_head` of a tied model, and full matches of the patterns in
        `extra_drops`.

        Raises:
            UnsupportedArtifactError: the graph has no use for some tensors; up to 12 are named.
        """
        rules = [*drop_rules(self._artifact.config), *map(re.compile, extra_drops)]
        unused = [name for name in self._left if not any(rule.fullmatch(name) for rule in rules)]
        if unused:
            family = self._artifact.config.model_type
            raise UnsupportedArtifactError(
                self._artifact.path.name, f"holds tensors that a {family} model has no use for: {listed(unused)}"
            )
        self.close()

    def close(self) -> None:
        """Let go of the files and of what was not taken."""
        self._left.clear()
        self._files.clear()

    def _require_left(self, name: str) -> None:
        self.require([name])
        if name not in self._left:
            raise GraphContractError(f"the graph takes {name!r} twice")

    def _require_unchanged(self, file: Path) -> None:
        """Refuse a file that has taken the place of the validated one: its bytes would be read by old headers."""
        if file in self._unchanged:
            return
        now = safetensors.read_header(file)
        for header in self._artifact.tensors.values():
            if header.file == file and now.get(header.name) != header:
                raise CorruptArtifactError(file.name, f"{header.name} has changed since its header was validated")
        self._unchanged.add(file)

    def _pop(self, name: str) -> TensorHeader:
        header = self._left.pop(name)
        self._taken_bytes += header.nbytes
        return header

    def _take_parts(self, name: str) -> StoredTensor:
        module = name.removesuffix(".weight")
        scales = self._left.get(f"{module}.scales") if name.endswith(".weight") else None
        weight = self._array(name)
        if scales is None:
            return DenseTensor(weight=weight)
        biases = self._array(f"{module}.biases") if self.has(f"{module}.biases") else None
        scheme = scheme_of(self._artifact.config, scales, module)
        return QuantizedTensor.of(scheme, weight, self._array(f"{module}.scales"), biases)

    def _array(self, name: str) -> mx.array:
        """One array of a safetensors file, read now so that a fault has its file's name."""
        header = self._pop(name)
        try:
            array = self._arrays(header.file).pop(header.name)
            mx.eval(array)
        except (RuntimeError, KeyError):
            raise CorruptArtifactError(header.file.name, f"{name} cannot be read any more") from None
        if array.shape != header.shape:
            raise CorruptArtifactError(header.file.name, f"{name} has changed since its header was validated")
        return array

    def _arrays(self, file: Path) -> dict[str, mx.array]:
        """The arrays of one file that were not taken; nothing is read before one is evaluated."""
        if file not in self._files:
            require_regular(file)
            loaded = mx.load(str(file), format="safetensors")
            self._files[file] = loaded if isinstance(loaded, dict) else {}
        return self._files[file]


def dense(tensor: StoredTensor, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The values of `tensor` in `dtype`; a packed matrix is unpacked in float32, so that no product is rounded twice.

    Returns:
        An array [..., out, in] of a packed matrix, else the array as stored.
    """
    if isinstance(tensor, DenseTensor):
        return tensor.weight.astype(dtype)
    affine = tensor.mode == "affine"
    values = mx.dequantize(
        tensor.weight,
        tensor.scales.astype(mx.float32) if affine else tensor.scales,
        tensor.biases.astype(mx.float32) if tensor.biases is not None else None,
        group_size=tensor.group_size,
        bits=tensor.bits,
        mode=tensor.mode,
    )
    return values.astype(dtype)
