"""Builds the graph of a configuration. A family is added by a record in `engine.artifacts.families`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.artifacts.family_shapes import unused_tensors
from engine.models.decoder import DecoderGraph
from engine.ops.adapted import AdapterSites

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig
    from engine.contracts.composition import Composition
    from engine.models.reading import WeightReader


def build_graph(config: ModelConfig, reader: WeightReader, composition: Composition) -> DecoderGraph:
    """Build the graph of `config`, which names a known family, and check that every stored tensor was used.

    Raises:
        ArtifactError: a tensor is missing, misshapen or left over.
    """
    reader.tile_rows(composition.row_tile_tokens)
    if composition.adapters:
        reader.adapter_sites = AdapterSites(composition.row_tile_tokens)
    graph = DecoderGraph(config, reader, composition)
    reader.finish(unused_tensors(config))
    return graph
