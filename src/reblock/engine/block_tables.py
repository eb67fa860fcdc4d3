"""The blocks of every running request: taken, shared, filled, returned and moved."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from reblock.engine.block_pool import BlockPool
from reblock.engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as SequenceOf

    from reblock.engine.limits import EngineLimits
    from reblock.engine.request import Sequence

__all__ = ["BlockTables"]


class BlockTables:
    """Ties block pool and prefix cache to the block tables of requests.

    A full block is written no more, so it is put into the prefix cache and may be shared. A block
    that is not full has one holder, who goes on writing it.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._block_size = limits.block_size
        self._can_share = not limits.has_rings
        self._prefixes = PrefixCache(limits.block_size)
        self.pool = BlockPool(limits.num_blocks, on_evict=self._prefixes.forget)

    def open(self, sequence: Sequence, num_spare: int) -> bool:
        """Give a request the blocks of all its tokens, those of a known beginning shared.

        Returns:
            False, and nothing is taken, where not even `num_spare` blocks would be left over.
        """
        token_ids = sequence.token_ids
        # The last token is always computed: there are no logits after it otherwise.
        max_known = len(token_ids) - 1 if self._can_share else 0
        known = self._prefixes.match(token_ids, max_known)
        shared = [prefix.block_id for prefix in known if prefix.block_id is not None]
        self.pool.share(shared)
        num_own = self._num_blocks(len(token_ids)) - len(shared)
        own = None
        if num_own + num_spare <= self.pool.num_available:
            own = self.pool.allocate(num_own)
        if own is None:
            self.pool.free(shared[::-1])
            return False
        sequence.block_table = shared + own
        sequence.num_computed = len(shared) * self._block_size
        sequence.num_to_read = len(token_ids)
        sequence.prefix = known[-1] if known else self._prefixes.root
        return True

    def cover(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make a table long enough for `num_tokens` tokens; False where no block is left."""
        num_missing = self._num_blocks(num_tokens) - len(sequence.block_table)
        block_ids = self.pool.allocate(max(0, num_missing))
        if block_ids is None:
            return False
        sequence.block_table.extend(block_ids)
        return True

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that keys and values of the next `num_tokens` tokens are stored."""
        num_full = sequence.num_computed // self._block_size
        sequence.num_computed += num_tokens
        if not self._can_share:
            return
        for index in range(num_full, sequence.num_computed // self._block_size):
            start = index * self._block_size
            assert sequence.prefix is not None
            content = sequence.token_ids[start : start + self._block_size]
            sequence.prefix = self._prefixes.follow(sequence.prefix, content)
            if self._prefixes.put(sequence.prefix, sequence.block_table[index]):
                self.pool.keep(sequence.block_table[index])

    def close(self, sequence: Sequence) -> None:
        """Return all blocks of a request; what is in the full ones stays known until evicted."""
        # The last ones first, as they are of no use once those before them are evicted.
        self.pool.free(sequence.block_table[::-1])
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.prefix = None

    def resize(
        self,
        num_blocks: int,
        moves: SequenceOf[tuple[int, int]],
        sequences: Collection[Sequence],
    ) -> None:
        """Have `num_blocks` blocks, after the `moves` that the pool planned; tables follow."""
        self.pool.resize(num_blocks, moves)
        self._prefixes.rename(moves)
        new_ids = dict(moves)
        for sequence in sequences:
            sequence.block_table = [new_ids.get(b, b) for b in sequence.block_table]

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Prove that pool, prefix cache and the tables of all running requests agree.

        Raises:
            RuntimeError: a block is lost, has holders that nobody knows of, or is still written
                while others may read it.
        """
        self.pool.check_integrity()
        self._prefixes.check_integrity()
        if self._prefixes.block_ids != self.pool.kept:
            raise RuntimeError(
                f"the prefix cache knows blocks {sorted(self._prefixes.block_ids)} but the pool "
                f"keeps {sorted(self.pool.kept)}"
            )
        held = [block_id for sequence in sequences for block_id in sequence.block_table]
        num_holders = Counter(held)
        wrong = sorted(b for b, count in num_holders.items() if count != self.pool.num_holders(b))
        if wrong or len(num_holders) != self.pool.num_used:
            raise RuntimeError(
                f"running requests hold {len(held)} blocks, {len(num_holders)} different ones, "
                f"and {self.pool.num_used} are handed out; the holders of {wrong} are miscounted"
            )
        for sequence in sequences:
            written = sequence.block_table[sequence.num_computed // self._block_size :]
            if any(self.pool.num_holders(b) > 1 or b in self.pool.kept for b in written):
                raise RuntimeError(
                    f"request {sequence.request_id} would write blocks {written}, of which others "
                    "read one"
                )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
