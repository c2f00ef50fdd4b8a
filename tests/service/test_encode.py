"""Encoding leaves nothing out: contracts that are full give messages that are full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from engine.contracts.cancellation import AbortReason
from engine.contracts.composition import Composition
from engine.contracts.denoising import DenoisingPlan
from engine.contracts.errors import EngineFailedError, GenerationAborted
from engine.contracts.events import CanvasRevised, GenerationFinished, GenerationStarted, PrefillProgress
from engine.contracts.execution import ResolvedExecution
from engine.contracts.graph import (
    AdapterCapability,
    DraftCapability,
    GraphDeclaration,
    KvCapability,
    MediaCapability,
    PrefillCapability,
    SpeculationCapability,
)
from engine.contracts.hlg import HlgCurve, HlgEotf, HlgOetf, HlgParametric, HlgPipeline, HlgShaper
from engine.contracts.model import RuntimeInfo
from engine.contracts.option_groups import AdapterSelection
from engine.contracts.options import OptionDefaults, ResolvedOptions
from engine.contracts.results import (
    DenoisingStats,
    FinishReason,
    GeneratedToken,
    GenerateStats,
    TokenLogprobs,
    TopLogprob,
)
from mlxstream.v1 import error_pb2, options_pb2
from service.decode_options import decode_options
from service.encode import (
    encode_block,
    encode_chunk,
    encode_finished,
    encode_heartbeat,
    encode_options,
    encode_started,
)
from service.encode_model import encode_model_info, encode_model_summary
from service.errors import encode_error
from tests.service.fake_engine import DESCRIPTOR, MODEL, OPTIONS, adapter

FULL_DECLARATION = GraphDeclaration(
    media=MediaCapability(input="embeddings+positions", video=True),
    adapters=AdapterCapability(),
    paged_attention=True,
    compiled_decode=True,
    sparse_attention=True,
    embeddings=True,
    hidden_layer_taps=True,
    native_draft=DraftCapability(kind="mtp", num_draft_tokens=3),
    prefill=PrefillCapability(bounded_workspace=True),
    kv=KvCapability(dense_reads=True, delayed_affine="ordinary"),
    speculation=SpeculationCapability(immediate_affine4=True),
)
FULL_EXECUTION = ResolvedExecution(
    paged_kv=True,
    prompt_cache=True,
    checkpoint=True,
    fill=True,
    compiled_decode=True,
    grammar_jump=True,
    reasons=("no draft is mounted",),
    kv_storage="kv4-g32",
    row_tile_tokens=8,
)
FULL_OPTIONS = dataclasses.replace(
    OPTIONS,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    min_tokens_to_keep=2,
    seed_was_explicit=True,
    logit_bias=((5, -1.5), (7, 2.0)),
    repetition_penalty=1.1,
    repetition_context_size=3,
    presence_penalty=0.25,
    presence_context_size=0,
    frequency_penalty=-0.5,
    frequency_context_size=70,
    curve=((1.0, 2.0), (100.0, 50.0)),
    xtc_probability=0.5,
    xtc_threshold=0.2,
    xtc_special_tokens=(2, 10),
    logprobs=True,
    top_logprobs=3,
    adapters=(AdapterSelection(id="b", scale=0.0), AdapterSelection(id="a", scale=0.5)),
    denoising=DenoisingPlan(
        max_canvas_length=32,
        min_canvas_length=8,
        full_canvas=True,
        max_denoising_steps=4,
        sampler="entropy-bound",
        threshold=0.5,
        entropy_bound=0.25,
        t_min=0.125,
        t_max=0.5,
        stability_threshold=2,
        confidence_threshold=0.75,
    ),
)
FULL_STARTED = GenerationStarted(
    generation_id="g-1",
    request_id="r-1",
    model="tiny",
    weights_fingerprint="sha256:0123",
    descriptor=DESCRIPTOR,
    execution=FULL_EXECUTION,
    options=FULL_OPTIONS,
    prompt_tokens=5,
    cached_tokens=4,
    resumed_tokens=3,
)
FULL_MODEL = dataclasses.replace(
    MODEL,
    declaration=FULL_DECLARATION,
    geometry=dataclasses.replace(MODEL.geometry, sliding_window=16, canvas_length=8),
    composition=Composition(max_rows=8),
    runtime=RuntimeInfo(device="cpu", device_name="a CPU", mlx_version="1", blas="b", remedy="install it"),
    option_defaults=OptionDefaults(max_tokens=9, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1),
    adapters=(adapter("a"),),
)
FULL_STATS = GenerateStats(
    prompt_tokens=1,
    cached_tokens=2,
    generated_tokens=3,
    prefill_tps=4.5,
    decode_tps=5.5,
    prefill_ms=6.5,
    decode_ms=7.5,
    queue_ms=8.5,
    time_to_first_token_ms=9.5,
    cache_tokens=(10, 11),
    denoising=DenoisingStats(steps=1, blocks=2, canvas_tokens=3),
)
FULL_TOKEN = GeneratedToken(
    token=7, index=1, text_bytes=b"a", logprobs=TokenLogprobs(logprob=-0.5, top=(TopLogprob(7, -0.5),))
)

# Options that nothing resolves yet: each is refused before a generation starts.
OPTIONS_OF_LATER_BUILDS = {field.name for field in options_pb2.GenerateOptions.DESCRIPTOR.fields} - {
    field.name for field in dataclasses.fields(ResolvedOptions)
}
DEFAULTS_THAT_MODELS_DO_NOT_STATE = {field.name for field in options_pb2.GenerateOptions.DESCRIPTOR.fields} - {
    field.name for field in dataclasses.fields(OptionDefaults)
}
TELEMETRY_OF_LATER_BUILDS = {"speculation", "fill"}


def empty_fields(message: Message, path: str = "") -> Iterator[str]:
    """Paths of the fields of `message`, and of what it holds, that are not set."""
    present = {field.name: value for field, value in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in present:
            yield f"{path}{field.name}"
        elif field.message_type is not None and field.message_type.file.package == "mlxstream.v1":
            value: Any = present[field.name]
            yield from empty_fields(value[0] if field.is_repeated else value, f"{path}{field.name}.")


@pytest.mark.parametrize(
    ("message", "deliberately_empty"),
    [
        (encode_started(FULL_STARTED), {f"options.{name}" for name in OPTIONS_OF_LATER_BUILDS | {"hlg"}}),
        (encode_chunk([dataclasses.replace(FULL_TOKEN, index=1)], "a", with_bytes=True), set()),
        (encode_heartbeat(PrefillProgress(1, 2)), set()),
        (encode_block(CanvasRevised(block_index=1, step=2, tokens=(3,), committed=True), 4), set()),
        (encode_error(EngineFailedError("c-1")), set()),
        (
            encode_finished(
                GenerationFinished(finish_reason=FinishReason.STOP, stats=FULL_STATS, matched_stop="END"),
                encode_error(EngineFailedError("c-1")),
                with_cache_tokens=True,
            ),
            {f"stats.{name}" for name in TELEMETRY_OF_LATER_BUILDS},
        ),
        (
            encode_model_info(FULL_MODEL),
            {f"option_defaults.{name}" for name in DEFAULTS_THAT_MODELS_DO_NOT_STATE},
        ),
        (encode_model_summary(FULL_MODEL), set()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_every_field_is_encoded_or_listed_as_deliberately_empty(message: Message, deliberately_empty: set[str]) -> None:
    assert set(empty_fields(message)) == deliberately_empty


@pytest.mark.parametrize(
    "curve",
    [
        HlgParametric(),
        HlgParametric(gain=0.0, width=2.0, shoulder=0.5, toe=0.25, pivot="entropy", pivot_offset=-1.0),
        HlgOetf(),
        HlgEotf(lw=500.0),
        HlgPipeline(),
        HlgShaper(x_floor=0.0, y_floor=0.0, max_brightness=9.0),
    ],
)
def test_a_resolved_tone_curve_can_be_sent_again_as_it_is(curve: HlgCurve) -> None:
    assert decode_options(encode_options(dataclasses.replace(FULL_OPTIONS, curve=(), hlg=curve))).hlg == curve


def test_resolved_options_can_be_sent_again_as_they_are() -> None:
    decoded = decode_options(encode_options(FULL_OPTIONS))
    for field in dataclasses.fields(ResolvedOptions):
        if field.name not in ("seed_was_explicit", "denoising"):
            assert getattr(decoded, field.name) == getattr(FULL_OPTIONS, field.name), field.name
    plan = FULL_OPTIONS.denoising
    assert plan is not None
    assert {field.name: getattr(decoded.denoising, field.name) for field in dataclasses.fields(plan)} == (
        dataclasses.asdict(plan)
    )


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_its_value(reason: FinishReason) -> None:
    encoded = encode_finished(GenerationFinished(finish_reason=reason, stats=FULL_STATS), None, with_cache_tokens=False)
    assert (
        encoded.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_number[encoded.finish_reason].name
        == f"FINISH_REASON_{reason.name}"
    )


@pytest.mark.parametrize("reason", AbortReason)
def test_an_abort_is_encoded_with_its_reason(reason: AbortReason) -> None:
    encoded = encode_error(GenerationAborted(reason))
    assert encoded.reason == error_pb2.ERROR_REASON_ABORTED
    assert encoded.retryable == (reason is AbortReason.SHUTDOWN)
