"""Serves many requests from one paged cache, one short step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.engine.request import FinishReason, SamplingParams, Sequence
from reblock.engine.scheduler import PrefillWork, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from collections.abc import Sequence as SequenceOf

    from torch import Tensor

    from reblock.engine.limits import EngineLimits
    from reblock.engine.runner import Runner
    from reblock.engine.scheduler import DecodeWork

    ChooseToken = Callable[[Tensor, list[int]], int]
    MakeSampler = Callable[[SamplingParams], ChooseToken]

__all__ = ["Completion", "Engine", "TokenOutput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One token that a request produced."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None
    """Set with the last token: "stop" for an end-of-sequence token, else "length"."""

    @property
    def finished(self) -> bool:
        """Whether this is the request's last token."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer to one prompt, an end-of-sequence token included."""

    token_ids: list[int]
    finish_reason: FinishReason


class Engine:
    """Queue, scheduler, runner and samplers together.

    It belongs to one thread. `step` makes one call to the runner; as long as `has_work`, every
    step makes progress, and every request that `add` accepted ends after finitely many.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_token_ids: Collection[int] | None = None,
        make_sampler: MakeSampler | None = None,
    ) -> None:
        """Start idle.

        Args:
            runner: the compiled programs and their cache; the engine is its only user.
            eos_token_ids: tokens that end a request, in place of those of `runner.limits`.
            make_sampler: what chooses the tokens of one request; by default
                `reblock.engine.sampler.make_sampler`.
        """
        if eos_token_ids is None:
            eos_token_ids = runner.limits.eos_token_ids
        self._runner = runner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._make_sampler = make_sampler or _default_make_sampler()
        self._scheduler = Scheduler(runner.limits)
        self._live: dict[int, tuple[Sequence, ChooseToken]] = {}
        self._next_id = 0

    @property
    def limits(self) -> EngineLimits:
        """The sizes of the runner's programs and cache."""
        return self._runner.limits

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV cache takes."""
        return self._runner.kv_bytes

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Requests that hold blocks now."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or for a slot."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; all of them when the engine is idle."""
        return self._scheduler.num_free_blocks

    def add(self, prompt_ids: SequenceOf[int], params: SamplingParams) -> int:
        """Queue a request and return its id.

        Raises:
            RequestTooLarge: it could never be served; the message says what could.
            UsageError: the prompt has no tokens.
        """
        sequence = Sequence(request_id=self._next_id, prompt_ids=list(prompt_ids), params=params)
        choose = self._make_sampler(params)
        self._scheduler.add(sequence)
        self._live[sequence.request_id] = (sequence, choose)
        self._next_id += 1
        return sequence.request_id

    def abort(self, request_id: int) -> bool:
        """End a request at once and free its blocks; False where it has ended already."""
        if request_id not in self._live:
            return False
        self._end(request_id)
        return True

    def step(self) -> list[TokenOutput]:
        """Make one call to the runner and return the tokens that came of it.

        The list is empty when the engine is idle, and after a chunk that is not the last of its
        prompt. Where the runner raises, nothing has changed: the step may be repeated, or the
        requests aborted.
        """
        work = self._scheduler.schedule()
        if work is None:
            return []
        if isinstance(work, PrefillWork):
            return self._prefill(work)
        return self._decode(work)

    def generate(
        self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams
    ) -> list[Completion]:
        """Answer all prompts and return the answers in their order.

        Nothing runs unless every prompt is accepted. The engine must be idle.

        Raises:
            RequestTooLarge, UsageError: as `add` does.
        """
        if self._live:
            raise RuntimeError("generate needs an idle engine; use add and step beside others")
        request_ids: list[int] = []
        token_ids: dict[int, list[int]] = {}
        reasons: dict[int, FinishReason] = {}
        try:
            for prompt_ids in prompts:
                request_id = self.add(prompt_ids, params)
                request_ids.append(request_id)
            while self.has_work:
                for output in self.step():
                    token_ids.setdefault(output.request_id, []).append(output.token_id)
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
        finally:
            for request_id in request_ids:
                self.abort(request_id)
        return [
            Completion(token_ids=token_ids[request_id], finish_reason=reasons[request_id])
            for request_id in request_ids
        ]

    def check_integrity(self) -> None:
        """Prove that no block and no slot is lost or held twice; RuntimeError where one is."""
        self._scheduler.check_integrity()
        num_known = self._scheduler.num_running + self._scheduler.num_waiting
        if num_known != len(self._live):
            raise RuntimeError(
                f"the engine has {len(self._live)} requests but the scheduler {num_known}"
            )

    def _prefill(self, work: PrefillWork) -> list[TokenOutput]:
        sequence = work.sequence
        logits = self._runner.prefill(
            work.token_ids, work.start, sequence.block_table, sequence.running_slot
        )
        if not work.is_last:
            sequence.num_computed += len(work.token_ids)
            return []
        token_id = self._choose(sequence, logits)
        sequence.num_computed += len(work.token_ids)
        return [self._take(sequence, token_id)]

    def _decode(self, work: DecodeWork) -> list[TokenOutput]:
        sequences = work.sequences
        logits = self._runner.decode(
            [sequence.output_ids[-1] for sequence in sequences],
            [sequence.num_computed for sequence in sequences],
            [sequence.block_table for sequence in sequences],
            [sequence.running_slot for sequence in sequences],
        )
        # All are chosen before any is taken, so that a step that fails leaves all as they were.
        token_ids = [self._choose(sequence, logits[row]) for row, sequence in enumerate(sequences)]
        outputs = []
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.num_computed += 1
            outputs.append(self._take(sequence, token_id))
        return outputs

    def _choose(self, sequence: Sequence, logits: Tensor) -> int:
        choose = self._live[sequence.request_id][1]
        return choose(logits, sequence.prompt_ids + sequence.output_ids)

    def _take(self, sequence: Sequence, token_id: int) -> TokenOutput:
        sequence.output_ids.append(token_id)
        reason = sequence.finish_reason(self._eos_token_ids)
        if reason is not None:
            self._end(sequence.request_id)
        return TokenOutput(request_id=sequence.request_id, token_id=token_id, finish_reason=reason)

    def _end(self, request_id: int) -> None:
        sequence, _ = self._live.pop(request_id)
        self._scheduler.release(sequence)


def _default_make_sampler() -> MakeSampler:
    # imported here, because the engine itself needs no torch
    from reblock.engine.sampler import make_sampler

    return make_sampler
