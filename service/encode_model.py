"""From what the engine tells about a resident model to messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.duration_pb2 import Duration

from mlxstream.v1 import model_pb2, options_pb2
from service.encode_graph import encode_declaration, encode_descriptor, encode_geometry

if TYPE_CHECKING:
    from engine.contracts.adapters import AdapterInfo
    from engine.contracts.memory import MemoryEstimate
    from engine.contracts.model import ModelInfo, RuntimeInfo
    from engine.contracts.options import OptionDefaults

MOST_BYTES: Final = 2**64 - 1


def encode_model_info(info: ModelInfo) -> model_pb2.ModelInfo:
    """A resident model."""
    return model_pb2.ModelInfo(
        name=info.name,
        weights_fingerprint=info.fingerprint,
        model_type=info.model_type,
        graph=encode_descriptor(info.descriptor),
        declaration=encode_declaration(info.declaration),
        geometry=encode_geometry(info.geometry),
        context_length=info.geometry.context_length,
        vocab_size=info.geometry.vocab_size,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id,
        has_chat_template=info.has_chat_template,
        option_defaults=_option_defaults(info.option_defaults),
        runtime=_runtime(info.runtime),
        compute_dtype=info.composition.compute_dtype,
        stored_quantization=info.stored_quantization,
        weights_bytes=info.weights_bytes,
        parameters=info.parameters,
        load_time=_duration(info.load_seconds),
        max_rows=info.composition.max_rows,
        kv_storage=info.composition.kv_store_key,
        adapters=[_adapter(adapter) for adapter in info.adapters],
    )


def encode_model_summary(info: ModelInfo) -> model_pb2.ModelSummary:
    """A resident model in a list."""
    return model_pb2.ModelSummary(
        name=info.name,
        state=model_pb2.MODEL_STATE_READY,
        model_type=info.model_type,
        weights_fingerprint=info.fingerprint,
        context_length=info.geometry.context_length,
    )


def encode_memory_estimate(estimate: MemoryEstimate) -> model_pb2.EstimateMemoryResponse:
    """A predicted load. What 64 bits cannot hold, as of billions of long rows, is told as the most that they can."""
    return model_pb2.EstimateMemoryResponse(
        weights_bytes=min(estimate.weights_bytes, MOST_BYTES),
        kv_bytes=min(estimate.kv_bytes, MOST_BYTES),
        workspace_bytes=min(estimate.workspace_bytes, MOST_BYTES),
        total_bytes=min(estimate.total_bytes, MOST_BYTES),
        budget_bytes=min(estimate.budget_bytes, MOST_BYTES),
        fits=estimate.fits,
        max_context_tokens=estimate.max_context_tokens,
    )


def _adapter(info: AdapterInfo) -> model_pb2.MountedAdapter:
    return model_pb2.MountedAdapter(id=info.id, revision=info.revision, rank=info.rank, scale=info.scale)


def _option_defaults(defaults: OptionDefaults) -> options_pb2.GenerateOptions:
    return options_pb2.GenerateOptions(
        max_tokens=defaults.max_tokens,
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
    )


def _runtime(runtime: RuntimeInfo) -> model_pb2.RuntimeInfo:
    return model_pb2.RuntimeInfo(
        device=runtime.device,
        device_name=runtime.device_name,
        mlx_version=runtime.mlx_version,
        blas=runtime.blas,
        blas_optimized=runtime.blas_optimized,
        remedy=runtime.remedy,
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(1e9 * seconds))
    return duration
