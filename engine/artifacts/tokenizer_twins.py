"""Second readings of one tokenizer: the same vocabulary and rules, but other control tokens are read from text.

A twin shares the model of the original, so it costs about a millisecond and almost no memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def encode_ids(pipeline: Pipeline, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. The batch call is used for one text because it alone frees the interpreter meanwhile."""
    ids: list[int] = pipeline.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def plain_twin(pipeline: Pipeline, added: Mapping[int, AddedToken]) -> Pipeline:
    """A twin that reads no control token from text. `added` is by id, ascending."""
    twin = Pipeline(pipeline.model)
    twin.normalizer = pipeline.normalizer
    twin.pre_tokenizer = pipeline.pre_tokenizer
    twin.post_processor = pipeline.post_processor
    twin.add_tokens(list(added.values()))
    if any(twin.token_to_id(token.content) != id_ for id_, token in added.items()):
        twin = Pipeline.from_str(pipeline.to_str())
    twin.encode_special_tokens = True
    return twin


class MarkedTwin:
    """A twin that reads control tokens only where they are written between two `marker` characters.

    Whoever chooses a marker that no text holds can thus say which control tokens are meant, and encode in one go.
    """

    def __init__(
        self, pipeline: Pipeline, added: Mapping[int, AddedToken], marker: str, *, exact: bool = False
    ) -> None:
        """Read `pipeline` anew. With `exact`, every control token is found before normalisation."""
        self._exact = None if exact else functools.partial(MarkedTwin, pipeline, added, marker, exact=True)
        self._pipeline = plain_twin(pipeline, added)
        self._written = {id_: f"{marker}{token.content}{marker}" for id_, token in added.items() if token.special}
        self._pipeline.add_tokens(
            [
                AddedToken(
                    written,
                    special=False,
                    normalized=added[id_].normalized and not exact,
                    lstrip=added[id_].lstrip,
                    rstrip=added[id_].rstrip,
                )
                for id_, written in self._written.items()
            ]
        )
        self._id_of = {self._pipeline.token_to_id(written): id_ for id_, written in self._written.items()}

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Token ids of plain text (str) and control tokens (their ids), joined."""
        text = "".join(part if isinstance(part, str) else self._written[part] for part in parts)
        ids = encode_ids(self._pipeline, text, add_special_tokens=False)
        missed = sum(isinstance(part, int) for part in parts) - sum(map(self._id_of.__contains__, ids))
        if missed and self._exact is not None:  # a normalizer that puts something first hides normalized tokens
            return self._exact().encode(parts)
        return list(map(self._id_of.get, ids, ids))
