"""The seam between the engine and a backend: one prefill call, one decode call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from reblock.engine.limits import EngineLimits

__all__ = ["Runner"]


class Runner(Protocol):
    """Runs compiled programs on a paged cache that it owns.

    The engine decides which blocks and slots a request has, and uses no block for two requests at
    a time. A call stores keys and values for the tokens it is given, and for no others: rows and
    positions that only pad a program's fixed shape must leave every block alone.

    The token at position `p` is stored in block `block_table[p // block_size]`, at offset
    `p % block_size`. A block table covers all positions of the request and does not change while
    the request runs. A block that is reused still holds what was in it.
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
            start: the position of the first one. The chunks of a prompt come in order, without
                gaps; 0 starts a new request in this slot.
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
