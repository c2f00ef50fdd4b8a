"""From headers and settings to the facts under which a model runs; pure, so that it can be asked before a load."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from engine.artifacts.kv_config import read_kv_config
from engine.contracts.composition import Composition
from engine.generation.bindings.kv_storage import resolve_kv_storage
from engine.runtime.policy import ComputeDtype, WeightsFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.artifacts.artifact import Artifact
    from engine.execution.resident import EngineSettings
    from engine.runtime.policy import LayoutPolicy

DENSE_DTYPES: Final[Mapping[str, ComputeDtype]] = MappingProxyType(
    {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
)


def weights_facts(artifact: Artifact) -> WeightsFacts:
    """Sizes from headers. Quantized GGUF blocks carry 16-bit scales; elsewhere the commonest dense dtype counts."""
    sizes: Counter[str] = Counter()
    for header in artifact.tensors.values():
        sizes[header.dtype] += header.nbytes
    dense = {name: sizes[dtype] for dtype, name in DENSE_DTYPES.items() if sizes[dtype]}
    quantized = bool(artifact.stored_quantization)
    by_scales = quantized and artifact.kind == "gguf"
    stored: ComputeDtype = "float16" if by_scales or not dense else max(dense, key=lambda name: dense[name])
    return WeightsFacts(parameters=artifact.parameters, stored_dtype=stored, quantized=quantized)


def compose(artifact: Artifact, device: str, layout: LayoutPolicy, settings: EngineSettings) -> Composition:
    """The composition of a model that is held as `layout` says.

    Raises:
        EngineError: the storage of keys and values that was asked for is no form of it, or the model's own list is bad.
    """
    kv, paged_kv = resolve_kv_storage(settings.kv_storage, lambda: read_kv_config(artifact.path))
    return Composition(
        device=device,
        compute_dtype=layout.compute_dtype,
        kv=kv,
        paged_kv=paged_kv,
        prefill_chunk_tokens=settings.prefill_step_tokens or layout.prefill_chunk_tokens,
        adapters=bool(settings.adapters) or (settings.adapters_dir is not None and artifact.graph == "native"),
        max_rows=settings.max_rows,
        row_tile_tokens=settings.row_tile_tokens,
        host_kernels=layout.host_kernels,
    )
