"""Text to token ids and back, over one `tokenizers` pipeline, the same wherever the vocabulary came from.

Control tokens (BOS, turn marks and the like) are the added tokens that are flagged special; they contribute no text.
Other added tokens are ordinary text that is always found whole.
Safe to share between threads, and long texts are encoded with the interpreter free. Lengths of bytes are bytes,
positions in text are characters. Not here: chat templates, and reading the files (`tokenizer_files`, `tokenizer_gguf`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from typing import TYPE_CHECKING, Final

from engine.artifacts.detokenizer import StreamingDetokenizer
from engine.artifacts.tokenizer_twins import MarkedTwin, encode_ids, plain_twin
from engine.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer as Pipeline

    from engine.artifacts.detokenizer import DecodingRule

_log = logging.getLogger(__name__)

_NONCHARACTERS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_UNASSIGNED: Final = "\U0010efff"


class Tokenizer:
    """One model's tokenizer. Ids that the vocabulary does not know contribute no text to a stream."""

    def __init__(
        self,
        pipeline: Pipeline,
        rule: DecodingRule,
        *,
        vocab_size: int,
        model_vocab_size: int | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Take over `pipeline`; its truncation and padding are switched off, since they would change prompts.

        `vocab_size` is one more than the greatest id. `model_vocab_size` is how many ids the model takes and gives, by
        default as many; tokens past it are logged once, and no text may need them.
        """
        pipeline.no_truncation()
        pipeline.no_padding()
        self.vocab_size = vocab_size
        self.model_vocab_size = vocab_size if model_vocab_size is None else model_vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._pipeline = pipeline
        self._rule = rule
        self._added = dict(sorted(pipeline.get_added_tokens_decoder().items()))
        self._plain = plain_twin(pipeline, self._added)
        self._twins: dict[str, MarkedTwin] = {}
        self._bytes: dict[int, bytes] = {}
        self.control_token_ids: frozenset[int] = frozenset(id_ for id_, token in self._added.items() if token.special)
        self._log_tokens_past_the_model()

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the whole pipeline: vocabulary, merges, normalizers and added tokens."""
        return hashlib.sha256(self._pipeline.to_str().encode("utf-8")).hexdigest()

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens as they are written, with their ids."""
        return {self._added[token].content: token for token in sorted(self.control_token_ids)}

    @functools.cached_property
    def _unknown_ids(self) -> frozenset[int]:
        """What stands for characters that the vocabulary lacks, where that is a control token."""
        return self.control_token_ids.intersection(encode_ids(self._plain, _UNASSIGNED, add_special_tokens=False))

    @functools.cached_property
    def line_break_ids(self) -> tuple[int, ...]:
        """The token that is a line break and nothing else; none where a line break takes several."""
        ids = encode_ids(self._plain, "\n", add_special_tokens=False)
        return tuple(token for token in ids if self.token_bytes(token) == b"\n")

    @property
    def bos_token(self) -> str:
        """How the BOS token is written; "" when the model has none."""
        return "" if self.bos_token_id is None else self._content(self.bos_token_id) or ""

    @property
    def eos_token(self) -> str:
        """How the first EOS token is written; "" when the model names none."""
        return self._content(self.eos_token_ids[0]) or "" if self.eos_token_ids else ""

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool, field: str = "prompt.text"
    ) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model puts around a text, but no second BOS to one that begins with it.
        `parse_special_tokens` reads control tokens that are written in the text; otherwise they stay text.

        Raises:
            InvalidRequestError: `text` is not valid Unicode, cannot be written without a control token, or needs a
                token that the model does not know.
        """
        require_unicode(text, field)
        pipeline = self._pipeline if parse_special_tokens else self._plain
        ids = encode_ids(pipeline, text, add_special_tokens=add_special_tokens)
        if not parse_special_tokens:
            put_around = pipeline.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
            self._refuse_spelled_controls(ids, put_around, field)
        ids = self.without_doubled_bos(ids) if add_special_tokens else ids
        self._refuse_tokens_past_the_model(ids, field)
        return ids

    def encode_parts(self, parts: Sequence[str | int], *, field: str) -> list[int]:
        """Token ids of a text that alternates between plain text and control token ids.

        The text is encoded in one go, so that the ids equal those of parsing the joined text, except that nothing
        in a plain part is ever read as a control token.

        Raises:
            InvalidRequestError: a part is not valid Unicode, cannot be written without a control token, or needs a
                token that the model does not know.
        """
        texts = [part for part in parts if isinstance(part, str)]
        for text in texts:
            require_unicode(text, field)
        marker = next((mark for mark in _NONCHARACTERS if not any(mark in text for text in texts)), None)
        if marker is None:
            raise InvalidRequestError.of(field, "holds every Unicode noncharacter from U+FDD0 to U+FDEF")
        twin = self._twins.get(marker)
        if twin is None:
            twin = self._twins[marker] = MarkedTwin(self._pipeline, self._added, marker)
        ids = twin.encode(parts)
        self._refuse_spelled_controls(ids, sum(isinstance(part, int) for part in parts), field)
        self._refuse_tokens_past_the_model(ids, field)
        return ids

    def control_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Start, end and id of each control token that is written in `text`."""
        encoding = self._pipeline.encode_batch([text], add_special_tokens=False)[0]
        spans = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self.control_token_ids:
                content = self._added[token].content
                at = text.find(content, start, end)
                spans.append((at, at + len(content), token) if at >= 0 else (start, end, token))
        return spans

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, field: str = "ids") -> str:
        """Text of `ids`, by the rule that streams follow: ids of the model that no token has contribute none.

        Raises:
            InvalidRequestError: an id is outside the model's vocabulary; names the first such position.
        """
        for position, token in enumerate(ids):
            if not 0 <= token < self.model_vocab_size:
                raise InvalidRequestError.of(
                    f"{field}[{position}]", f"token id {token} is outside the vocabulary of {self.model_vocab_size}"
                )
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> StreamingDetokenizer:
        """A detokenizer for one row."""
        return StreamingDetokenizer(self._rule, self.token_bytes if skip_special_tokens else self._written_bytes)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token contributes to a text: none for a control token or an unknown id."""
        known = self._bytes.get(token)
        if known is None:
            known = b"" if token in self.control_token_ids else self._written_bytes(token)
            if 0 <= token < self.vocab_size:
                self._bytes[token] = known
        return known

    def without_doubled_bos(self, ids: list[int]) -> list[int]:
        """`ids`, less the first when it and the second are both BOS."""
        return ids[1:] if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2 else ids

    def _written_bytes(self, token: int) -> bytes:
        content = self._content(token)
        return b"" if content is None else self._rule.token_bytes(content, added=token in self._added)

    def _content(self, token: int) -> str | None:
        return self._pipeline.id_to_token(token) if 0 <= token < self.vocab_size else None

    def _log_tokens_past_the_model(self) -> None:
        if self.vocab_size > self.model_vocab_size:
            count = sum(id_ >= self.model_vocab_size for id_ in self._pipeline.get_vocab().values())
            _log.warning(
                "tokens of the tokenizer that the model does not know: %d, with ids up to %d in a vocabulary of %d; "
                "text that needs one is refused",
                count,
                self.vocab_size - 1,
                self.model_vocab_size,
            )

    def _refuse_tokens_past_the_model(self, ids: list[int], field: str) -> None:
        limit = self.model_vocab_size
        if self.vocab_size > limit and max(ids, default=0) >= limit:
            position = next(position for position, token in enumerate(ids) if token >= limit)
            raise InvalidRequestError.of(
                field, f"token {position} of it has the id {ids[position]}, outside the model's vocabulary of {limit}"
            )

    def _refuse_spelled_controls(self, ids: list[int], allowed: int, field: str) -> None:
        """Some models know a control token as an ordinary piece too; then plain text must not reach it."""
        controls = self.control_token_ids - self._unknown_ids
        if not controls.isdisjoint(ids) and sum(map(controls.__contains__, ids)) > allowed:
            raise InvalidRequestError.of(field, "spells a control token that this model cannot write as plain text")


def require_unicode(text: str, field: str) -> None:
    """Refuse text that UTF-8 cannot express.

    Raises:
        InvalidRequestError: names `field` and the position of the first unpaired surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError.of(field, f"has an unpaired surrogate at character {error.start}") from None
