"""Bounds on what one caller may ask for, as the operator sets them; each refusal names the bound and the number.

Bounds that no operator can raise stand beside the fields that they bound, in `decode_values` and the contracts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.contracts.errors import FieldViolation, InvalidRequestError
from engine.contracts.options import MAX_STOP_SEQUENCES

if TYPE_CHECKING:
    from mlxstream.v1 import options_pb2
    from service.callers import Caller

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
MAX_MESSAGE_SECONDS: Final = 30.0
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_STREAMS: Final = 1024
MAX_CONSTRAINT_BYTES: Final = 64 * 1024
# Constraints that are text of the caller's making; the others are bounded by their number of choices.
TEXT_CONSTRAINTS: Final = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a server takes. None is no bound of its own.

    `max_message_seconds` is for a message to arrive, from the headers of its call or from the message before.
    `max_streams` counts calls in progress, of all callers and (`max_streams_per_caller`) of one. `max_metadata_bytes`
    counts as HTTP/2 does: names, values, and 32 bytes for each pair.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_message_seconds: float = MAX_MESSAGE_SECONDS
    max_metadata_bytes: int = MAX_METADATA_BYTES
    max_streams: int = MAX_STREAMS
    max_streams_per_caller: int | None = None
    max_prompt_tokens: int | None = None
    max_stop_sequences: int = MAX_STOP_SEQUENCES
    max_constraint_bytes: int = MAX_CONSTRAINT_BYTES

    @property
    def max_answer_bytes(self) -> int:
        """Largest whole answer. A bound on requests does not lower it below what every client of ours receives."""
        return max(MAX_MESSAGE_BYTES, self.max_message_bytes)

    def check_options(self, options: options_pb2.GenerateOptions) -> None:
        """Refuse options that are too large, before anything is made of them.

        Raises:
            InvalidRequestError: with every bound that is passed.
        """
        found = []
        if len(options.stop_sequences) > self.max_stop_sequences:
            told = f"at most {self.max_stop_sequences} are allowed, got {len(options.stop_sequences)}"
            found.append(FieldViolation("options.stop_sequences", told))
        kind = options.WhichOneof("constraint")
        if kind in TEXT_CONSTRAINTS:
            size_bytes = len(getattr(options, kind).encode())
            if size_bytes > self.max_constraint_bytes:
                told = f"at most {self.max_constraint_bytes} bytes are allowed, got {size_bytes}"
                found.append(FieldViolation(f"options.{kind}", told))
        if found:
            raise InvalidRequestError(found)

    def prompt_tokens_of(self, caller: Caller) -> int | None:
        """Most tokens of a prompt of `caller`'s."""
        return min((one for one in (self.max_prompt_tokens, caller.max_prompt_tokens) if one is not None), default=None)

    def streams_of(self, caller: Caller) -> int:
        """Most calls of `caller`'s at the same time."""
        own = (self.max_streams, self.max_streams_per_caller, caller.max_streams)
        return min(one for one in own if one is not None)
