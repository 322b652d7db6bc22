"""Predicts the memory pool of a CUDA graph of a step: how PyTorch's caching allocator places the step's storages in it.

While a graph is captured, the allocator takes segments of the device's memory for the graph's own pool, splits them into
blocks, and gives none back to the device. The pool ends as large as the blocks and the gaps between them ever made it.
The sizes and rules are those of PyTorch's `CUDACachingAllocator.cpp`, with its default settings. What an op takes while it
runs counts as one block; where it is several, they may fit into gaps, and the pool may be a segment smaller.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from recollect.plans.plan import Plan
from recollect.profile.events import OPTIMIZER
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.lifetimes import Lifetime, lifetimes

_MIB: Final = 1 << 20
_BLOCK_BYTES: Final = 512
# Blocks of up to 1 MiB share segments of 2 MiB, and others, below 10 MiB, those of 20 MiB. Larger ones get multiples of 2 MiB.
_SMALL_BYTES: Final = _MIB
_SMALL_SEGMENT_BYTES: Final = 2 * _MIB
_OWN_SEGMENT_BYTES: Final = 10 * _MIB
_SHARED_SEGMENT_BYTES: Final = 20 * _MIB
_OWN_SEGMENT_STEP_BYTES: Final = 2 * _MIB


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment, from address `begin`; its neighbours in the segment."""

    begin: int
    nbytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class MemoryPool:
    """Places blocks as the caching allocator does."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        # Sizes, addresses and blocks, in this order.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {False: [], True: []}

    def take(self, nbytes: int) -> Block:
        """Place a block in the smallest free one that has room, or in a new segment."""
        wanted = max(_BLOCK_BYTES, -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        is_small = wanted <= _SMALL_BYTES
        free = self._free[is_small]
        position = bisect_left(free, (wanted,))
        block = free.pop(position)[2] if position < len(free) else self._segment(wanted, is_small)
        block.is_free = False
        rest = block.nbytes - wanted
        if rest >= _BLOCK_BYTES if is_small else rest > _SMALL_BYTES:
            self._put(Block(block.begin + wanted, rest, is_small, before=block, after=block.after))
            block.nbytes = wanted
        return block

    def give_back(self, block: Block) -> None:
        """Free a block; it joins free neighbours."""
        before, after = block.before, block.after
        if after is not None and after.is_free:
            self._leave(after)
            block.nbytes, block.after = block.nbytes + after.nbytes, after.after
        if before is not None and before.is_free:
            self._leave(before)
            block.begin, block.nbytes, block.before = before.begin, before.nbytes + block.nbytes, before.before
        self._put(block)

    def _segment(self, wanted: int, is_small: bool) -> Block:
        nbytes = _SMALL_SEGMENT_BYTES if is_small else _SHARED_SEGMENT_BYTES
        if wanted >= _OWN_SEGMENT_BYTES:
            nbytes = -(-wanted // _OWN_SEGMENT_STEP_BYTES) * _OWN_SEGMENT_STEP_BYTES
        self.reserved_bytes += nbytes
        return Block(self.reserved_bytes - nbytes, nbytes, is_small)

    def _put(self, block: Block) -> None:
        block.is_free = True
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        insort(self._free[block.is_small], (block.nbytes, block.begin, block))

    def _leave(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.nbytes, block.begin))]


def pool_bytes(*steps: tuple[Profile, Plan]) -> int:
    """Predict the size of the pool that graphs of steps share: of forward and backward, captured one after the other.

    Besides what a step makes, it holds what each leaves behind, such as gradients. Parameters, the optimizer's state and the
    batch are not in it.
    """
    changes: list[tuple[Lifetime, bool]] = []
    for profile, plan in steps:
        lives = lifetimes(profile, decide(profile, plan))
        own: list[tuple[int, int, bool]] = []
        for number, storage in enumerate(lives.storages):
            if lives.phases[storage.born] != OPTIMIZER:
                own.append((storage.born, number, True))
                if storage.died >= 0:
                    own.append((storage.died, number, False))
        changes += [(lives.storages[number], begins) for _, number, begins in sorted(own)]
    return _played(changes)


def _played(changes: Iterable[tuple[Lifetime, bool]]) -> int:
    """Return the size of the pool after storages begin and end, in this order."""
    pool, blocks = MemoryPool(), dict[int, Block]()
    # Of the last op. It includes the op's results, which begin right after it.
    workspace_bytes = 0
    for storage, begins in changes:
        if begins and storage.op is None and storage.nbytes <= workspace_bytes:
            workspace_bytes -= storage.nbytes
        elif workspace_bytes and (begins or storage.op is None):
            pool.give_back(pool.take(workspace_bytes))
            workspace_bytes = 0
        if begins and storage.op is not None:
            workspace_bytes = storage.nbytes
        elif begins and storage.nbytes:
            blocks[id(storage)] = pool.take(storage.nbytes)
        elif id(storage) in blocks:
            pool.give_back(blocks.pop(id(storage)))
    return pool.reserved_bytes


def played(events: Iterable[tuple[int, int]]) -> int:
    """Return the size of a pool after an allocator's events: the address of each block, and its bytes, negative if it is freed.

    Blocks from before the first event are not in the pool.
    """
    pool, blocks = MemoryPool(), dict[int, Block]()
    for address, nbytes in events:
        if nbytes > 0:
            blocks[address] = pool.take(nbytes)
        elif address in blocks:
            pool.give_back(blocks.pop(address))
    return pool.reserved_bytes
