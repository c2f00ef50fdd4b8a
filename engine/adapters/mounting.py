"""Brings an adapter's matrices in and attaches them to a graph's projections. Runs on the engine thread."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.adapters.plan import plan_mount
from engine.artifacts.gguf_architectures import permutes_rows
from engine.artifacts.model_files import naming_folder, require_regular
from engine.contracts.adapters import AdapterInfo
from engine.contracts.errors import CorruptArtifactError
from engine.ops.adapted import LowRankPair

if TYPE_CHECKING:
    from engine.adapters.files import AdapterFiles
    from engine.adapters.plan import MountPlan, PlannedPair
    from engine.artifacts.artifact import Artifact
    from engine.artifacts.tensor_header import TensorHeader
    from engine.ops.adapted import AdapterSites


def mount(files: AdapterFiles, sites: AdapterSites, artifact: Artifact, *, compute_dtype: str) -> AdapterInfo:
    """Attach the adapter in `files` to `sites`, whole or not at all.

    Args:
        files: the adapter.
        sites: the graph's projections.
        artifact: the files of the graph's model.
        compute_dtype: the type of activations; matrices of a narrower type are widened to it.

    Raises:
        ArtifactError: it does not fit the model, cannot be read any more, or holds numbers that are not finite.
    """
    with naming_folder(files.weights.parent):
        permutes = artifact.kind == "gguf" and permutes_rows(artifact.config.model_type)
        permuted_head_dim = artifact.config.head_dim if permutes else 0
        plan = plan_mount(files, sites.targets, artifact.tensors, permuted_head_dim=permuted_head_dim)
        pairs = _read(plan, getattr(mx, compute_dtype))
    resident_bytes = sites.attach(files.id, pairs)
    layers = {re.sub(r"(layers\.\d+)\..*", r"\1", module) for module in pairs}
    return AdapterInfo(
        id=files.id,
        revision=files.revision,
        rank=max(pair.rank for pair in plan.pairs),
        scale=max((pair.scale for pair in plan.pairs), key=abs),
        mounted_layers=len(layers),
        applied_tensors=2 * len(pairs),
        skipped_tensors=plan.skipped,
        file_bytes=files.file_bytes,
        resident_bytes=resident_bytes,
    )


def _read(plan: MountPlan, dtype: mx.Dtype) -> dict[str, LowRankPair]:
    file = plan.files.weights
    require_regular(file)
    try:
        arrays = mx.load(str(file), format="safetensors")
        found = {pair.stored.module: _pair(pair, arrays, dtype) for pair in plan.pairs}
        finite = {module: (mx.isfinite(pair.a).all(), mx.isfinite(pair.b).all()) for module, pair in found.items()}
        mx.eval([(pair.a, pair.b) for pair in found.values()], list(finite.values()))
    except (RuntimeError, KeyError):
        raise CorruptArtifactError(file.name, "cannot be read any more") from None
    bad = [module for module, flags in finite.items() if not all(flag.item() for flag in flags)]
    if bad:
        raise CorruptArtifactError(file.name, f"holds numbers that are not finite, the first for {bad[0]}")
    return found


def _pair(pair: PlannedPair, arrays: object, dtype: mx.Dtype) -> LowRankPair:
    a, b = (_matrix(header, arrays, dtype) for header in (pair.stored.a, pair.stored.b))
    if pair.is_transposed:
        a, b = mx.contiguous(a.T), mx.contiguous(b.T)
    if pair.permuted_head_dim:
        halves = b.reshape(pair.rank, -1, 2, pair.permuted_head_dim // 2)
        b = mx.contiguous(halves.swapaxes(-1, -2).reshape(pair.rank, -1))
    return LowRankPair(a, b, pair.scale)


def _matrix(header: TensorHeader, arrays: object, dtype: mx.Dtype) -> mx.array:
    array = arrays[header.name] if isinstance(arrays, dict) else None
    if array is None or array.shape != header.shape:
        raise CorruptArtifactError(header.file.name, f"{header.name} has changed since its header was validated")
    widened: mx.array = array.astype(mx.float32 if dtype != array.dtype else dtype)
    return widened
