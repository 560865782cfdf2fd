"""torch's caching allocator: what is reserved is not what is allocated, and a freed block waits for its like.

After c10/cuda/CUDACachingAllocator.cpp (torch 2.13): blocks of 512 B; requests up to 1 MiB share segments of 2 MiB,
those under 10 MiB segments of 20 MiB, larger ones get their own, rounded to 2 MiB; best fit, split, merged with free
neighbours.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

_BLOCK = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE = 10 << 20
_LARGE_SEGMENT = 20 << 20
_ROUND = 2 << 20

Pool = tuple[object, bool]
"""A stream or a graph's private pool, and whether it is for small blocks."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment."""

    address: int
    nbytes: int
    pool: Pool
    free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def whole_segment(self) -> bool:
        return self.before is None and self.after is None


class Allocator:
    """The memory of one card as torch manages it."""

    def __init__(self, total_bytes: int, taken_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = taken_bytes
        """By the driver's context and by others."""
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self._free: dict[Pool, list[tuple[int, int, Block]]] = {}
        """By size, then address: no two are alike in both."""
        self._next_address = 1 << 40

    @property
    def driver_free(self) -> int:
        """What the driver still has to give: `cudaMemGetInfo` knows nothing of blocks that torch keeps."""
        return self.total_bytes - self.taken_bytes - self.reserved

    def allocate(self, nbytes: int, owner: object) -> Block:
        """A block for so many bytes in the pools of `owner`. Raises torch.OutOfMemoryError."""
        size = max(_BLOCK, -(-nbytes // _BLOCK) * _BLOCK)
        pool = (owner, size <= _SMALL)
        block = self._cached(pool, size) or self._segment(pool, size)
        if block is None:
            self.release()
            block = self._segment(pool, size)
        if block is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB. GPU 0 has a total capacity of"
                f" {self.total_bytes / 2**30:.2f} GiB of which {self.driver_free / 2**20:.2f} MiB is free."
            )
        self._split(block, size)
        block.free = False
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        self.allocated -= block.nbytes
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block.address = min(block.address, neighbour.address)
                block.nbytes += neighbour.nbytes
                if neighbour is block.before:
                    block.before = neighbour.before
                else:
                    block.after = neighbour.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._give(block)

    def release(self, owner: object = None) -> None:
        """Hand segments that are wholly free to the driver; those of a living graph's pool only when it ends."""
        for pool, blocks in self._free.items():
            if isinstance(pool[0], PrivatePool) and pool[0].alive and pool[0] is not owner:
                continue
            for size, _, block in [entry for entry in blocks if entry[2].whole_segment]:
                self._take(block)
                self.reserved -= size

    def _cached(self, pool: Pool, size: int) -> Block | None:
        blocks = self._free.get(pool, [])
        at = bisect.bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        return blocks.pop(at)[2]

    def _segment(self, pool: Pool, size: int) -> Block | None:
        large = _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
        nbytes = _SMALL_SEGMENT if pool[1] else large
        if nbytes > self.driver_free:
            return None
        self.reserved += nbytes
        block = Block(self._next_address, nbytes, pool)
        self._next_address += nbytes + _ROUND
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.nbytes - size
        if rest < (_BLOCK if block.pool[1] else _SMALL + 1):
            return
        tail = Block(block.address + size, rest, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = tail
        block.after, block.nbytes = tail, size
        self._give(tail)

    def _give(self, block: Block) -> None:
        bisect.insort(self._free.setdefault(block.pool, []), (block.nbytes, block.address, block))

    def _take(self, block: Block) -> None:
        blocks = self._free[block.pool]
        at = bisect.bisect_left(blocks, (block.nbytes, block.address))
        assert blocks[at][2] is block
        del blocks[at]


@dataclass(eq=False)
class PrivatePool:
    """The memory of one graph; nothing of it goes back while the graph lives."""

    alive: bool = True
