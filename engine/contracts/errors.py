"""The error tree: every failure that may leave the engine, as one class with fields.

    EngineError
    ├── ConfigurationError           a setting of the operator that cannot be honoured on this machine
    ├── InvalidRequestError          a field out of range or an impossible combination
    │   ├── PromptTooLongError       prompt (or prompt + forced output) beyond the context
    │   │   └── PromptOverLimitError beyond what the operator allows
    │   └── ChatTemplateError        the template is missing, raised, or ran past its bounds
    ├── UnsupportedOptionError       a known option that this build or graph cannot honour
    ├── NotFoundError                a model, adapter or generation that is not there
    ├── DuplicateRequestError        the request id is live already
    ├── OverloadedError              a bounded resource is full; carries numbers and a pushback
    │   └── QueueTimeError           nobody left in time to make room
    ├── InsufficientMemoryError      one request's state could never fit; carries numbers
    ├── UnavailableError             loading, draining, stopped: try again later
    ├── EngineFailedError            the engine thread died; everything in flight is lost
    ├── GenerationFailedError        one generation failed through our fault; carries a correlation id
    ├── GenerationAborted            not a fault: the abort signal was raised; carries the reason
    ├── DurabilityError              a durable generation cannot go on from what is kept of it
    │   ├── CheckpointMismatchError  it was made with another model, adapter or form of storage
    │   ├── CheckpointDamagedError   what is kept of it is damaged
    │   └── ResumePointGoneError     the point to continue from is no longer kept
    ├── ArtifactError                model files cannot be used
    │   ├── MissingArtifactError     a file or a part of one is absent
    │   ├── CorruptArtifactError     a file contradicts itself or is cut
    │   └── UnsupportedArtifactError a well-formed file of a kind that we do not read
    │       └── MismatchedArtifactError sound, and made for another model
    └── GraphContractError           a graph's declaration and its operations disagree

Messages are written for callers: they name the field, the file (at most with its own folder's name) and the numbers,
and hold no prompt text, no exception text of a library and no path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.contracts.results import AbortReason

MAX_VIOLATIONS: Final = 8
"""Most bad fields that one refusal names: a long list of bad values must not become a long answer."""

MAX_NAME_LENGTH: Final = 200
"""Most characters that a message repeats of a name that a caller has made up."""


def _shown(name: str) -> str:
    """`name` in quotes, cut first: a long one costs no more than a short one."""
    return repr(name if len(name) <= MAX_NAME_LENGTH else name[:MAX_NAME_LENGTH] + "…")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its dotted path in the public schema, and what is wrong with it."""

    field: str
    description: str


class EngineError(Exception):
    """Root of the tree. `str(error)` is safe to show to a caller."""

    reason = "ENGINE_ERROR"


class ConfigurationError(EngineError):
    """A setting cannot be honoured here; the engine does not start. `setting` is its name, such as "blas"."""

    reason = "CONFIGURATION"

    def __init__(self, setting: str, detail: str) -> None:
        self.setting = setting
        self.detail = detail
        super().__init__(f"{setting}: {detail}")


class InvalidRequestError(EngineError):
    """The request can never succeed as it stands. `violations` names the first bad fields; the rest are counted."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Iterable[FieldViolation]) -> None:
        found = tuple(violations)
        self.violations = found[:MAX_VIOLATIONS]
        self.unnamed_violations = len(found) - len(self.violations)
        super().__init__(self.told())

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequestError:
        """Build the error for a single field."""
        return InvalidRequestError([FieldViolation(field, description)])

    def told(self) -> str:
        """All of it in one line."""
        texts = [f"{violation.field}: {violation.description}" for violation in self.violations]
        return "; ".join([*texts, f"and {self.unnamed_violations} more"] if self.unnamed_violations else texts)


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for one new token. Units: tokens."""

    reason = "PROMPT_TOO_LONG"

    def __init__(self, *, prompt_tokens: int, context_length: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length
        super().__init__([FieldViolation("prompt", self._described())])

    def _described(self) -> str:
        return f"{self.prompt_tokens} tokens leave no room for output in a context of {self.context_length} tokens"


class PromptOverLimitError(PromptTooLongError):
    """The prompt has more tokens than the operator allows this caller: `context_length` is that bound."""

    def _described(self) -> str:
        return f"at most {self.context_length} tokens are allowed here, got {self.prompt_tokens}"


class ChatTemplateError(InvalidRequestError):
    """The chat template refused the conversation, or cannot be used at all."""

    reason = "CHAT_TEMPLATE"

    def __init__(self, description: str, *, field: str = "prompt.chat") -> None:
        super().__init__([FieldViolation(field, description)])


class UnsupportedOptionError(EngineError):
    """A known option, message or RPC that cannot be honoured here. `option` is its schema path."""

    reason = "UNSUPPORTED_OPTION"

    def __init__(self, option: str, why: str) -> None:
        self.option = option
        self.why = why
        super().__init__(f"{option} is not supported: {why}")


class NotFoundError(EngineError):
    """Nothing of this kind has this name. `kind` is a noun such as "model" or "generation".

    `known` are the names that would do, where they can be told.
    """

    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str, known: Iterable[str] = ()) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        choices = f"; known: {', '.join(self.known)}" if self.known else ""
        super().__init__(f"no {kind} named {_shown(name)}{choices}")


class DuplicateRequestError(EngineError):
    """The caller already has a live generation under this request id."""

    reason = "DUPLICATE_REQUEST_ID"

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request id {_shown(request_id)} is in use by a live generation")


class OverloadedError(EngineError):
    """A bounded resource is full. `retry_after_seconds` is the pushback for the caller."""

    reason = "OVERLOADED"

    def __init__(self, resource: str, *, limit: int, used: int, retry_after_seconds: float) -> None:
        self.resource = resource
        self.limit = limit
        self.used = used
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{resource}: {used} of {limit} taken; retry after {retry_after_seconds:g} s")


class QueueTimeError(OverloadedError):
    """The generation has waited in the queue for as long as any may. Units: whole seconds, rounded up."""

    def __init__(self, *, limit_seconds: float, retry_after_seconds: float) -> None:
        whole_seconds = math.ceil(limit_seconds)
        super().__init__(
            "the time in the queue", limit=whole_seconds, used=whole_seconds, retry_after_seconds=retry_after_seconds
        )


class InsufficientMemoryError(EngineError):
    """One request's state could never fit beside the weights, even alone; `images_bytes` of it are for images."""

    reason = "INSUFFICIENT_MEMORY"

    def __init__(self, *, needed_bytes: int, budget_bytes: int, images_bytes: int = 0) -> None:
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.images_bytes = images_bytes
        share = f", {images_bytes} of them for the prompt's images" if images_bytes else ""
        advice = "ask for fewer tokens"
        if images_bytes:
            advice = "ask for fewer images or tokens" if images_bytes < budget_bytes else "leave images out"
        super().__init__(
            f"prompt and max_tokens need {needed_bytes} bytes of state and workspace{share}, and at most "
            f"{budget_bytes} bytes can be held; {advice}"
        )


class UnavailableError(EngineError):
    """The service cannot take work now, and may later. `state` is "loading", "draining" or "stopped"."""

    reason = "UNAVAILABLE"

    def __init__(self, state: str, message: str | None = None) -> None:
        self.state = state
        super().__init__(message or f"the engine is {state}")


class EngineFailedError(EngineError):
    """The engine thread has died; every generation in flight ends with this."""

    reason = "ENGINE_FAILED"

    def __init__(self, correlation_id: str) -> None:
        self.correlation_id = correlation_id
        super().__init__(f"the engine has failed (correlation id {correlation_id})")


class GenerationFailedError(EngineError):
    """One generation failed through our fault. The log holds the cause under `correlation_id`."""

    reason = "GENERATION_FAILED"

    def __init__(self, correlation_id: str) -> None:
        self.correlation_id = correlation_id
        super().__init__(f"the generation failed (correlation id {correlation_id})")


class GenerationAborted(EngineError):  # noqa: N818 - an outcome that was asked for, not a fault
    """The abort signal was raised; `abort_reason` says by what."""

    reason = "ABORTED"

    def __init__(self, abort_reason: AbortReason) -> None:
        self.abort_reason = abort_reason
        super().__init__(f"the generation was aborted: {abort_reason.value}")


class DurabilityError(EngineError):
    """A durable generation cannot go on. `generation_id` names it."""

    reason = "DURABILITY"

    def __init__(self, generation_id: str, detail: str) -> None:
        self.generation_id = generation_id
        super().__init__(f"generation {generation_id} cannot go on: {detail}")


class CheckpointMismatchError(DurabilityError):
    """It was made with something that is not served now. `differences` are names such as "weights" or "adapters"."""

    reason = "CHECKPOINT_MISMATCH"

    def __init__(self, generation_id: str, differences: Iterable[str]) -> None:
        self.differences = ",".join(differences)
        super().__init__(generation_id, f"it was made with other {self.differences.replace(',', ', ')}")


class CheckpointDamagedError(DurabilityError):
    """No checkpoint of it is whole. `file` is the name of one that is damaged."""

    reason = "CHECKPOINT_DAMAGED"

    def __init__(self, generation_id: str, file: str) -> None:
        self.file = file
        super().__init__(generation_id, f"what is kept of it is damaged ({file})")


class ResumePointGoneError(DurabilityError):
    """The point to continue from is not kept: its time has run out, or the generation never came so far."""

    reason = "RESUME_POINT_GONE"

    def __init__(self, generation_id: str, detail: str = "it is no longer kept") -> None:
        super().__init__(generation_id, detail)


class ArtifactError(EngineError):
    """Model files cannot be used. `file` is a file name, at most with the name of its own folder."""

    reason = "ARTIFACT"

    def __init__(self, file: str, detail: str) -> None:
        self.file = file
        self.detail = detail
        super().__init__(f"{file}: {detail}")


class MissingArtifactError(ArtifactError):
    """A file, a tensor or a part of the metadata is absent."""

    reason = "ARTIFACT_MISSING"


class CorruptArtifactError(ArtifactError):
    """A file is cut, or contradicts its own header."""

    reason = "ARTIFACT_CORRUPT"


class UnsupportedArtifactError(ArtifactError):
    """A well-formed artifact of a kind, type or architecture that we do not read."""

    reason = "ARTIFACT_UNSUPPORTED"


class MismatchedArtifactError(UnsupportedArtifactError):
    """A sound artifact that does not fit the model it is to be used with."""


class GraphContractError(EngineError):
    """A graph does not provide what it declares, or its ABI does not match the method."""

    reason = "GRAPH_CONTRACT"
