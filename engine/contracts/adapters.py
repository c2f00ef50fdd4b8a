"""What graphs and adapters say to each other: the projections that can be adapted, and the account of a mount.

Importing this module never imports mlx.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
ID_RULE: Final = "an adapter's id is 1 to 128 letters, digits, dots, dashes or underscores"


def is_adapter_id(text: str) -> bool:
    """Whether an adapter may be mounted under `text`; see `ID_RULE`."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTarget:
    """One projection of a graph, by its published path, such as "model.layers.0.self_attn.q_proj"."""

    module: str
    in_features: int
    out_features: int


class AdapterTargets(Protocol):
    """Where a graph takes adapters."""

    @property
    def targets(self) -> Mapping[str, AdapterTarget]:
        """The projections by their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """One mounted adapter.

    Attributes:
        id: what requests call it.
        revision: SHA-256 of what its scale is made from and of its weights' bytes.
        rank: of its matrices; the largest where they differ.
        scale: its own strength; the largest in size where layers differ.
        mounted_layers: layers of the model that it changes.
        applied_tensors: tensors of its file that are in use.
        skipped_tensors: names of those that belong to modules which take no adapters.
        file_bytes: size of its weights' file.
        resident_bytes: what its matrices hold in memory.
    """

    id: str
    revision: str
    rank: int
    scale: float
    mounted_layers: int
    applied_tensors: int
    skipped_tensors: tuple[str, ...]
    file_bytes: int
    resident_bytes: int
