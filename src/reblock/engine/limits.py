"""The sizes of the compiled programs and of their cache."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineLimits"]

_AT_LEAST_1 = (
    "num_blocks",
    "block_size",
    "max_seq_len",
    "max_batch",
    "prefill_chunk_size",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The sizes a runner was compiled with. Raises ValueError where they contradict each other."""

    num_blocks: int
    block_size: int
    """Tokens in a block."""
    max_seq_len: int
    """Tokens of prompt and answer together, at most."""
    max_batch: int
    """Requests that can run side by side: the slots are `0 .. max_batch - 1`."""
    decoder_batch_sizes: tuple[int, ...]
    """Rows of each compiled decoder, in any order; the largest is `max_batch`."""
    prefill_chunk_size: int
    """Prompt tokens that one prefill call takes, at most."""
    vocab_size: int
    """Tokens that the model can read: their ids are below it."""
    eos_token_ids: tuple[int, ...]
    has_rings: bool
    """Whether some layers keep the last tokens of each slot, in a ring of its own, not in blocks.

    What such a layer has to remember of a prompt is in no block, so prompts cannot share blocks."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        sizes = self.decoder_batch_sizes
        if not sizes or min(sizes) < 1 or max(sizes) != self.max_batch:
            raise ValueError(
                f"the decoder batch sizes {sizes!r} must be at least 1 and the largest must be "
                f"the maximum batch of {self.max_batch}"
            )

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and answer together that one request can have, alone in the cache.

        The cache needs no room for the last one, which is never fed back.
        """
        return min(self.max_seq_len, self.num_blocks * self.block_size + 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks the keys and values of `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def decoder_for(self, num_rows: int) -> int:
        """The rows of the smallest decoder that takes `num_rows` requests at once."""
        return min(size for size in self.decoder_batch_sizes if size >= num_rows)
