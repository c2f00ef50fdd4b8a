"""Whether stored tensors agree with their configuration, judged from headers alone.

Found here, before anything is loaded: tensors that are missing or have another shape, quantized modules without a
scheme, overrides that name nothing, and widths that contradict the packed sizes. Reads no tensor data.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from engine.artifacts.family_shapes import expected_shapes, unused_tensors
from engine.artifacts.safetensors import DTYPE_BYTES
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.artifacts.config import ModelConfig
    from engine.artifacts.quantization import QuantizationScheme
    from engine.artifacts.tensor_header import TensorHeader

HEAD_WEIGHT: Final = "lm_head.weight"
_ALWAYS_DROPPED: Final = (re.compile(r".*\.rotary_emb\..*"),)
_DROPPED_WHEN_TIED: Final = (re.compile(r"lm_head\..*"),)
_WORD_BITS: Final = 32
_MOST_LISTED: Final = 12
_CONFIG: Final = "config.json"
_WHOLE_NUMBERS: Final = frozenset(DTYPE_BYTES) - {"F16", "BF16", "F32"}


def check_weights(file: str, config: ModelConfig, tensors: Mapping[str, TensorHeader]) -> None:
    """Check `tensors` (by canonical name) against `config`; `file` is named where no single tensor is at fault.

    Raises:
        MissingArtifactError: tensors of the family are absent; up to 12 are named.
        CorruptArtifactError: a tensor has another shape or form than the configuration states.
        UnsupportedArtifactError: a tensor holds whole numbers, and nothing says what they stand for.
    """
    if not config.tie_word_embeddings and HEAD_WEIGHT not in tensors:
        raise MissingArtifactError(
            file, f"has no {HEAD_WEIGHT}, and the configuration does not tie the output head to the embeddings"
        )
    _check_overrides(config, tensors)
    expected = expected_shapes(config, tensors)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise MissingArtifactError(file, f"has no {listed(missing)}")
    for name, header in tensors.items():
        if name.endswith(".bias") and name not in expected and f"{name.removesuffix('.bias')}.weight" in expected:
            raise CorruptArtifactError(header.file.name, f"has {name}, which the configuration does not announce")
        if name.endswith(".scales"):
            logical_shape(config, tensors, f"{name.removesuffix('.scales')}.weight")
        elif name in expected and (found := logical_shape(config, tensors, name)) != expected[name]:
            raise CorruptArtifactError(
                header.file.name, f"{name} has the shape {list(found)}, the configuration needs {list(expected[name])}"
            )


def logical_shape(config: ModelConfig, tensors: Mapping[str, TensorHeader], name: str) -> tuple[int, ...]:
    """The shape of tensor `name` in values; for a packed matrix after checking its parts against its scheme."""
    module = name.removesuffix(".weight")
    scales = tensors.get(f"{module}.scales") if name.endswith(".weight") else None
    if scales is None:
        _check_holds_values(tensors[name])
        return tensors[name].shape
    scheme = scheme_of(config, scales, module)
    weight, biases = tensors.get(name), tensors.get(f"{module}.biases")
    if weight is None or (biases is None) is (scheme.mode == "affine"):
        raise CorruptArtifactError(
            scales.file.name, f"{module} is not stored as {scheme} is: parts are missing or extra"
        )
    if biases is not None:  # other modes encode their scales in bytes
        _check_holds_values(scales)
        _check_holds_values(biases)
    row_values = scales.shape[-1] * scheme.group_size if scales.shape else 0
    packed = (*scales.shape[:-1], row_values * scheme.bits // _WORD_BITS)
    if weight.dtype != "U32" or weight.shape != packed or (biases is not None and biases.shape != scales.shape):
        raise CorruptArtifactError(
            scales.file.name,
            f"{module} does not fit {scheme}: weight {weight.dtype} {list(weight.shape)}, scales {list(scales.shape)}",
        )
    return (*scales.shape[:-1], row_values)


def scheme_of(config: ModelConfig, scales: TensorHeader, module: str) -> QuantizationScheme:
    """The scheme of a module that stores `scales`."""
    if config.quantization is None:
        raise CorruptArtifactError(scales.file.name, f"{module} is quantized, and {_CONFIG} has no quantization")
    scheme = config.quantization.scheme(module)
    if scheme is None:
        raise CorruptArtifactError(
            _CONFIG, f"{module} is stated not to be quantized, and {scales.file.name} has its scales"
        )
    return scheme


def _check_holds_values(tensor: TensorHeader) -> None:
    if tensor.dtype in _WHOLE_NUMBERS:
        kind = "numbers of 8 bits" if tensor.dtype.startswith("F8") else "whole numbers"
        raise UnsupportedArtifactError(
            tensor.file.name, f"{tensor.name} is stored as {tensor.dtype}, {kind} without a scale"
        )


def _check_overrides(config: ModelConfig, tensors: Mapping[str, TensorHeader]) -> None:
    for module, scheme in config.quantization.overrides.items() if config.quantization else ():
        if f"{module}.weight" not in tensors:
            raise CorruptArtifactError(_CONFIG, f"quantization names {module!r}, which is no module of the weights")
        if scheme is not None and f"{module}.scales" not in tensors:
            raise CorruptArtifactError(
                _CONFIG, f"quantization of {module} is {scheme}, and it is stored without scales"
            )


def drop_rules(config: ModelConfig) -> tuple[re.Pattern[str], ...]:
    """Full matches are tensors that no graph needs: rotary tables, and the output head of a tied model."""
    return (*_ALWAYS_DROPPED, *(_DROPPED_WHEN_TIED if config.tie_word_embeddings else ()))


def surplus_tensors(config: ModelConfig, tensors: Mapping[str, TensorHeader]) -> list[str]:
    """Names of tensors that the family has no use for, and that no rule drops: loading will refuse them."""
    rules = (*drop_rules(config), *map(re.compile, unused_tensors(config)))
    used = set(expected_shapes(config, tensors))
    used |= {f"{name.removesuffix('.weight')}.{part}" for name in used for part in ("scales", "biases")}
    return [name for name in tensors if name not in used and not any(rule.fullmatch(name) for rule in rules)]


def listed(names: Sequence[str]) -> str:
    """Up to 12 of `names`, and how many more there are."""
    rest = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "")
