"""The blocks of the paged KV cache: who holds them, and which may be handed out."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Counts the holders of the blocks `0 .. num_blocks - 1`, every one of them usable.

    A block is in one of three states:

        free     nobody holds it, and what is in it is of no worth
        used     one request holds it, or several do that share what is in it
        cached   nobody holds it, but it was to be kept: it can be shared again until it is evicted

    `allocate` takes free blocks first and then evicts cached ones, the least recently used first.
    The pool knows nothing of tensors, tokens and requests. To take, share, return or evict a
    block costs constant time, and the pool's own memory grows with the blocks ever used, not with
    `num_blocks`.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] | None = None) -> None:
        """Start with all blocks free; `on_evict` is told of every kept block that is given up."""
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks!r}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._returned: list[int] = []  # free ones; a stack: the block used last is the warmest
        self._holders: dict[int, int] = {}  # used ones
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._kept: set[int] = set()  # what is to be cached when nobody holds it, or is cached now
        self._next_fresh = 0  # this id and all above it were never handed out

    @property
    def num_free(self) -> int:
        """How many blocks hold nothing of worth."""
        return self.num_blocks - len(self._holders) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """How many blocks nobody holds that were to be kept."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """How many blocks somebody holds."""
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` could hand out now."""
        return self.num_blocks - len(self._holders)

    @property
    def kept(self) -> frozenset[int]:
        """The blocks that `keep` was called for and that were not given up since."""
        return frozenset(self._kept)

    def num_holders(self, block_id: int) -> int:
        """How many hold a block."""
        return self._holders.get(block_id, 0)

    def allocate(self, num_wanted: int) -> list[int] | None:
        """Take `num_wanted` blocks, or return None and take none where there are fewer."""
        if num_wanted < 0:
            raise ValueError(f"cannot allocate {num_wanted!r} blocks")
        if num_wanted > self.num_available:
            return None
        return [self._take() for _ in range(num_wanted)]

    def _take(self) -> int:
        if not self.num_free:
            self._evict()
        if self._returned:
            block_id = self._returned.pop()
        else:
            block_id = self._next_fresh
            self._next_fresh += 1
        self._holders[block_id] = 1
        return block_id

    def _evict(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        self._kept.remove(block_id)
        self._returned.append(block_id)
        if self._on_evict is not None:
            self._on_evict(block_id)

    def share(self, block_ids: Collection[int]) -> None:
        """Hold blocks that others hold, or that are cached, once more.

        Raises:
            RuntimeError: a block is free. None is shared then.
        """
        lost = [b for b in block_ids if b not in self._holders and b not in self._cached]
        if lost:
            raise RuntimeError(f"blocks are shared that are free: {lost}")
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._holders[block_id] = self.num_holders(block_id) + 1

    def keep(self, block_id: int) -> None:
        """Have a used block cached, not freed, when its last holder returns it.

        Raises:
            RuntimeError: nobody holds it.
        """
        if block_id not in self._holders:
            raise RuntimeError(f"block {block_id} is to be kept but nobody holds it")
        self._kept.add(block_id)

    def free(self, block_ids: Collection[int]) -> None:
        """Hold blocks no more. The first one is the first to be evicted, where it is kept.

        Raises:
            RuntimeError: a block is not handed out, or is named twice. Nothing is returned then.
        """
        if len(set(block_ids)) != len(block_ids):
            raise RuntimeError(f"blocks are returned twice in one call: {sorted(block_ids)}")
        strangers = [block_id for block_id in block_ids if block_id not in self._holders]
        if strangers:
            raise RuntimeError(f"blocks are returned that are not handed out: {strangers}")
        for block_id in block_ids:
            self._holders[block_id] -= 1
            if self._holders[block_id]:
                continue
            del self._holders[block_id]
            if block_id in self._kept:
                self._cached[block_id] = None
            else:
                self._returned.append(block_id)

    def plan_resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """Return which blocks have to move where, (from, to), for a pool of `num_blocks`.

        Cached blocks are evicted until the others fit. Nothing else changes before `resize`.

        Raises:
            RuntimeError: more blocks than that are used.
        """
        if self.num_used > num_blocks:
            raise RuntimeError(f"{self.num_used} blocks are used, so {num_blocks} cannot hold them")
        while self.num_used + self.num_cached > num_blocks:
            self._evict()
        occupied = {*self._holders, *self._cached}
        outside = sorted(block_id for block_id in occupied if block_id >= num_blocks)
        # As many as are outside are free inside, so this ends before `num_blocks`.
        inside = (block_id for block_id in range(num_blocks) if block_id not in occupied)
        return list(zip(outside, inside, strict=False))

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have `num_blocks` blocks from now on, after the `moves` that `plan_resize` returned."""
        new_ids = dict(moves)
        self._holders = {new_ids.get(b, b): count for b, count in self._holders.items()}
        self._cached = OrderedDict((new_ids.get(b, b), None) for b in self._cached)
        self._kept = {new_ids.get(block_id, block_id) for block_id in self._kept}
        self.num_blocks = num_blocks
        self._next_fresh = min(self._next_fresh, num_blocks)
        filled = set(new_ids.values())
        self._returned = [b for b in self._returned if b < num_blocks and b not in filled]

    def check_integrity(self) -> None:
        """Prove that every block is in one state and none is in two.

        Raises:
            RuntimeError: the pool has lost or doubled a block; both sides of the sum are named.
        """
        num_fresh = self.num_blocks - self._next_fresh
        accounted = num_fresh + len(self._returned) + self.num_used + self.num_cached
        if accounted != self.num_blocks:
            raise RuntimeError(
                f"the block pool has {self.num_blocks} blocks but accounts for {accounted}: "
                f"{num_fresh} fresh, {len(self._returned)} returned, {self.num_used} used, "
                f"{self.num_cached} cached"
            )
        known = {*self._holders, *self._cached, *self._returned}
        if known != set(range(self._next_fresh)):
            raise RuntimeError(
                f"the block pool handed out blocks 0 to {self._next_fresh - 1} but knows of "
                f"{len(known)} different ones"
            )
        if min(self._holders.values(), default=1) < 1:
            raise RuntimeError(f"the block pool has used blocks without a holder: {self._holders}")
        if not set(self._cached) <= self._kept <= known.difference(self._returned):
            raise RuntimeError(
                f"the block pool keeps blocks {sorted(self._kept)}, has {sorted(self._cached)} "
                f"cached and {sorted(self._returned)} free"
            )
