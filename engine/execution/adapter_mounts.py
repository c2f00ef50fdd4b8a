"""Adapters over one resident graph: mounted when it is loaded, and taken on and off while it serves.

Belongs to the engine thread; imports mlx, as loading does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.adapters.mounting import mount

if TYPE_CHECKING:
    from engine.adapters.files import AdapterFiles
    from engine.artifacts.artifact import Artifact
    from engine.contracts.adapters import AdapterInfo
    from engine.ops.adapted import AdapterSites

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMounts:
    """The places of a graph, and what is needed to hold an adapter against them."""

    sites: AdapterSites
    artifact: Artifact
    compute_dtype: str

    def mount(self, files: AdapterFiles) -> AdapterInfo:
        """Attach an adapter, whole or not at all.

        Raises:
            ArtifactError: it does not fit the model.
        """
        info = mount(files, self.sites, self.artifact, compute_dtype=self.compute_dtype)
        skipped = len(info.skipped_tensors)
        logger.info("adapter %s: %d tensors applied, %d skipped", info.id, info.applied_tensors, skipped)
        return info

    def unmount(self, adapter_id: str) -> int:
        """Take an adapter off that no row takes any more; returns the bytes that it held."""
        return self.sites.detach(adapter_id)
