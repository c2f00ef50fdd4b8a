"""What a token log says of its generation: whose it is, what was asked, and with what it runs."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass
from typing import Any

from engine.contracts.durability import DurableIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The first record of a log. `request` is a serialized GenerateRequest whose prompt is token ids.

    `seed` is the one in effect, and `key` the one under which the store files the generation.
    """

    generation_id: str
    request_id: str
    caller: str
    key: str
    seed: int
    seed_was_explicit: bool
    priority: int
    identity: DurableIdentity
    request: bytes

    def encode(self) -> bytes:
        """As JSON."""
        values = asdict(self) | {"request": base64.b64encode(self.request).decode("ascii")}
        return json.dumps(values, sort_keys=True).encode("ascii")

    @classmethod
    def decode(cls, payload: bytes) -> LogHeader:
        """Read what `encode` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            values: dict[str, Any] = json.loads(payload)
            identity = DurableIdentity(**values.pop("identity"))
            request = base64.b64decode(values.pop("request"), validate=True)
            return cls(**values, identity=identity, request=request)
        except (TypeError, AttributeError, KeyError, binascii.Error) as error:
            raise ValueError(f"no header of a token log: {type(error).__name__}") from None
