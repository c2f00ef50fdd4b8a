"""From what the engine tells operators to messages. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from mlxstream.v1 import admin_pb2

if TYPE_CHECKING:
    from engine.contracts.adapters import AdapterInfo
    from engine.contracts.load import EngineLoad, GenerationStatus, LoadProgress
    from engine.contracts.memory import MemoryReading
    from service.load_meter import Rates
    from service.readiness import NotReady


def encode_adapter(info: AdapterInfo) -> admin_pb2.AdapterInfo:
    """A mounted adapter, as operators see it."""
    return admin_pb2.AdapterInfo(
        id=info.id,
        revision=info.revision,
        rank=info.rank,
        scale=info.scale,
        mounted_layers=info.mounted_layers,
        skipped_tensors=len(info.skipped_tensors),
        file_bytes=info.file_bytes,
        resident_bytes=info.resident_bytes,
    )


def encode_generation(status: GenerationStatus, *, detached: bool = False) -> admin_pb2.GenerationInfo:
    """A live generation; `detached`: nobody reads it."""
    arrived = Timestamp()
    arrived.FromNanoseconds(round(1e9 * status.arrived_at))
    return admin_pb2.GenerationInfo(
        generation_id=status.generation_id,
        request_id=status.request_id,
        model=status.model,
        phase="GENERATION_PHASE_DETACHED" if detached else f"GENERATION_PHASE_{status.phase.name}",
        prompt_tokens=status.prompt_tokens,
        prefilled_tokens=status.prefilled_tokens,
        generated_tokens=status.generated_tokens,
        create_time=arrived,
    )


def encode_load(
    load: EngineLoad,
    rates: Rates,
    *,
    model: str,
    draining: bool,
    not_ready: NotReady | None,
    memory: MemoryReading | None,
) -> admin_pb2.GetLoadResponse:
    """How busy the server is; `model` is the served one's name, "" while there is none."""
    step_age = Duration()
    step_age.FromNanoseconds(round(1e9 * load.step_age_seconds))
    return admin_pb2.GetLoadResponse(
        running=load.running,
        queued=load.queued,
        queue_limit=load.queue_limit,
        kv_utilization=load.state_share,
        prefix_cache_bytes=load.prefix_bytes,
        decode_tps=rates.decode_tps,
        step_age=step_age,
        draining=draining,
        model=model,
        max_rows=load.row_limit,
        kv_bytes=load.state_bytes,
        kv_limit_bytes=load.state_limit_bytes,
        prefix_cache_limit_bytes=load.prefix_limit_bytes,
        prefill_tps=rates.prefill_tps,
        generated_tokens=load.generated_tokens,
        prefilled_tokens=load.prefilled_tokens,
        not_ready_reason=f"NOT_READY_REASON_{'UNSPECIFIED' if not_ready is None else not_ready.name}",
        memory_bytes=0 if memory is None else memory.active_bytes,
        free_memory_bytes=0 if memory is None else memory.free_bytes,
    )


def encode_load_progress(progress: LoadProgress) -> admin_pb2.LoadModelResponse:
    """How far a load has come."""
    return admin_pb2.LoadModelResponse(
        progress=admin_pb2.LoadProgress(
            phase=f"LOAD_PHASE_{progress.phase.name}",
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
        )
    )
