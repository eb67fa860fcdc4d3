"""Which blocks hold which tokens, so that requests that begin alike can share them.

    root -- (5, 1, 9, 9) block 3 -- (2, 2, 7, 0) block 8
                                 `- (2, 4, 1, 1) block 5
         `- (8, 8, 0, 1) no block any more -- (3, 3, 3, 1) block 6

Keys and values of a block depend on all tokens before it, so a block is known by the tokens in it
and by what came before: it is a node of a tree. Children are found by the hash of their tokens and
compared token by token, so two contents of one hash are a miss and never a wrong answer.

A node lives as long as something needs it: a block that holds its tokens, a request that has read
them, or a node behind it. So what is computed again after it was evicted is found under its old
node, together with everything behind it that is still there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Prefix", "PrefixCache"]


class Prefix:
    """The content of one full block and of all before it; `block_id` holds it, if one does."""

    __slots__ = ("__weakref__", "block_id", "children", "parent", "token_ids")

    def __init__(self, parent: Prefix | None, token_ids: tuple[int, ...]) -> None:
        self.parent = parent  # held strongly, while a parent holds its children weakly
        self.token_ids = token_ids
        self.block_id: int | None = None
        self.children: WeakValueDictionary[tuple[int, ...], Prefix] = WeakValueDictionary()


class PrefixCache:
    """Finds blocks by the tokens that they hold.

    It knows nothing of who holds a block: whoever does says so when a block is full (`put`), when
    it is given up (`forget`) and when it is moved (`rename`).
    """

    def __init__(self, block_size: int) -> None:
        self.root = Prefix(None, ())
        self._block_size = block_size
        self._prefixes: dict[int, Prefix] = {}  # by block

    @property
    def block_ids(self) -> frozenset[int]:
        """The blocks that can be found."""
        return frozenset(self._prefixes)

    def match(self, token_ids: Sequence[int], max_tokens: int) -> list[Prefix]:
        """Return the longest chain of full blocks that holds the beginning of `token_ids`.

        It covers at most `max_tokens` of them.
        """
        found: list[Prefix] = []
        prefix = self.root
        for stop in range(self._block_size, max_tokens + 1, self._block_size):
            child = prefix.children.get(tuple(token_ids[stop - self._block_size : stop]))
            if child is None or child.block_id is None:
                break
            found.append(child)
            prefix = child
        return found

    def follow(self, prefix: Prefix, token_ids: Sequence[int]) -> Prefix:
        """Return the prefix that is longer by one block of `token_ids`, made where it is new."""
        key = tuple(token_ids)
        child = prefix.children.get(key)
        if child is None:
            child = Prefix(prefix, key)
            prefix.children[key] = child
        return child

    def put(self, prefix: Prefix, block_id: int) -> bool:
        """Note that a block holds a prefix; False where another one does already."""
        if prefix.block_id is not None:
            return False
        prefix.block_id = block_id
        self._prefixes[block_id] = prefix
        return True

    def forget(self, block_id: int) -> None:
        """Find a block no more."""
        self._prefixes.pop(block_id).block_id = None

    def rename(self, moves: Sequence[tuple[int, int]]) -> None:
        """Follow what was in some blocks to others, (from, to)."""
        moved = {new: self._prefixes.pop(old) for old, new in moves if old in self._prefixes}
        for block_id, prefix in moved.items():
            prefix.block_id = block_id
        self._prefixes.update(moved)

    def check_integrity(self) -> None:
        """Prove that every block is found where its content says.

        Raises:
            RuntimeError: a block is lost, or is found as another one.
        """
        for block_id, prefix in self._prefixes.items():
            parent = prefix.parent
            is_found = parent is not None and parent.children.get(prefix.token_ids) is prefix
            if prefix.block_id != block_id or not is_found:
                raise RuntimeError(
                    f"block {block_id} is in the prefix cache as block {prefix.block_id}, "
                    f"{'found' if is_found else 'lost'}"
                )
