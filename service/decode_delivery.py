"""DeliveryOptions from the wire: defaults filled in, ranges checked, what is not offered refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.contracts.errors import FieldViolation, InvalidRequestError
from mlxstream.v1 import delivery_pb2
from service.decode_values import NANOS_PER_SECOND, nanoseconds, refuse_bad_values, shown
from service.delivery import MESSAGE_TOKENS_LIMIT, Delivery

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

DEFAULT_HEARTBEAT_SECONDS: Final = 15.0
MAX_DELAY_SECONDS: Final = 60.0
MIN_HEARTBEAT_SECONDS: Final = 0.01
MAX_HEARTBEAT_SECONDS: Final = 3600.0

STREAMED: Final = ("max_tokens_per_message", "max_delay", "heartbeat_interval", "draft_blocks")


def decode_delivery(delivery: delivery_pb2.DeliveryOptions, *, streaming: bool) -> Delivery:
    """How to deliver; without `streaming`, options that pace a stream are refused.

    Raises:
        InvalidRequestError: an option is out of range, or has no meaning for this call.
    """
    refuse_bad_values(delivery, "delivery")
    violations = _range_violations(delivery) if streaming else _streamed_violations(delivery)
    if violations:
        raise InvalidRequestError(violations)
    return Delivery(
        include_text=delivery.include_text if delivery.HasField("include_text") else True,
        include_token_bytes=delivery.include_token_bytes,
        include_cache_tokens=delivery.include_cache_tokens,
        max_tokens_per_message=min(delivery.max_tokens_per_message or MESSAGE_TOKENS_LIMIT, MESSAGE_TOKENS_LIMIT),
        max_delay_seconds=_seconds(delivery.max_delay),
        heartbeat_seconds=_heartbeat_seconds(delivery),
        partial_at_deadline=delivery.deadline_policy == delivery_pb2.DEADLINE_POLICY_PARTIAL_RESULT,
        durable=delivery.durable,
    )


def _streamed_violations(delivery: delivery_pb2.DeliveryOptions) -> list[FieldViolation]:
    set_fields = {field.name for field, _ in delivery.ListFields()}
    return [
        FieldViolation(f"delivery.{name}", "has no meaning for Complete, which answers once")
        for name in STREAMED
        if name in set_fields
    ]


def _range_violations(delivery: delivery_pb2.DeliveryOptions) -> list[FieldViolation]:
    found = []
    if delivery.HasField("max_tokens_per_message") and delivery.max_tokens_per_message == 0:
        found.append(FieldViolation("delivery.max_tokens_per_message", "must be at least 1"))
    if not 0 <= nanoseconds(delivery.max_delay) <= MAX_DELAY_SECONDS * NANOS_PER_SECOND:
        allowed = f"must be from 0 to {MAX_DELAY_SECONDS:g} s"
        found.append(FieldViolation("delivery.max_delay", f"{allowed}, got {shown(delivery.max_delay)}"))
    interval_nanos = nanoseconds(delivery.heartbeat_interval)
    lowest, highest = MIN_HEARTBEAT_SECONDS * NANOS_PER_SECOND, MAX_HEARTBEAT_SECONDS * NANOS_PER_SECOND
    if interval_nanos != 0 and not lowest <= interval_nanos <= highest:
        allowed = f"must be 0 or from {MIN_HEARTBEAT_SECONDS:g} to {MAX_HEARTBEAT_SECONDS:g} s"
        found.append(
            FieldViolation("delivery.heartbeat_interval", f"{allowed}, got {shown(delivery.heartbeat_interval)}")
        )
    return found


def _heartbeat_seconds(delivery: delivery_pb2.DeliveryOptions) -> float | None:
    if not delivery.HasField("heartbeat_interval"):
        return DEFAULT_HEARTBEAT_SECONDS
    return _seconds(delivery.heartbeat_interval) or None


def _seconds(duration: Duration) -> float:
    return nanoseconds(duration) / NANOS_PER_SECOND
