"""The blocks of the paged KV cache: which are free and which are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out the block ids `0 .. num_blocks - 1`, every one of them usable.

    The pool knows nothing of tensors and requests. A block costs constant time to take and to
    return, and the pool's own memory grows with the blocks ever used, not with `num_blocks`.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks!r}")
        self.num_blocks = num_blocks
        self._returned: list[int] = []  # a stack: the block used last is the warmest
        self._used: set[int] = set()
        self._next_fresh = 0  # this id and all above it were never handed out

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` could hand out now."""
        return self.num_blocks - len(self._used)

    @property
    def num_used(self) -> int:
        """How many blocks are handed out now."""
        return len(self._used)

    def allocate(self, num_wanted: int) -> list[int] | None:
        """Take `num_wanted` blocks, or return None and take none where fewer are free."""
        if num_wanted < 0:
            raise ValueError(f"cannot allocate {num_wanted!r} blocks")
        if num_wanted > self.num_free:
            return None
        num_returned = min(num_wanted, len(self._returned))
        block_ids = [self._returned.pop() for _ in range(num_returned)]
        num_fresh = num_wanted - num_returned
        block_ids.extend(range(self._next_fresh, self._next_fresh + num_fresh))
        self._next_fresh += num_fresh
        self._used.update(block_ids)
        return block_ids

    def free(self, block_ids: Collection[int]) -> None:
        """Return blocks to the pool.

        Raises:
            RuntimeError: a block is not handed out, or is named twice. Nothing is returned then.
        """
        if len(set(block_ids)) != len(block_ids):
            raise RuntimeError(f"blocks are returned twice in one call: {sorted(block_ids)}")
        strangers = [block_id for block_id in block_ids if block_id not in self._used]
        if strangers:
            raise RuntimeError(f"blocks are returned that are not handed out: {strangers}")
        self._used.difference_update(block_ids)
        self._returned.extend(block_ids)

    def check_integrity(self) -> None:
        """Prove that every block is either free or taken, and none is both.

        Raises:
            RuntimeError: the pool has lost or doubled a block; both sides of the sum are named.
        """
        num_fresh = self.num_blocks - self._next_fresh
        accounted = num_fresh + len(self._returned) + len(self._used)
        if accounted != self.num_blocks:
            raise RuntimeError(
                f"the block pool has {self.num_blocks} blocks but accounts for {accounted}: "
                f"{num_fresh} fresh, {len(self._returned)} returned, {len(self._used)} used"
            )
        known = self._used.union(self._returned)
        if known != set(range(self._next_fresh)):
            raise RuntimeError(
                f"the block pool handed out blocks 0 to {self._next_fresh - 1} but knows of "
                f"{len(known)} different ones"
            )
