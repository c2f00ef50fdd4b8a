"""What asks for a durable generation: a call, or the header that an earlier call has left. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxstream.v1 import generation_pb2
from service.decode import decode_generation
from service.decode_delivery import decode_delivery
from service.durable.header import LogHeader
from service.live import CallFacts

if TYPE_CHECKING:
    from engine.contracts.events import GenerationRequest
    from engine.execution.engine import DurableAcceptance
    from service.decode import GenerationMessage
    from service.delivery import Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableCall:
    """One request, as it was sent and as it was understood."""

    message: GenerationMessage
    request: GenerationRequest
    delivery: Delivery
    facts: CallFacts = field(default_factory=CallFacts)

    @classmethod
    def of_header(cls, header: LogHeader) -> DurableCall:
        """The call that began the generation of `header`."""
        message = generation_pb2.GenerateRequest.FromString(header.request)
        request = decode_generation(message, caller=header.caller, priority=header.priority)
        return cls(
            message=message,
            request=dataclasses.replace(request, request_id=header.request_id),
            delivery=decode_delivery(message.delivery, streaming=True),
            facts=CallFacts(caller=header.caller, looks_up_prefixes=not message.options.cache.bypass),
        )

    def header(self, acceptance: DurableAcceptance, key: str) -> LogHeader:
        """What the log of this call's generation begins with: the prompt as ids, which nobody needs to read again."""
        kept = generation_pb2.GenerateRequest(options=self.message.options, delivery=self.message.delivery)
        kept.tokens.ids.extend(acceptance.prompt_ids)
        return LogHeader(
            generation_id=acceptance.generation_id,
            request_id=acceptance.request_id,
            caller=self.request.caller,
            key=key,
            seed=acceptance.options.seed,
            seed_was_explicit=acceptance.options.seed_was_explicit,
            priority=self.request.priority,
            identity=acceptance.identity,
            request=kept.SerializeToString(),
        )

    def key(self, acceptance: DurableAcceptance) -> str:
        """Under what the store files the generation: the checkpoint key, for this caller and what tokens are told with.

        The checkpoint key is nobody's, and covers what decides the tokens alone.
        """
        options = acceptance.options
        scope = f"{self.request.caller}\n{options.logprobs} {options.top_logprobs}\n{acceptance.checkpoint_key}"
        return hashlib.sha256(scope.encode()).hexdigest()
