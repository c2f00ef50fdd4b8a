"""Builds the graph of a configuration. A family is added by a record in `engine.artifacts.families`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.artifacts.family_shapes import unused_tensors
from engine.contracts.errors import GraphContractError
from engine.models.decoder import DecoderGraph
from engine.ops.adapted import AdapterSites

if TYPE_CHECKING:
    from engine.artifacts.config import ModelConfig
    from engine.contracts.composition import Composition
    from engine.contracts.graph import Method
    from engine.models.diffusion import DiffusionGraph
    from engine.models.reading import WeightReader


def build_graph(config: ModelConfig, reader: WeightReader, composition: Composition) -> DecoderGraph:
    """Build the autoregressive graph of `config`, and check that every stored tensor was used.

    Raises:
        ArtifactError: a tensor is missing, misshapen or left over.
        GraphContractError: `config` is of another method.
    """
    _prepare(reader, config, composition, method="autoregressive")
    graph = DecoderGraph(config, reader, composition)
    reader.finish(unused_tensors(config))
    return graph


def build_denoising_graph(config: ModelConfig, reader: WeightReader, composition: Composition) -> DiffusionGraph:
    """Build the denoising graph of `config`; otherwise as `build_graph`."""
    from engine.models.diffusion import DiffusionGraph  # few models denoise

    _prepare(reader, config, composition, method="denoising")
    graph = DiffusionGraph(config, reader, composition)
    reader.finish(unused_tensors(config))
    return graph


def _prepare(reader: WeightReader, config: ModelConfig, composition: Composition, *, method: Method) -> None:
    """Let `reader` make products as `composition` says, for a model that generates by `method`."""
    if config.method != method:
        raise GraphContractError(f"a {config.model_type} model has no graph of the {method} method")
    reader.tile_rows(composition.row_tile_tokens)
    if composition.adapters:
        reader.adapter_sites = AdapterSites(composition.row_tile_tokens)
