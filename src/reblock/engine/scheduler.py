"""Which requests run, and what the next call of the runner works on.

A request is admitted when a slot is free and so are all blocks that its longest answer could
fill. Because they are reserved up front, a running request never waits for memory: every admitted
request ends, so its blocks return, so the one at the head of the queue is admitted in its turn.
A request that could not run even alone is refused when it is added, not left to wait for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.engine.block_pool import BlockPool
from reblock.errors import RequestTooLarge

if TYPE_CHECKING:
    from reblock.engine.limits import EngineLimits
    from reblock.engine.request import Sequence

__all__ = ["DecodeWork", "PrefillWork", "Scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """The next chunk of one prompt: its tokens from position `start` on."""

    sequence: Sequence
    start: int
    token_ids: list[int]

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this chunk, so that its logits choose the first token."""
        return self.start + len(self.token_ids) == len(self.sequence.prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """One more token for each of these sequences, at most `max_batch` of them."""

    sequences: tuple[Sequence, ...]


class Scheduler:
    """First come, first served; one prompt chunk and one decoding step take turns.

    Taking turns keeps answers flowing while long prompts are read. What runs beside a request
    never changes what it computes.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))  # a stack, slot 0 on top
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order of admission
        self._prefilled_last = False

    @property
    def num_waiting(self) -> int:
        """Requests that have no blocks yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a slot."""
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return something."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Put a request at the end of the queue.

        Raises:
            RequestTooLarge: it could not run even with the whole cache to itself.
        """
        num_prompt, num_new = len(sequence.prompt_ids), sequence.params.max_new_tokens
        limits = self.limits
        num_tokens = num_prompt + num_new
        asked = f"the prompt has {num_prompt:,} tokens and max_new_tokens is {num_new:,}"
        if num_tokens > limits.max_seq_len:
            raise RequestTooLarge(
                f"{asked}, together {num_tokens:,}, but the model was compiled for a max_seq_len "
                f"of {limits.max_seq_len:,}: {self._remedy(num_prompt)}, or compile it with a "
                "larger max_seq_len",
                num_tokens=num_tokens,
                max_tokens=limits.max_request_tokens,
            )
        num_blocks = limits.num_blocks_for(sequence.num_stored_tokens)
        if num_blocks > limits.num_blocks:
            raise RequestTooLarge(
                f"{asked}, which takes {num_blocks:,} blocks of {limits.block_size:,} tokens, but "
                f"the KV cache has {limits.num_blocks:,}: {self._remedy(num_prompt)}, or give the "
                f"artifact at least {num_blocks:,} blocks",
                num_tokens=num_tokens,
                max_tokens=limits.max_request_tokens,
            )
        self._waiting.append(sequence)

    def _remedy(self, num_prompt: int) -> str:
        room = self.limits.max_request_tokens - num_prompt
        if room >= 1:
            return f"lower max_new_tokens to {room:,} or shorten the prompt"
        return f"shorten the prompt to at most {self.limits.max_request_tokens - 1:,} tokens"

    def schedule(self) -> PrefillWork | DecodeWork | None:
        """What the runner does next; None where no request waits or runs.

        Admits all waiting requests that fit, in their order: where the first does not fit yet,
        those behind it wait too, so that a large request is never overtaken for ever.
        """
        while self._waiting and self._admit(self._waiting[0]):
            self._running.append(self._waiting.popleft())
        unread = next((seq for seq in self._running if not seq.is_prefilled), None)
        ready = tuple(seq for seq in self._running if seq.is_prefilled)
        if unread is not None and not (ready and self._prefilled_last):
            self._prefilled_last = True
            return self._next_chunk(unread)
        self._prefilled_last = False
        if ready:
            return DecodeWork(sequences=ready)
        if self._waiting:
            raise RuntimeError(
                f"nothing runs and {self._pool.num_free} of {self._pool.num_blocks} blocks are "
                f"free, yet request {self._waiting[0].request_id} was not admitted"
            )
        return None

    def release(self, sequence: Sequence) -> None:
        """Take a request out, running or waiting; its blocks and its slot are free at once.

        Raises:
            RuntimeError: the scheduler does not hold it.
        """
        queue = self._waiting if sequence.slot is None else self._running
        if sequence not in queue:
            raise RuntimeError(f"request {sequence.request_id} is not with the scheduler")
        queue.remove(sequence)
        if sequence.slot is None:
            return
        self._pool.free(sequence.block_table)
        self._free_slots.append(sequence.slot)
        sequence.block_table = []
        sequence.slot = None

    def check_integrity(self) -> None:
        """Prove that requests and pool agree on every block and every slot.

        Raises:
            RuntimeError: a block or a slot is lost, or is held twice.
        """
        self._pool.check_integrity()
        held = [block_id for seq in self._running for block_id in seq.block_table]
        if len(set(held)) != len(held) or len(held) != self._pool.num_used:
            raise RuntimeError(
                f"running requests hold {len(held)} blocks, {len(set(held))} different ones, "
                f"and {self._pool.num_used} are handed out"
            )
        slots = sorted(self._free_slots + [seq.running_slot for seq in self._running])
        if slots != list(range(self.limits.max_batch)):
            raise RuntimeError(f"the slots 0 to {self.limits.max_batch - 1} have become {slots}")

    def _admit(self, sequence: Sequence) -> bool:
        if not self._free_slots:
            return False
        block_ids = self._pool.allocate(self.limits.num_blocks_for(sequence.num_stored_tokens))
        if block_ids is None:
            return False
        sequence.block_table = block_ids
        sequence.slot = self._free_slots.pop()
        return True

    def _next_chunk(self, sequence: Sequence) -> PrefillWork:
        start = sequence.num_computed
        stop = start + self.limits.prefill_chunk_size
        return PrefillWork(
            sequence=sequence, start=start, token_ids=sequence.prompt_ids[start:stop]
        )
