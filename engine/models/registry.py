"""Finds the graph of a `model_type`. A family is added by one line here and one file beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import UnsupportedArtifactError
from engine.models.llama import LlamaGraph

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig
    from engine.contracts.composition import Composition
    from engine.contracts.graph import TokenGraph
    from engine.models.reading import WeightReader

_GRAPHS = {"llama": LlamaGraph}


def build_graph(config: ModelConfig, reader: WeightReader, composition: Composition) -> TokenGraph:
    """Build the graph of `config` and check that every stored tensor was used.

    Raises:
        UnsupportedArtifactError: no graph serves this `model_type`.
        ArtifactError: a tensor is missing, misshapen or left over.
    """
    graph_class = _GRAPHS.get(config.model_type)
    if graph_class is None:
        known = ", ".join(sorted(_GRAPHS))
        raise UnsupportedArtifactError("config.json", f"model_type {config.model_type!r} is not one of: {known}")
    reader.tile_rows(composition.row_tile_tokens)
    graph = graph_class(config, reader, composition)
    reader.finish()
    return graph
