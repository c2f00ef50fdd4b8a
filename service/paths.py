"""The engine's names of fields, in terms of the request that a caller has sent. The one place that translates them.

The engine speaks of a request as its contracts know it: below "prompt" stands one of three kinds, and a constraint
is one object. In the schema both are oneofs, which have no level of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.contracts.errors import FieldViolation, InvalidRequestError, UnsupportedOptionError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from engine.contracts.errors import EngineError

# What a prompt as a whole is called, by the arm that holds it.
_WHOLE_PROMPTS: Final = {"text": "text.text", "tokens": "tokens.ids", "chat": "chat"}


def in_schema_terms(error: EngineError, request: Message) -> EngineError:
    """`error` with the fields of `request` under their schema paths."""
    if isinstance(error, UnsupportedOptionError):
        path = schema_path(error.option, request)
        return error if path == error.option else UnsupportedOptionError(path, error.why)
    if not isinstance(error, InvalidRequestError):
        return error
    violations = tuple(FieldViolation(schema_path(one.field, request), one.description) for one in error.violations)
    return error if violations == error.violations else _with_violations(error, violations)


def schema_path(field: str, request: Message) -> str:
    """The path in the schema of what the engine calls `field`."""
    if field == "prompt":
        arm = _arm(request, "prompt")
        return _WHOLE_PROMPTS[arm] if arm is not None else field
    if field == "prompt.text":
        return "text.text" if _has_oneof(request, "prompt") else "text"
    if field.startswith("prompt."):
        return field.removeprefix("prompt.")
    if field == "options.constraint":
        return f"options.{_arm(request.options, 'constraint')}"  # type: ignore[attr-defined]
    if field.startswith("options.eos_token_ids["):
        return field.replace("options.eos_token_ids[", "options.eos_token_ids.ids[")
    return field


def _arm(message: Message, oneof: str) -> str | None:
    return message.WhichOneof(oneof) if _has_oneof(message, oneof) else None


def _has_oneof(message: Message, oneof: str) -> bool:
    return oneof in message.DESCRIPTOR.oneofs_by_name


def _with_violations(error: InvalidRequestError, violations: tuple[FieldViolation, ...]) -> InvalidRequestError:
    """A twin of `error`, of its class and with its fields, that tells `violations`."""
    twin = type(error).__new__(type(error))
    for name, value in {**vars(error), "violations": violations}.items():
        setattr(twin, name, value)
    twin.args = (twin.told(),)
    return twin
