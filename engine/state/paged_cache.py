"""One layer of one row in paged storage; see `engine.state.block_pool`. Units: tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.contracts.snapshot import LayerSnapshot
from engine.ops.copying import true_copy
from engine.state.held_keys import CodedKeys
from engine.state.snapshots import PAGED, block_name, check_cut, refuse_empty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.state.block_pool import Block, BlockPool
    from engine.state.plain_codec import PlainCodec


class PagedKvCache:
    """Blocks in order, and how many tokens of each count."""

    __slots__ = ("_blocks", "_codec", "_pool", "_touched", "_used")

    def __init__(self, pool: BlockPool, codec: PlainCodec) -> None:
        """Start without a block; `codec` attends over what the blocks join to."""
        self._pool = pool
        self._codec = codec
        self._blocks: list[Block] = []
        self._used: list[int] = []
        self._touched = 0

    @property
    def offset(self) -> int:
        """Tokens held."""
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks; those that rows share count for each in equal parts."""
        return sum(block.array.nbytes // block.holders for block in self._blocks)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, softcap: float = 0.0
    ) -> mx.array:
        """Append `keys`, `values` [1, Hkv, L, D], then attend with `queries` [1, H, L, D], causally."""
        return self.append(keys, values).attend(queries, scale=scale, softcap=softcap)

    def append(self, keys: mx.array, values: mx.array) -> CodedKeys:
        """See `engine.contracts.cache.Cache.append`."""
        self._append(mx.concatenate([keys, values], axis=1))
        pieces = [block.array[:, :, :used] for block, used in zip(self._blocks, self._used, strict=True)]
        joined = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)
        return CodedKeys(self._codec, [joined[:, : keys.shape[1]], joined[:, keys.shape[1] :]])

    @property
    def is_seated(self) -> bool:
        """Never: the row attends by itself."""
        return False

    def place_for(self, tokens: int) -> None:
        """Nowhere: the row attends by itself."""

    def advance(self, tokens: int) -> None:
        """Count tokens; no table writes into blocks, so this is never called."""
        raise NotImplementedError(f"{tokens} tokens were written past paged storage")

    def arrays(self) -> Sequence[mx.array]:
        """The arrays that the last append has changed."""
        return [block.array for block in self._blocks[self._touched :]]

    def maintain(self) -> None:
        """Nothing to do: blocks keep their form."""

    @property
    def trimmable_tokens(self) -> int:
        """All."""
        return self.offset

    def trim(self, tokens: int) -> None:
        """Forget the newest `tokens`, and give back the blocks that held nothing else."""
        while tokens > 0 and self._blocks:
            cut = min(tokens, self._used[-1])
            self._used[-1] -= cut
            tokens -= cut
            if not self._used[-1]:
                self._drop_last()

    def snapshot(self) -> LayerSnapshot:
        """The blocks themselves, sealed. See `engine.contracts.cache.Cache.snapshot`."""
        refuse_empty(self.offset)
        for block, used in zip(self._blocks, self._used, strict=True):
            self._pool.seal(block, used)
        arrays = {block_name(index): block.array for index, block in enumerate(self._blocks)}
        mx.eval(arrays)
        return LayerSnapshot(
            kind=PAGED, tokens=self.offset, facts={"used": ",".join(map(str, self._used))}, arrays=arrays
        )

    def added_since(self, tokens: int) -> LayerSnapshot:
        """One block with a copy of what was appended. See `engine.contracts.cache.Cache.added_since`."""
        refuse_empty(self.offset)
        start = tokens if tokens < self.offset else 0
        pieces = [block.array[:, :, :used] for block, used in zip(self._blocks, self._used, strict=True)]
        added = true_copy(mx.concatenate(pieces, axis=2)[:, :, start:])
        mx.eval(added)
        facts = {"used": str(self.offset - start)}
        return LayerSnapshot(kind=PAGED, start=start, tokens=self.offset, facts=facts, arrays={block_name(0): added})

    def restore(self, snapshot: LayerSnapshot, tokens: int) -> None:
        """Hold the snapshot's own blocks. See `engine.contracts.cache.Cache.restore`."""
        check_cut(snapshot, PAGED, tokens)
        used = [int(count) for count in str(snapshot.facts["used"]).split(",")]
        for name, count in zip(sorted(snapshot.arrays), used, strict=True):
            kept = min(count, tokens - self.offset)
            if kept:
                self._blocks.append(self._pool.adopt(snapshot.arrays[name]))
                self._used.append(kept)
        self._touched = len(self._blocks)

    def close(self) -> None:
        """Give the blocks back; again is harmless."""
        while self._blocks:
            self._drop_last()

    def _append(self, joined: mx.array) -> None:
        self._touched = max(0, len(self._blocks) - 1)
        written = 0
        while written < joined.shape[2]:
            if not self._blocks or self._blocks[-1].sealed or self._used[-1] == self._pool.block_tokens:
                self._blocks.append(self._pool.open(joined))
                self._used.append(0)
            used = self._used[-1]
            stretch = joined[:, :, written : written + self._pool.block_tokens - used]
            self._pool.write(self._blocks[-1], used, stretch)
            self._used[-1] += stretch.shape[2]
            written += stretch.shape[2]

    def _drop_last(self) -> None:
        self._used.pop()
        self._pool.release(self._blocks.pop())
