"""Which requests run, and what the next call of the runner works on.

**Turns.** The programs read one prompt at a time, a chunk in each call, and decode all running
requests in one call. Chunks and decoding steps take turns, so a request that is being answered
waits for one chunk at most between two of its tokens, however long the prompts that others bring,
and a prompt that is being read waits for one decoding step at most between two of its chunks.

**Admission.** First come, first served; a large request is never overtaken by those behind it. One
is admitted when the one before has been read to the end, so that it finds the blocks that it can
share and holds none while it could not use them. It takes the blocks of all tokens that it has, and
must leave one over for every running request that may need another: else it would be preempted at
once. Blocks for the answer are taken as its tokens come.

**Preemption.** Where no block is left, the request admitted last gives up all of its own and goes
back to the head of the queue. Admitted again, it reads prompt and answer so far as one prompt, from
where the prefix cache ends. Its sampling state is kept, so it goes on as if nothing had been, up to
rounding: keys that a decoder had computed are computed by the prefill program then.

**Everything ends.** The request admitted first is never preempted for another, and none is accepted
that could not run with the whole cache to itself. So the first one ends, and the next is the first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reblock.engine.block_tables import BlockTables
from reblock.errors import BelowMinimum, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from reblock.engine.limits import EngineLimits
    from reblock.engine.request import Sequence

__all__ = ["DecodeWork", "PrefillWork", "Scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """The next chunk of what one request has to read: its tokens from position `start` on."""

    sequence: Sequence
    start: int
    token_ids: list[int]

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to read after it, so that its logits choose a token."""
        return self.start + len(self.token_ids) == self.sequence.num_to_read


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """One more token for each of these sequences, at most `max_batch` of them."""

    sequences: tuple[Sequence, ...]


class Scheduler:
    """The queue, the running requests, and their blocks and slots."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self._tables = BlockTables(limits)
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))  # a stack, slot 0 on top
        self._waiting: deque[Sequence] = deque()
        # In the order of admission. Only the last one can have something left to read.
        self._running: list[Sequence] = []
        self._prefilled_last = False

    @property
    def num_waiting(self) -> int:
        """Requests that have no blocks, because they are new or were preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a slot."""
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds and that hold nothing of worth."""
        return self._tables.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request holds, whose content is kept until they are needed."""
        return self._tables.pool.num_cached

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
        num_blocks = self._most_blocks(sequence)
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
        """What the runner does next; None where no request waits or runs."""
        if not self.has_work:
            return None
        work: PrefillWork | DecodeWork | None = None
        if not self._prefilled_last:
            work = self._next_chunk()
        if work is None:
            work = self._next_decode() or self._next_chunk()
        if work is None:
            raise RuntimeError(
                f"nothing runs and {self._tables.pool.num_available} of {self.limits.num_blocks} "
                f"blocks are free, yet request {self._waiting[0].request_id} was not admitted"
            )
        return work

    def advance(self, work: PrefillWork | DecodeWork) -> None:
        """Note that the runner has stored the tokens of `work`, so that it is another's turn."""
        self._prefilled_last = isinstance(work, PrefillWork)
        if isinstance(work, PrefillWork):
            self._tables.advance(work.sequence, len(work.token_ids))
            return
        for sequence in work.sequences:
            self._tables.advance(sequence, 1)

    def release(self, sequence: Sequence) -> None:
        """Take a request out, running or waiting; its blocks and its slot are free at once.

        Raises:
            RuntimeError: the scheduler does not hold it.
        """
        queue = self._waiting if sequence.slot is None else self._running
        if sequence not in queue:
            raise RuntimeError(f"request {sequence.request_id} is not with the scheduler")
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._stop(sequence)

    def plan_resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """Return which blocks have to move where, (from, to), for a cache of `num_blocks`.

        Requests are preempted until what the others hold fits, the newest first. Nothing else
        changes before `resize`.

        Raises:
            BelowMinimum: a request that waits or runs could not end any more. Nothing changes.
        """
        largest = max([*self._waiting, *self._running], key=self._most_blocks, default=None)
        if largest is not None and (num_needed := self._most_blocks(largest)) > num_blocks:
            raise BelowMinimum(
                f"the KV cache cannot have {num_blocks:,} blocks now: request "
                f"{largest.request_id} has a prompt of {len(largest.prompt_ids):,} tokens and "
                f"max_new_tokens {largest.params.max_new_tokens:,}, which may take "
                f"{num_needed:,} blocks of {self.limits.block_size:,} tokens; ask for at least "
                f"{num_needed:,}, or wait until it has ended or abort it",
                num_blocks=num_blocks,
                num_min_blocks=num_needed,
            )
        while self._tables.pool.num_used > num_blocks:
            self._preempt_newest()
        return self._tables.pool.plan_resize(num_blocks)

    def resize(self, num_blocks: int, moves: SequenceOf[tuple[int, int]]) -> None:
        """Have `num_blocks` blocks, after the `moves` that `plan_resize` returned were made."""
        self._tables.resize(num_blocks, moves, self._running)
        self.limits = replace(self.limits, num_blocks=num_blocks)

    def check_integrity(self) -> None:
        """Prove that requests and pool agree on every block and every slot.

        Raises:
            RuntimeError: a block or a slot is lost, or is held twice.
        """
        self._tables.check_integrity(self._running)
        slots = sorted(self._free_slots + [seq.running_slot for seq in self._running])
        if slots != list(range(self.limits.max_batch)):
            raise RuntimeError(f"the slots 0 to {self.limits.max_batch - 1} have become {slots}")

    def _next_chunk(self) -> PrefillWork | None:
        sequence = self._running[-1] if self._running else None
        if sequence is None or sequence.is_prefilled:
            sequence = self._admit()
        if sequence is None:
            return None
        start = sequence.num_computed
        stop = min(start + self.limits.prefill_chunk_size, sequence.num_to_read)
        return PrefillWork(sequence=sequence, start=start, token_ids=sequence.token_ids[start:stop])

    def _next_decode(self) -> DecodeWork | None:
        for sequence in tuple(self._running):  # the oldest first: it can take from all others
            while sequence.slot is not None and sequence.is_prefilled:
                if self._tables.cover(sequence, sequence.num_computed + 1):
                    break
                self._preempt_newest()
        ready = tuple(sequence for sequence in self._running if sequence.is_prefilled)
        return DecodeWork(sequences=ready) if ready else None

    def _admit(self) -> Sequence | None:
        """Start the request at the head of the queue and return it, where there is room."""
        if not self._waiting or not self._free_slots:
            return None
        sequence = self._waiting[0]
        num_spare = 0  # with nothing beside it, what `add` has checked is enough
        if self._running:
            held = [(running, len(running.block_table)) for running in self._running]
            held.append((sequence, self.limits.num_blocks_for(len(sequence.token_ids))))
            num_spare = sum(num_held < self._most_blocks(one) for one, num_held in held)
        if not self._tables.open(sequence, num_spare):
            return None
        sequence.slot = self._free_slots.pop()
        self._running.append(self._waiting.popleft())
        self.num_reused_tokens += sequence.num_computed
        return sequence

    def _most_blocks(self, sequence: Sequence) -> int:
        return self.limits.num_blocks_for(sequence.num_stored_tokens)

    def _preempt_newest(self) -> None:
        if len(self._running) == 1:
            raise RuntimeError(
                f"request {self._running[0].request_id} runs alone and finds no block, though "
                f"it was accepted for a cache of {self.limits.num_blocks}"
            )
        sequence = self._running[-1]
        self._stop(sequence)
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free_slots.append(sequence.running_slot)
        self._tables.close(sequence)
        sequence.slot = None
