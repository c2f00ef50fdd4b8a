"""How stored weights are quantized: a default, and overrides for single modules by their exact path.

`bits` per value; `group_size` counts the values that share one scale. An override stands for itself: what it does not
state is MLX's own default, affine or that of its mode, for so MLX reads what its own converters write. The reference
(artifacts §4.6) lets overrides inherit from the default; where the two differ, MLX's reading fits the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.artifacts.fields import shown_text
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.fields import Fields

_BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
_GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_FOREIGN_WIDTHS = MappingProxyType(
    {
        "mxfp4": (4, 32),
        "mxfp8": (8, 32),
        "fp8": (8, 0),
        "compressed-tensors": (4, 0),
        "modelopt": (4, 16),
        "awq": (4, 128),
        "gptq": (4, 128),
        "bitnet": (2, 0),
    }
)
"""Methods that mlx-lm reads, with bits and the values that share a scale, which some configurations state."""
_STATED_WIDTHS = frozenset({"awq", "gptq"})
_UNSTATED = MappingProxyType({"bits": 4, "group_size": 64})
"""Widths of an affine override that states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """One way to store a matrix. `group_size` is 0 where it is not known, for methods that mlx-lm alone reads."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit" + (f", groups of {self.group_size}" if self.group_size else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The scheme of every quantized module, and the exceptions. An override of None means "not quantized"."""

    default: QuantizationScheme
    overrides: Mapping[str, QuantizationScheme | None] = field(default_factory=dict)

    def scheme(self, module: str) -> QuantizationScheme | None:
        """The scheme of `module`, such as "model.layers.0.self_attn.q_proj"."""
        return self.overrides.get(module, self.default)


def parse_quantization(fields: Fields) -> QuantizationConfig | None:
    """Read `quantization` (or `quantization_config`) of a model's configuration.

    Raises:
        UnsupportedArtifactError: another package's method, or an unknown mode; what is supported is named.
        CorruptArtifactError: widths that no kernel reads; the module is named.
    """
    stated = fields.fields("quantization") or fields.fields("quantization_config")
    if stated is None:
        return None
    if "quant_method" in stated:
        raise _unsupported_method(stated, f"MLX's own modes {', '.join(_BITS)}")
    return _parse_own(stated)


def parse_foreign_quantization(fields: Fields) -> QuantizationConfig | None:
    """The same for a model that mlx-lm reads, which also reads some other packages' methods.

    Of those, what is told serves the account of sizes alone. Source: `mlx_lm.utils.load_model`.

    Raises:
        UnsupportedArtifactError, CorruptArtifactError: as `parse_quantization`.
    """
    stated = fields.fields("quantization")
    other = fields.fields("quantization_config")
    if stated is not None or other is None or "quant_method" not in other:
        return parse_quantization(fields)
    method = other.text("quant_method")
    if method not in _FOREIGN_WIDTHS:
        raise _unsupported_method(other, ", ".join(_FOREIGN_WIDTHS))
    bits, group_size = _FOREIGN_WIDTHS[method]
    if method in _STATED_WIDTHS:
        group_size = int(other.number("group_size", group_size))
    return QuantizationConfig(default=QuantizationScheme(bits=bits, group_size=group_size, mode=method))


def _unsupported_method(stated: Fields, supported: str) -> UnsupportedArtifactError:
    method = shown_text(str(stated.raw("quant_method")))
    return UnsupportedArtifactError(
        stated.file, f"quantization method {method} is not supported; supported: {supported}"
    )


def _parse_own(stated: Fields) -> QuantizationConfig:
    default = _scheme(stated, "the default", {})
    overrides = {name: _override(stated, name, default) for name in stated if _is_override(stated.raw(name))}
    return QuantizationConfig(default=default, overrides=overrides)


def _is_override(value: object) -> bool:
    return isinstance(value, bool | dict)


def _override(stated: Fields, module: str, default: QuantizationScheme) -> QuantizationScheme | None:
    if isinstance(stated.raw(module), bool):
        return default if stated.raw(module) else None
    own = stated.fields(module)
    return None if own is None or not list(own) else _scheme(own, module, _UNSTATED)


def _scheme(stated: Fields, module: str, unstated: Mapping[str, int]) -> QuantizationScheme:
    mode = stated.text("mode", "affine")
    if mode not in _BITS:
        raise UnsupportedArtifactError(stated.file, f"quantization mode {mode!r} of {module}")
    bits = _width(stated, "bits", module, _BITS[mode], unstated.get("bits"))
    group_size = _width(stated, "group_size", module, _GROUP_SIZES[mode], unstated.get("group_size"))
    return QuantizationScheme(bits=bits, group_size=group_size, mode=mode)


def _width(stated: Fields, name: str, module: str, allowed: tuple[int, ...], unstated: int | None) -> int:
    """The stated value, else the only one that the mode allows, else `unstated`."""
    if name not in stated:
        if len(allowed) == 1:
            return allowed[0]
        if unstated is not None:
            return unstated
        raise MissingArtifactError(stated.file, f"quantization of {module} has no {name}")
    value = stated.count(name)
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise CorruptArtifactError(stated.file, f"quantization of {module}: {name} {value} is none of {choices}")
    return value
