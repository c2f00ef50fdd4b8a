"""The configuration of an adapter: what kind it is, and how strong.

Source: reference, autoregressive §8; `mlx_lm.tuner` and `peft.LoraConfig` (names and meanings of fields).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.artifacts.fields import Fields, read_object
from engine.artifacts.model_files import is_named
from engine.contracts.errors import CorruptArtifactError, MissingArtifactError, UnsupportedArtifactError
from engine.contracts.ranges import FINITE_FLOAT32

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG_FILES: Final = ("optiq_lora_config.json", "adapter_config.json")
DEFAULT_SCALE: Final = 20.0
DEFAULT_ALPHA: Final = 16.0
DEFAULT_RANK: Final = 8

_UNREAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_dora": "DoRA",
        "fan_in_fan_out": "matrices that are stored the other way round",
        "lora_bias": "biases of LoRA's own",
        "use_qalora": "QA-LoRA",
        "modules_to_save": "whole modules beside LoRA's matrices",
        "rank_pattern": "ranks that differ by a pattern",
        "alpha_pattern": "strengths that differ by a pattern",
        "layer_replication": "layers that are repeated",
        "trainable_token_indices": "tokens with embeddings of their own",
        "target_parameters": "parameters that are no module's weight",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """How strong an adapter is: `scale` itself, or `alpha` over the root of each layer's rank where `scale` is None.

    `rank` is what every pair's rank must be; None where the configuration states none.
    """

    scale: float | None
    alpha: float
    rank: int | None

    def of_rank(self, rank: int) -> float:
        """The factor on a pair of this rank."""
        return self.alpha / math.sqrt(rank) if self.scale is None else self.scale


def read_scale_rule(folder: Path) -> ScaleRule:
    """The strength that the configuration in `folder` states.

    Raises:
        MissingArtifactError: there is no configuration.
        CorruptArtifactError: a field is of another type or out of range, or stands for no strength at all.
        UnsupportedArtifactError: the adapter is of another kind than LoRA, or of a kind of LoRA that is not read.
    """
    name = next((name for name in CONFIG_FILES if is_named(folder / name)), None)
    if name is None:
        raise MissingArtifactError(folder.name, f"holds no configuration of an adapter ({' or '.join(CONFIG_FILES)})")
    config = Fields(name, read_object(folder / name))
    _refuse_other_kinds(config)
    parameters = config.fields("lora_parameters")
    return _of_peft(config) if parameters is None else _of_mlx(parameters)


def _refuse_other_kinds(config: Fields) -> None:
    kinds = {"peft_type": ("LORA",), "fine_tune_type": ("LORA",), "bias": ("NONE", "")}
    for field, known in kinds.items():
        if field in config and config.text(field).upper() not in known:
            raise UnsupportedArtifactError(config.file, f"{field} is {config.text(field)!r}; LoRA alone is read")
    for field, what in _UNREAD.items():
        if config.raw(field):
            raise UnsupportedArtifactError(config.file, f"{field} asks for {what}, which is not read")


def _of_mlx(parameters: Fields) -> ScaleRule:
    if "scale" not in parameters and "alpha" in parameters:
        raise CorruptArtifactError(parameters.file, "lora_parameters state an alpha and no scale, which is what counts")
    rank = parameters.count("rank") if "rank" in parameters else None
    return ScaleRule(scale=_strength(parameters, "scale", DEFAULT_SCALE), alpha=0.0, rank=rank)


def _of_peft(config: Fields) -> ScaleRule:
    alpha = _strength(config, "lora_alpha" if "lora_alpha" in config else "alpha", DEFAULT_ALPHA)
    field = "r" if "r" in config or "rank" not in config else "rank"
    if config.flag("use_rslora", default=False):
        return ScaleRule(scale=None, alpha=alpha, rank=config.count(field) if field in config else None)
    rank = config.count(field, DEFAULT_RANK)
    return ScaleRule(scale=alpha / rank, alpha=alpha, rank=rank)


def _strength(fields: Fields, name: str, default: float) -> float:
    value = fields.number(name, default)
    if value not in FINITE_FLOAT32:
        raise fields.bad(name, f"must be {FINITE_FLOAT32}")
    if value == 0.0:
        raise fields.bad(name, "must not be 0: the adapter would change nothing")
    return value
