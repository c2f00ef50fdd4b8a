"""One kept prefix as one file; see `engine.state.state_file`. Touches no array. Units: tokens and bytes."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.contracts.snapshot import usable_tokens
from engine.state.state_file import (
    FileFormat,
    StateHeader,
    read_state_file,
    read_state_header,
    unreadable_header,
    write_state_file,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from engine.contracts.snapshot import LayerSnapshot
    from engine.state.state_file import HostTensor

FORMAT: Final = FileFormat("mlx-stream prefix", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRecord:
    """What a file says of itself. `layers` hold no arrays; `identity` names the configuration that wrote it."""

    identity: str
    namespace: str
    key: bytes
    layers: tuple[LayerSnapshot, ...]

    def serves(self, tokens: int) -> bool:
        """Whether a row that shares the first `tokens` can begin with all of them."""
        return usable_tokens(self.layers, tokens) == tokens


def write_prefix_file(path: Path, record: PrefixRecord, layers: Sequence[Mapping[str, HostTensor]]) -> None:
    """Write an entry whose `layers` hold tensors by name. Raises what `write_state_file` raises."""
    facts = {
        "identity": record.identity,
        "namespace": record.namespace,
        "tokens": base64.b64encode(record.key).decode("ascii"),
    }
    write_state_file(path, FORMAT, StateHeader(facts=facts, layers=record.layers), layers)


def read_prefix_record(path: Path) -> PrefixRecord:
    """What the header of `path` says, verified. Raises what `read_state_header` raises."""
    return _record(path, read_state_header(path, FORMAT))


def read_prefix_file(path: Path) -> tuple[PrefixRecord, list[dict[str, HostTensor]]]:
    """The whole entry, every byte verified. Raises what `read_state_header` raises."""
    header, layers = read_state_file(path, FORMAT)
    return _record(path, header), layers


def _record(path: Path, header: StateHeader) -> PrefixRecord:
    try:
        return PrefixRecord(
            identity=header.facts["identity"],
            namespace=header.facts["namespace"],
            key=base64.b64decode(header.facts["tokens"], validate=True),
            layers=header.layers,
        )
    except (KeyError, ValueError, binascii.Error) as error:
        raise unreadable_header(path, error) from None
