"""How stored weights are quantized: a default, and overrides for single modules by their exact path.

`bits` per value; `group_size` counts the values that share one scale. Source: reference, artifacts §4.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.fields import Fields

_BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
_GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """One way to store a matrix."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, groups of {self.group_size}"


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
        UnsupportedArtifactError: another package's method, or an unknown mode.
        CorruptArtifactError: widths that no kernel reads; the module is named.
    """
    stated = fields.fields("quantization") or fields.fields("quantization_config")
    if stated is None:
        return None
    if "quant_method" in stated:
        raise UnsupportedArtifactError(fields.file, f"quantization method {stated.raw('quant_method')!r}")
    default = _scheme(stated, "the default", None)
    overrides = {name: _override(stated, name, default) for name in stated if _is_override(stated.raw(name))}
    return QuantizationConfig(default=default, overrides=overrides)


def _is_override(value: object) -> bool:
    return isinstance(value, bool | dict)


def _override(stated: Fields, module: str, default: QuantizationScheme) -> QuantizationScheme | None:
    if isinstance(stated.raw(module), bool):
        return default if stated.raw(module) else None
    own = stated.fields(module)
    return default if own is None else _scheme(own, module, default)


def _scheme(stated: Fields, module: str, inherited: QuantizationScheme | None) -> QuantizationScheme:
    mode = stated.text("mode", inherited.mode if inherited else "affine")
    if mode not in _BITS:
        raise UnsupportedArtifactError(stated.file, f"quantization mode {mode!r} of {module}")
    bits = _width(stated, "bits", module, _BITS[mode], inherited.bits if inherited else None)
    group_size = _width(stated, "group_size", module, _GROUP_SIZES[mode], inherited.group_size if inherited else None)
    return QuantizationScheme(bits=bits, group_size=group_size, mode=mode)


def _width(stated: Fields, name: str, module: str, allowed: tuple[int, ...], inherited: int | None) -> int:
    """The stated value, else the inherited one, else the only one that the mode allows."""
    if name not in stated:
        if inherited in allowed:
            return inherited
        if len(allowed) == 1:
            return allowed[0]
        raise MissingArtifactError(stated.file, f"quantization of {module} has no {name}")
    value = stated.count(name)
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise CorruptArtifactError(stated.file, f"quantization of {module}: {name} {value} is none of {choices}")
    return value
