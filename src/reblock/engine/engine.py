"""Serves many requests from one paged cache, one short step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reblock.block_count import parse_block_count
from reblock.engine.counters import EngineCounters, Stopwatch
from reblock.engine.outputs import Completion, TokenOutput
from reblock.engine.request import Sequence, parse_token_ids
from reblock.engine.scheduler import PrefillWork, Scheduler
from reblock.engine.stop import AnswerText
from reblock.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import SupportsIndex

    from torch import Tensor

    from reblock.engine.choices import Choice, Sampler
    from reblock.engine.detokenizer import Detokenizer
    from reblock.engine.limits import EngineLimits
    from reblock.engine.request import FinishReason, SamplingParams
    from reblock.engine.runner import Runner
    from reblock.engine.scheduler import DecodeWork

__all__ = ["Engine"]


@dataclass(frozen=True, slots=True)
class _Request:
    """What the engine keeps of a request until it ends."""

    sequence: Sequence
    sampling: Any  # the sampler's own
    text: AnswerText | None


class Engine:
    """Queue, scheduler, runner and sampler together.

    It belongs to one thread. `step` makes one call to the runner; as long as `has_work`, every
    step makes progress, and every request that `add` accepted ends after finitely many.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_token_ids: Collection[int] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Start idle.

        Args:
            runner: the compiled programs and their cache; the engine is its only user.
            eos_token_ids: tokens that end a request, in place of those of `runner.limits`.
            sampler: what chooses the tokens; by default `reblock.engine.sampler.TorchSampler`.
        """
        if eos_token_ids is None:
            eos_token_ids = runner.limits.eos_token_ids
        self._runner = runner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sampler = sampler or _default_sampler()
        self._scheduler = Scheduler(runner.limits)
        self._live: dict[int, _Request] = {}
        self._next_id = 0
        self._stopwatch = Stopwatch()
        self._num_prefilled_tokens = self._num_decoded_tokens = 0
        self._most_used_blocks = 0

    @property
    def limits(self) -> EngineLimits:
        """The sizes of the runner's programs and cache."""
        return self._scheduler.limits

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
        """Requests that wait for blocks, for a slot, or for their turn to be read."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones too; all of them when the engine is idle."""
        return self._scheduler.num_free_blocks + self._scheduler.num_cached_blocks

    def counters(self) -> EngineCounters:
        """What the engine has done so far, and what it has left."""
        scheduler, spent_ns = self._scheduler, self._stopwatch.spent_ns
        return EngineCounters(
            num_blocks=self.limits.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            num_used_blocks=self.limits.num_blocks - self.num_free_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            most_used_blocks=self._most_used_blocks,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_prefilled_tokens=self._num_prefilled_tokens,
            num_reused_tokens=scheduler.num_reused_tokens,
            num_decoded_tokens=self._num_decoded_tokens,
            scheduler_ns=spent_ns("scheduler"),
            programs_ns=spent_ns("programs"),
            sampler_ns=spent_ns("sampler"),
        )

    def add(
        self,
        prompt_ids: Iterable[SupportsIndex],
        params: SamplingParams,
        *,
        detokenizer: Detokenizer | None = None,
    ) -> int:
        """Queue a request and return its id.

        Args:
            prompt_ids: the tokens of the prompt, in a list, an array or a tensor.
            params: how its tokens are chosen.
            detokenizer: makes text of the answer; stop strings need it.

        Raises:
            RequestTooLarge: it could never be served; the message says what could.
            UsageError: the prompt has no tokens, or one that the model does not know, or there are
                stop strings without a detokenizer.
        """
        token_ids = parse_token_ids(prompt_ids, self.limits.vocab_size)
        return self._queue(self._make_request(token_ids, params, detokenizer))

    def add_several(
        self,
        prompt_ids: Iterable[SupportsIndex],
        params: SamplingParams,
        num_answers: int,
        *,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> list[int]:
        """Queue `num_answers` requests for answers to one prompt and return their ids.

        They share the full blocks of the prompt. A seed is that of the first answer; the others
        count on from it.

        Raises:
            RequestTooLarge, UsageError: as `add` does. None is queued then, nor where
                `make_detokenizer` raises.
        """
        if not isinstance(num_answers, int) or isinstance(num_answers, bool) or num_answers < 1:
            raise UsageError(
                f"num_answers must be a whole number, at least one answer, not {shown(num_answers)}"
            )
        token_ids = parse_token_ids(prompt_ids, self.limits.vocab_size)
        requests = [
            self._make_request(
                token_ids,
                params.for_answer(index),
                make_detokenizer() if make_detokenizer else None,
            )
            for index in range(num_answers)
        ]
        return [self._queue(request) for request in requests]  # the first is refused, or none

    def abort(self, request_id: int) -> bool:
        """End a request at once and free its blocks; False where it has ended already."""
        if request_id not in self._live:
            return False
        self._end(request_id)
        return True

    def step(self) -> list[TokenOutput]:
        """Make one call to the runner and return the tokens that came of it.

        The list is empty when the engine is idle, and after a chunk that is not the last of its
        prompt. Where the runner or the sampler raises, no request has a token more: the step may
        be repeated, or the requests aborted. Where a detokenizer raises, its request alone ends,
        with "error" and what was raised in its output.
        """
        timing = self._stopwatch.timing
        with timing("scheduler"):
            work = self._scheduler.schedule()
        if work is None:
            return []
        num_used = self.limits.num_blocks - self.num_free_blocks
        self._most_used_blocks = max(self._most_used_blocks, num_used)
        with timing("programs"):
            logits, requests = self._run(work)
        with timing("sampler"):
            choices = self._choose(logits, requests)
        with timing("scheduler"):
            self._scheduler.advance(work)
            # All tokens before any text: a detokenizer may raise, which costs nobody else a token.
            reasons = list(map(self._take, requests, choices))
        return list(map(self._output, requests, choices, reasons))

    def resize_kvcache(self, num_blocks: int) -> None:
        """Give the cache of the running engine another number of blocks, between two steps.

        Requests go on: their blocks are moved to where there is room, and where there is none the
        newest requests are preempted. Later requests are accepted by the new size.

        Raises:
            InvalidBlockCount: `num_blocks` is no number of blocks.
            DoesNotFit: a request that waits or runs could not end in so few, or the system has not
                that much memory to give. The cache is as it was.
        """
        num_blocks = parse_block_count(num_blocks)
        if num_blocks == self.limits.num_blocks:
            return
        moves = self._scheduler.plan_resize(num_blocks)
        self._runner.resize(num_blocks, moves)
        self._scheduler.resize(num_blocks, moves)

    def generate(
        self,
        prompts: Iterable[Iterable[SupportsIndex]],
        params: SamplingParams,
        *,
        num_answers: int = 1,
    ) -> list[Completion]:
        """Answer all prompts and return the answers in their order, all of a prompt together.

        Nothing runs unless every prompt is accepted. The engine must be idle.

        Args:
            prompts: the tokens of each prompt.
            params: how all of their tokens are chosen.
            num_answers: to each prompt; see `add_several`.

        Raises:
            RequestTooLarge, UsageError: as `add` does.
        """
        if self._live:
            raise UsageError(
                "generate needs an idle engine, and requests wait or run in this one; use add and "
                "step beside them, or abort them"
            )
        answers: dict[int, list[TokenOutput]] = {}
        try:
            for prompt_ids in prompts:
                for request_id in self.add_several(prompt_ids, params, num_answers):
                    answers[request_id] = []
            while self.has_work:
                for output in self.step():
                    answers[output.request_id].append(output)
        finally:
            for request_id in answers:
                self.abort(request_id)
        return [_completion(outputs) for outputs in answers.values()]

    def check_integrity(self) -> None:
        """Prove that no block and no slot is lost or held twice; RuntimeError where one is."""
        self._scheduler.check_integrity()
        num_known = self._scheduler.num_running + self._scheduler.num_waiting
        if num_known != len(self._live):
            raise RuntimeError(
                f"the engine has {len(self._live)} requests but the scheduler {num_known}"
            )

    def _make_request(
        self, prompt_ids: list[int], params: SamplingParams, detokenizer: Detokenizer | None
    ) -> _Request:
        if params.stop and detokenizer is None:
            raise UsageError(f"the stop strings {params.stop!r} need a detokenizer to find them")
        sequence = Sequence(request_id=self._next_id, prompt_ids=prompt_ids, params=params)
        text = None if detokenizer is None else AnswerText(detokenizer, params.stop)
        self._next_id += 1
        return _Request(sequence, self._sampler.start(params), text)

    def _queue(self, request: _Request) -> int:
        request_id = request.sequence.request_id
        self._scheduler.add(request.sequence)
        self._live[request_id] = request
        return request_id

    def _run(self, work: PrefillWork | DecodeWork) -> tuple[Tensor | list[Tensor], list[_Request]]:
        """Have the programs read tokens; return logits for the requests that get one of it."""
        if isinstance(work, PrefillWork):
            sequence = work.sequence
            logits = self._runner.prefill(
                work.token_ids, work.start, sequence.block_table, sequence.running_slot
            )
            self._num_prefilled_tokens += len(work.token_ids)
            return [logits], [self._live[sequence.request_id]] if work.is_last else []
        sequences = work.sequences
        logits = self._runner.decode(
            [sequence.token_ids[-1] for sequence in sequences],
            [sequence.num_computed for sequence in sequences],
            [sequence.block_table for sequence in sequences],
            [sequence.running_slot for sequence in sequences],
        )
        self._num_decoded_tokens += len(sequences)
        return logits, [self._live[sequence.request_id] for sequence in sequences]

    def _choose(self, logits: Tensor | list[Tensor], requests: list[_Request]) -> list[Choice]:
        # All are chosen before any is taken, so that a step that fails leaves all as they were.
        if not requests:
            return []
        states = [request.sampling for request in requests]
        return self._sampler.choose(
            logits, states, [request.sequence.token_ids for request in requests]
        )

    def _take(self, request: _Request, choice: Choice) -> FinishReason | None:
        """Give a request its token, end it where that is its last, and return why."""
        sequence = request.sequence
        sequence.token_ids.append(choice.token_id)
        reason = sequence.finish_reason(self._eos_token_ids)
        if reason is not None:
            self._end(sequence.request_id)
        return reason

    def _output(
        self, request: _Request, choice: Choice, reason: FinishReason | None
    ) -> TokenOutput:
        request_id, text = request.sequence.request_id, request.text
        piece = ""
        matched: str | None = None
        error: Exception | None = None
        if text is not None:
            try:
                piece = _piece(text, choice.token_id, reason)
            except Exception as raised:  # noqa: BLE001  the caller gets it, with the others' tokens
                error, reason = raised, "error"
            else:
                matched = text.matched
                reason = reason if matched is None else "stop"
        if reason is not None:
            self.abort(request_id)  # unless it has ended by its tokens
        return TokenOutput(
            request_id=request_id,
            token_id=choice.token_id,
            text=piece,
            logprobs=choice.logprobs,
            finish_reason=reason,
            matched_stop=matched,
            error=error,
        )

    def _end(self, request_id: int) -> None:
        self._scheduler.release(self._live.pop(request_id).sequence)
        if not self._live:
            self.check_integrity()


def _piece(text: AnswerText, token_id: int, reason: FinishReason | None) -> str:
    """Return the text that comes of a token, and where it is the last all that was held back."""
    # The token that ends an answer is no part of its text, whether it is special or not.
    piece = "" if reason == "stop" else text.add(token_id)
    return piece if reason is None else piece + text.finish()


def _completion(outputs: list[TokenOutput]) -> Completion:
    reason = outputs[-1].finish_reason
    assert reason is not None  # every request that was accepted ends
    logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    return Completion(
        token_ids=[output.token_id for output in outputs],
        finish_reason=reason,
        logprobs=logprobs or None,
    )


def _default_sampler() -> Sampler:
    # imported here, because the engine itself needs no torch
    from reblock.engine.sampler import TorchSampler

    return TorchSampler()
