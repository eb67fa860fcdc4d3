"""The sequences of one call of `generate`: their blocks, their slots, and how long they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from reblock.engine.block_pool import BlockPool
    from reblock.engine.limits import EngineLimits
    from reblock.engine.runner import Runner

__all__ = ["Rows"]


class Rows:
    """Sequences that run side by side from the first token to the last, each in a slot of its own.

    All blocks that they can ever need are taken at the start, so what was accepted ends.
    """

    def __init__(self, runner: Runner, pool: BlockPool, num_tokens: Sequence[int]) -> None:
        """Take the blocks for rows of `num_tokens` tokens, prompt and answer together.

        Raises:
            RequestTooLarge: There is no room for all of them at once; nothing was taken.
        """
        self._runner = runner
        self._pool = pool
        _check_room(runner.limits, num_tokens)
        self._tables: list[list[int]] = []
        for count in num_tokens:
            table = pool.allocate(_num_blocks(runner.limits, count))
            assert table is not None  # the pool has no other user
            self._tables.append(table)
        self._lengths: list[int] = []

    @property
    def has_started(self) -> bool:
        """Whether the prompts were read."""
        return bool(self._lengths)

    @property
    def vocab_size(self) -> int:
        """How many token ids the model can read."""
        return self._runner.limits.vocab_size

    def __len__(self) -> int:
        return len(self._tables)

    def prefill(self, prompts: Sequence[list[int]]) -> list[Tensor]:
        """Read the prompt of every row and return the logits after each, float32 [vocabulary]."""
        chunk = self._runner.limits.prefill_chunk_size
        answers = []
        for slot, (prompt, table) in enumerate(zip(prompts, self._tables, strict=True)):
            for start in range(0, len(prompt), chunk):
                logits = self._runner.prefill(prompt[start : start + chunk], start, table, slot)
            answers.append(logits)
        self._lengths = [len(prompt) for prompt in prompts]
        return answers

    def decode(self, token_ids: list[int]) -> Tensor:
        """Read one token of every row and return the logits, float32 [rows, vocabulary]."""
        slots = list(range(len(self._tables)))
        logits = self._runner.decode(token_ids, self._lengths, self._tables, slots)
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def release(self) -> None:
        """Return all blocks."""
        for table in self._tables:
            self._pool.free(table)
        self._tables = []


def _num_blocks(limits: EngineLimits, num_tokens: int) -> int:
    """Return the blocks of a sequence; its last token is never read, so it takes no room."""
    return limits.num_blocks_for(num_tokens - 1)


def _check_room(limits: EngineLimits, num_tokens: Sequence[int]) -> None:
    longest, total = max(num_tokens), sum(num_tokens)
    if len(num_tokens) > limits.max_batch:
        raise RequestTooLarge(
            f"{len(num_tokens)} sequences, num_return_sequences counted in, are more than the "
            f"batch_size={limits.max_batch} that the model is compiled for; give fewer at a time, "
            "or compile with a higher batch_size",
            num_tokens=total,
            max_tokens=limits.max_batch * limits.max_request_tokens,
        )
    if longest > limits.max_seq_len:
        raise RequestTooLarge(
            f"prompt and new tokens together can come to {longest:,} tokens, but "
            f"max_seq_len={limits.max_seq_len:,}; give a shorter prompt or a lower max_new_tokens, "
            "or compile with a higher max_seq_len",
            num_tokens=longest,
            max_tokens=limits.max_request_tokens,
        )
    needed = sum(_num_blocks(limits, count) for count in num_tokens)
    if needed > limits.num_blocks:
        raise RequestTooLarge(
            f"{len(num_tokens)} sequences of up to {longest:,} tokens need {needed} blocks of "
            f"{limits.block_size} tokens, but the KV cache has kvcache_num_blocks="
            f"{limits.num_blocks}; give fewer sequences or a lower max_new_tokens, or raise the "
            f"count: reblock set DIR {needed}",
            num_tokens=total,
            max_tokens=limits.num_blocks * limits.block_size,
        )
