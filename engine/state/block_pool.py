"""Paged keys and values: a row's layer is a list of blocks, and rows that begin alike hold the same blocks.

A block is sealed once a snapshot or a second row holds it, and never written again; whoever goes on from there writes
into a block of its own, so nobody copies what is shared. A row's last block grows in small steps, which is what makes
rows that share a prefix small. Attention reads blocks in order, joined for one layer at a time: the arithmetic is that
of plain storage, and the price is a copy of the row's keys and values in each step. Units: tokens and bytes.
"""

from __future__ import annotations

import mlx.core as mx

TAIL_TOKENS = 32
"""A block that is being filled grows by so many tokens at a time."""


class Block:
    """Keys, then values, of consecutive tokens of one layer: [1, 2·Hkv, capacity, D]. `holders` counts rows."""

    __slots__ = ("array", "holders", "sealed")

    def __init__(self, array: mx.array, *, sealed: bool) -> None:
        self.array = array
        self.sealed = sealed
        self.holders = 0

    @property
    def capacity(self) -> int:
        """Tokens for which there is room."""
        return self.array.shape[2]


class BlockPool:
    """Knows every block that a row holds, and finds the one behind a snapshot's array. Belongs to the engine thread."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens` is the size of a full block."""
        self.block_tokens = block_tokens
        self._held: set[Block] = set()
        self._sealed: dict[int, Block] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that rows hold, each counted once."""
        return sum(block.array.nbytes for block in self._held)

    def open(self, like: mx.array) -> Block:
        """An empty block of one row for tokens like `like` [1, 2·Hkv, L, D]."""
        block = Block(like[:, :, :0], sealed=False)
        self.hold(block)
        return block

    def adopt(self, array: mx.array) -> Block:
        """The block whose array this is, held once more; a new one when no row holds it."""
        block = self._sealed.get(id(array))
        if block is None:
            block = Block(array, sealed=True)
            self._sealed[id(array)] = block
        self.hold(block)
        return block

    def seal(self, block: Block, used: int) -> None:
        """Let nobody write into `block` again, of which the first `used` tokens count."""
        if not block.sealed:
            if used < block.capacity:
                block.array = mx.contiguous(block.array[:, :, :used])
            block.sealed = True
            self._sealed[id(block.array)] = block

    def hold(self, block: Block) -> None:
        """One more row holds `block`."""
        block.holders += 1
        self._held.add(block)

    def release(self, block: Block) -> None:
        """One row less holds `block`; the last one gives its bytes back."""
        block.holders -= 1
        if not block.holders:
            self._held.remove(block)
            if block.sealed:
                del self._sealed[id(block.array)]

    def write(self, block: Block, used: int, tokens: mx.array) -> None:
        """Write `tokens` [1, 2·Hkv, L, D] behind the first `used` of a block that is not sealed and can grow so far."""
        end = used + tokens.shape[2]
        if end > block.capacity:
            capacity = min(-(-end // TAIL_TOKENS) * TAIL_TOKENS, self.block_tokens)
            room = mx.zeros((*tokens.shape[:2], capacity - used, tokens.shape[3]), dtype=tokens.dtype)
            block.array = mx.concatenate([block.array[:, :, :used], room], axis=2) if used else room
        block.array[:, :, used:end] = tokens
