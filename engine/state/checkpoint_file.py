"""One checkpoint as files: a head that says everything, and the pieces that it and its forerunners have added.

What tokens add to a state is written once: `checkpoint-N-added` holds what came between the checkpoint before and token
N, and the head `checkpoint-N` names every piece that it needs by the digest of its header. Layers whose state is no row
of tokens lie in the head, whole. So a checkpoint costs what it adds, an older head stays good beside a newer one, and a
piece that was cut, swapped or taken from elsewhere is noticed. Touches no array. Units: tokens and bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.durability import CheckpointFacts, DurableIdentity
from engine.contracts.errors import CorruptArtifactError
from engine.state.prefix_index import key_tokens, token_key
from engine.state.state_file import (
    SUFFIX,
    FileFormat,
    StateHeader,
    read_state_file,
    unreadable_header,
    write_state_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine.contracts.snapshot import LayerSnapshot
    from engine.state.state_file import HostTensor

    Tensors = Mapping[str, HostTensor]

FORMAT: Final = FileFormat("mlx-stream checkpoint", 1)
HEAD: Final = re.compile(r"checkpoint-([0-9]{10})" + re.escape(SUFFIX))
PIECE: Final = re.compile(r"checkpoint-([0-9]{10})-added" + re.escape(SUFFIX))
OURS: Final = "checkpoint-*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file of added tokens. `layers` holds by its index what the file has of a layer, without arrays."""

    name: str
    digest: str
    layers: Mapping[int, LayerSnapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A checkpoint on disk: the name of its head, its tokens, and the pieces that it needs, oldest first."""

    name: str
    state_tokens: int
    pieces: tuple[Piece, ...]

    @property
    def files(self) -> set[str]:
        """Names of all files that it needs."""
        return {self.name, *(piece.name for piece in self.pieces)}

    @property
    def kinds(self) -> dict[int, str]:
        """The kinds of the layers whose pieces reach up to its last token, by their index."""
        return {
            place: layer.kind
            for piece in self.pieces
            for place, layer in piece.layers.items()
            if layer.tokens == self.state_tokens
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """What files hold of one layer: pieces that follow each other, without arrays, and their tensors."""

    pieces: tuple[tuple[LayerSnapshot, Tensors], ...]


def head_name(tokens: int) -> str:
    """The name of the head of a checkpoint of `tokens` tokens."""
    return f"checkpoint-{tokens:010}{SUFFIX}"


def write_checkpoint(
    folder: Path,
    generation_id: str,
    facts: CheckpointFacts,
    layers: Sequence[tuple[LayerSnapshot, Tensors]],
    before: Sequence[Piece],
) -> Head:
    """Write what `layers` have, which adds to the pieces `before`: first the piece, then the head.

    Raises:
        OSError: it cannot be written; what was there before is as good as it was.
        ValueError: the layers do not follow the pieces.
    """
    tokens = facts.state_tokens
    added = {place: layer for place, layer in enumerate(layers) if layer[0].least_tokens < layer[0].tokens}
    pieces: tuple[Piece, ...] = ()
    if added:
        name = f"checkpoint-{tokens:010}-added{SUFFIX}"
        says = {"generation": generation_id, "places": json.dumps(list(added))}
        digest = _write(folder / name, says, added.values())
        spans = {place: _bare(layer) for place, (layer, _) in added.items()}
        pieces = _needed([*before, Piece(name=name, digest=digest, layers=spans)])
    head = Head(name=head_name(tokens), state_tokens=tokens, pieces=pieces)
    whole = {place: layer for place, layer in enumerate(layers) if place not in added}
    says = _said(generation_id, facts, head) | {"places": json.dumps(list(whole)), "state_layers": str(len(layers))}
    _write(folder / head.name, says, whole.values())
    return head


def read_checkpoint(folder: Path, name: str, generation_id: str) -> tuple[CheckpointFacts, Head, list[StoredLayer]]:
    """The checkpoint whose head is `name`, every byte of it verified.

    Raises:
        ArtifactError: a file of it is damaged, or does not belong to it.
        ForeignFileError: a file was written by somebody else, or another version of this module.
        OSError: a file is gone, or cannot be read.
    """
    path = folder / name
    header, tensors = read_state_file(path, FORMAT)
    try:
        facts = _facts(header.facts)
        listed = [(str(piece), str(digest)) for piece, digest in json.loads(header.facts["pieces"])]
        places = _places(header)
        state_layers = int(header.facts["state_layers"])
    except (KeyError, TypeError, ValueError, RecursionError, binascii.Error) as error:
        raise unreadable_header(path, error) from None
    if header.facts.get("generation") != generation_id or name != head_name(facts.state_tokens):
        raise CorruptArtifactError(name, "belongs somewhere else")
    pieces = [_read_piece(folder, piece_name, digest, generation_id) for piece_name, digest in listed]
    found: dict[int, list[tuple[LayerSnapshot, Tensors]]] = {}
    for layers in (*(layers for _, layers in pieces), _by_place(places, header, tensors)):
        for place, layer in layers.items():
            found.setdefault(place, []).append(layer)
    tokens = facts.state_tokens
    stored = [StoredLayer(pieces=_whole(name, found.get(place, []), tokens)) for place in range(state_layers)]
    return facts, Head(name=name, state_tokens=tokens, pieces=tuple(piece for piece, _ in pieces)), stored


def _read_piece(
    folder: Path, name: str, digest: str, generation_id: str
) -> tuple[Piece, dict[int, tuple[LayerSnapshot, Tensors]]]:
    if not PIECE.fullmatch(name):
        raise CorruptArtifactError(name[:80], "is no name of a piece")
    header, tensors = read_state_file(folder / name, FORMAT)
    if header.digest != digest or header.facts.get("generation") != generation_id:
        raise CorruptArtifactError(name, "is not the piece that its checkpoint was made of")
    try:
        places = _places(header)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise unreadable_header(folder / name, error) from None
    layers = _by_place(places, header, tensors)
    return Piece(name=name, digest=digest, layers={place: layer for place, (layer, _) in layers.items()}), layers


def _by_place(
    places: Sequence[int], header: StateHeader, tensors: Sequence[Tensors]
) -> dict[int, tuple[LayerSnapshot, Tensors]]:
    return dict(zip(places, zip(header.layers, tensors, strict=True), strict=True))


def _whole(
    name: str, pieces: Sequence[tuple[LayerSnapshot, Tensors]], tokens: int
) -> tuple[tuple[LayerSnapshot, Tensors], ...]:
    """Those of `pieces` that make up the state of one layer: the newest that begins at token 0, and what follows it."""
    starts = [index for index, (layer, _) in enumerate(pieces) if layer.start == 0]
    used = tuple(pieces[starts[-1] :]) if starts else ()
    ends = [0, *(layer.tokens for layer, _ in used)]
    if not used or [layer.start for layer, _ in used] != ends[:-1] or ends[-1] != tokens:
        raise CorruptArtifactError(name, f"has pieces that do not make up {tokens} tokens")
    return used


def _needed(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces without which the newest tokens cannot be had.

    Raises:
        ValueError: one that is needed is not there.
    """
    wanted: dict[int, int] = {}
    needed: list[Piece] = []
    for piece in reversed(pieces):
        layers = piece.layers.items()
        ends = {place: layer for place, layer in layers if not needed or wanted.get(place) == layer.tokens}
        if ends:
            needed.append(piece)
            wanted |= {place: layer.start for place, layer in ends.items()}
            wanted = {place: start for place, start in wanted.items() if start}
    if wanted:
        raise ValueError(f"layers {sorted(wanted)} add to what is not there")
    return tuple(reversed(needed))


def _write(path: Path, says: Mapping[str, str], layers: Iterable[tuple[LayerSnapshot, Tensors]]) -> str:
    held = list(layers)
    header = StateHeader(facts=says, layers=tuple(_bare(layer) for layer, _ in held))
    return write_state_file(path, FORMAT, header, [tensors for _, tensors in held])


def _bare(layer: LayerSnapshot) -> LayerSnapshot:
    return replace(layer, arrays={})


def _said(generation_id: str, facts: CheckpointFacts, head: Head) -> dict[str, str]:
    return {
        "generation": generation_id,
        "identity": json.dumps(asdict(facts.identity), sort_keys=True),
        "tokens": base64.b64encode(token_key(facts.tokens)).decode("ascii"),
        "prompt_tokens": str(facts.prompt_tokens),
        "seed": str(facts.seed),
        "seed_was_explicit": json.dumps(facts.seed_was_explicit),
        "pieces": json.dumps([[piece.name, piece.digest] for piece in head.pieces]),
    }


def _facts(said: Mapping[str, str]) -> CheckpointFacts:
    return CheckpointFacts(
        identity=DurableIdentity(**json.loads(said["identity"])),
        tokens=key_tokens(base64.b64decode(said["tokens"], validate=True)),
        prompt_tokens=int(said["prompt_tokens"]),
        seed=int(said["seed"]),
        seed_was_explicit=bool(json.loads(said["seed_was_explicit"])),
    )


def _places(header: StateHeader) -> list[int]:
    places: Any = json.loads(header.facts["places"])
    if not all(isinstance(place, int) for place in places) or len(places) != len(header.layers):
        raise ValueError("its layers have no places")
    return list(places)
