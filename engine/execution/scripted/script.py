"""The script of a scripted engine: a JSON file of scenarios, read and checked once. No row and no clock is here.

A prompt's tokens are its bytes. What a scenario says are pieces: each distinct one is a token of its own. Pauses are
seconds. The format is described in `clients/conformance/README.md`.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engine.contracts.errors import ConfigurationError, NotFoundError
from engine.contracts.options import OptionDefaults
from engine.execution.scripted.fields import Fields, ScriptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

END_ID: Final = 256
"""The token that ends a generation; those below it are bytes."""
FIRST_PIECE_ID: Final = 257
MOST_MOMENTS: Final = 1_000_000
MOST_PIECE_BYTES: Final = 1024 * 1024
MOST_SCRIPT_BYTES: Final = 64 * 1024 * 1024
DEFAULT_CONTEXT_TOKENS: Final = 8 * 1024 * 1024
_CHOICE: Final = re.compile(rb"\[\[([\w.-]+)\]\]")


class Failure(enum.Enum):
    """What a scenario may do in place of a token."""

    GENERATION = "generation"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Moment:
    """After a pause: a token, or a failure in its place."""

    pause_seconds: float
    token: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Revision:
    """After a pause: a canvas, which `ends` its block if it is the last one of it."""

    pause_seconds: float
    tokens: tuple[int, ...]
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The first `times` attempts of one request are refused; with `retry_after_seconds` as for an overload."""

    times: int
    retry_after_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What one generation does. The last moment is the end; where there are `revisions`, the last one holds it."""

    name: str
    moments: tuple[Moment, ...]
    revisions: tuple[Revision, ...] = ()
    prefill_seconds: float = 0.0
    refusal: Refusal | None = None

    def moment(self, index: int) -> Moment:
        """What happens at place `index` of the completion; the end, for ever, after the last."""
        return self.moments[min(index, len(self.moments) - 1)]

    def revision(self, index: int) -> Revision:
        """The canvas after `index` others; the last one, for ever, after it."""
        return self.revisions[min(index, len(self.revisions) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A whole file. `pieces` are the bytes of the tokens from `FIRST_PIECE_ID` on. All scenarios revise, or none.

    Where it `is_durable`, generations can be: that takes the engine's own files on disk, and so mlx.
    """

    model_name: str
    context_tokens: int
    defaults: OptionDefaults
    scenarios: Mapping[str, Scenario]
    pieces: tuple[bytes, ...]
    fingerprint: str
    revises: bool = False
    is_durable: bool = False

    @property
    def canvas_tokens(self) -> int:
        """Positions of the longest canvas."""
        revisions = (revision for scenario in self.scenarios.values() for revision in scenario.revisions)
        return max((len(revision.tokens) for revision in revisions), default=0)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id."""
        return FIRST_PIECE_ID + len(self.pieces)

    def scenario_of(self, prompt: bytes) -> Scenario:
        """The scenario that `prompt` names last, in double brackets; without a name "default", else the first.

        Raises:
            NotFoundError: there is none of this name.
        """
        names = _CHOICE.findall(prompt)
        if not names:
            return self.scenarios.get("default") or next(iter(self.scenarios.values()))
        name = names[-1].decode()
        if name not in self.scenarios:
            raise NotFoundError("scenario", name, self.scenarios)
        return self.scenarios[name]


def read_script(path: Path) -> Script:
    """Read a script.

    Raises:
        ConfigurationError: the file cannot be read, or is no script; the message names the place.
    """
    try:
        content = path.read_bytes()
        if len(content) > MOST_SCRIPT_BYTES:
            raise ScriptError(f"larger than {MOST_SCRIPT_BYTES} bytes")
        return parse_script(content)
    except OSError as error:
        raise ConfigurationError("engine", f"{path.name}: {error.strerror}") from None
    except ScriptError as error:
        raise ConfigurationError("engine", f"{path.name}: {error}") from None


def parse_script(content: bytes) -> Script:
    """The script that `content` holds.

    Raises:
        ScriptError: it is none.
    """
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ScriptError(f"not JSON: {error}") from None
    fields = Fields(document, "the script")
    model, scenarios = fields.group("model"), fields.group("scenarios")
    fields.finish()
    vocabulary = _Vocabulary()
    read = {name: _scenario(name, scenarios.group(name), vocabulary) for name in scenarios.names()}
    if not read:
        raise ScriptError("scenarios: at least one is needed")
    revising = {name for name, scenario in read.items() if scenario.revisions}
    if revising and len(revising) < len(read):
        raise ScriptError("scenarios: either all have blocks, or none")
    script = Script(
        model_name=model.text("name", "scripted"),
        context_tokens=model.count("context_tokens", DEFAULT_CONTEXT_TOKENS, least=2),
        defaults=_defaults(model.group("defaults")),
        scenarios=read,
        pieces=tuple(vocabulary.pieces),
        fingerprint="sha256:" + hashlib.sha256(content).hexdigest(),
        revises=bool(revising),
        is_durable=model.flag("durable"),
    )
    model.finish()
    return script


@dataclass(slots=True)
class _Vocabulary:
    """Numbers pieces in the order in which they come; a piece of one byte is that byte."""

    pieces: dict[bytes, int] = field(default_factory=dict)

    def token(self, piece: bytes) -> int:
        if len(piece) == 1:
            return piece[0]
        return self.pieces.setdefault(piece, FIRST_PIECE_ID + len(self.pieces))


def _defaults(fields: Fields) -> OptionDefaults:
    defaults = OptionDefaults(
        max_tokens=fields.optional_count("max_tokens", least=1),
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p"),
        top_k=fields.optional_count("top_k"),
    )
    fields.finish()
    return defaults


def _scenario(name: str, fields: Fields, vocabulary: _Vocabulary) -> Scenario:
    moments: list[Moment] = []
    pause_seconds = 0.0
    for place, entry in enumerate(fields.entries("say")):
        more, pause_seconds = _moments(entry, f"{fields.where}.say[{place}]", vocabulary, pause_seconds)
        moments += more
        if len(moments) > MOST_MOMENTS:
            raise ScriptError(f"{fields.where}.say: more than {MOST_MOMENTS} tokens")
    refuse = fields.group("refuse")
    scenario = Scenario(
        name=name,
        moments=(*moments, Moment(pause_seconds, END_ID)),
        revisions=tuple(_revisions(fields, vocabulary)),
        prefill_seconds=fields.number("prefill_seconds", 0.0),
        refusal=_refusal(refuse) if refuse.names() else None,
    )
    fields.finish()
    return scenario


def _revisions(fields: Fields, vocabulary: _Vocabulary) -> Iterator[Revision]:
    """Every canvas of every block, in order; the end follows the last one."""
    blocks, every_seconds = fields.entries("blocks"), fields.number("every_seconds", 0.0)
    for place, block in enumerate(blocks):
        where = f"{fields.where}.blocks[{place}]"
        if not isinstance(block, list) or not block or not all(isinstance(one, list) and one for one in block):
            raise ScriptError(f"{where}: must be a list of canvases, each a list of texts")
        for count, canvas in enumerate(block, start=1):
            if not all(isinstance(text, str) and text for text in canvas):
                raise ScriptError(f"{where}: a canvas holds texts")
            tokens = tuple(vocabulary.token(text.encode()) for text in canvas)
            ends = count == len(block)
            yield Revision(every_seconds, (*tokens, END_ID) if ends and place == len(blocks) - 1 else tokens, ends)


def _refusal(fields: Fields) -> Refusal:
    kind = fields.choice("with", ("overloaded", "unavailable"))
    refusal = Refusal(
        times=fields.count("times", 1),
        retry_after_seconds=fields.number("retry_after_seconds", 0.1) if kind == "overloaded" else None,
    )
    fields.finish()
    return refusal


def _moments(entry: Any, where: str, vocabulary: _Vocabulary, pause: float) -> tuple[list[Moment], float]:
    """What `entry` adds after a pause that is still owed, and the pause that it leaves to the next."""
    if isinstance(entry, str):
        entry = {"text": entry}
    fields = Fields(entry, where)
    if "silence_seconds" in fields.names():
        pause += fields.number("silence_seconds", 0.0)
        fields.finish()
        return [], pause
    if "fail" in fields.names():
        failure = Failure(fields.choice("fail", tuple(kind.value for kind in Failure)))
        fields.finish()
        return [Moment(pause, END_ID, failure)], 0.0
    token = vocabulary.token(_piece(fields))
    times, every = fields.count("times", 1), fields.number("every_seconds", 0.0)
    fields.finish()
    if times > MOST_MOMENTS:
        raise ScriptError(f"{where}.times: at most {MOST_MOMENTS}")
    return [Moment(pause + every, token), *[Moment(every, token)] * (times - 1)][:times], pause if times == 0 else 0.0


def _piece(fields: Fields) -> bytes:
    if "bytes" in fields.names():
        written = fields.text("bytes", "")
        try:
            piece = bytes.fromhex(written)
        except ValueError:
            raise ScriptError(f"{fields.where}.bytes: not hexadecimal") from None
    else:
        piece = fields.text("text", "").encode()
    if not piece:
        raise ScriptError(f"{fields.where}: needs a text, bytes, silence_seconds or fail")
    copies = fields.count("copies", 1, least=1)
    if copies * len(piece) > MOST_PIECE_BYTES:
        raise ScriptError(f"{fields.where}.copies: a piece has at most {MOST_PIECE_BYTES} bytes")
    return piece * copies
