"""The seam between the engine and a backend: read a prompt, decode, resize the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from reblock.engine.limits import EngineLimits

__all__ = ["Runner"]


class Runner(Protocol):
    """Runs compiled programs on a paged cache that it owns.

    The engine decides which blocks and slots a request has. A call stores keys and values for the
    tokens it is given, and for no others: rows and positions that only pad a program's fixed
    shape must leave every block alone.

    The token at position `p` is stored in block `block_table[p // block_size]`, at offset
    `p % block_size`. A block table covers all positions up to the last one of the call, and it
    grows between calls. Requests that begin alike may share blocks; no call writes into one that
    is shared. A block that is reused still holds what was in it.
    """

    @property
    def limits(self) -> EngineLimits:
        """The sizes of the programs and of the cache."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV cache takes."""
        ...

    def prefill(
        self, token_ids: list[int], start: int, block_table: list[int], slot: int
    ) -> Tensor:
        """Read one chunk of a prompt and return the logits after its last token, float32 [vocab].

        Args:
            token_ids: 1 to `prefill_chunk_size` tokens.
            start: the position of the first one. The chunks of a request come in order, without
                gaps. The first begins at 0, or, where `limits.has_rings` is False, behind full
                blocks that hold the same tokens of another request.
            block_table: the blocks of the request.
            slot: its row in caches that are kept per running request.
        """
        ...

    def decode(
        self,
        token_ids: list[int],
        positions: list[int],
        block_tables: list[list[int]],
        slots: list[int],
    ) -> Tensor:
        """Read one token of each of B requests; return the logits after them, float32 [B, vocab].

        The lists have one entry per request, `1 <= B <= max_batch`; the runner pads them to the
        smallest decoder that takes B.
        """
        ...

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have a cache of `num_blocks` blocks from now on; `limits` and `kv_bytes` follow.

        Blocks below both sizes keep their content, and what is in block `a` of every move (a, b)
        is in block `b` afterwards. No block is moved from twice or to twice, and all that are
        moved to are below the new size and are not moved from. Caches per slot stay as they are.

        Raises:
            DoesNotFit: the system has not that much memory to give. Nothing has changed.
        """
        ...
