"""Whatever comes in whatever order, every request is answered as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes import VOCAB_SIZE, FakeRunner, FakeSampler, answer_alone, check_contents, make_limits
from reblock.engine import Engine, SamplingParams
from reblock.errors import DoesNotFit, RequestTooLarge

# Prompts begin alike, up to any place in a block.
STEMS = [[7, 7, 7, 1, 2, 3, 4, 5, 6, 0, 0, 0], [7, 7, 7, 1, 9, 9, 9, 9], [3]]


class Trial:
    """An engine under test, and what is known of every request that it accepted."""

    def __init__(self, **sizes: Any) -> None:
        self.runner = FakeRunner(make_limits(**sizes))
        self.engine = Engine(self.runner, sampler=FakeSampler())
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.num_answered = 0
        self._oldest: tuple[int, int] | None = None
        self._steps_without_progress = 0

    def add(self, prompt_ids: list[int], params: SamplingParams) -> None:
        limits = self.engine.limits
        num_tokens = len(prompt_ids) + params.max_new_tokens
        if num_tokens > limits.max_request_tokens:
            with pytest.raises(RequestTooLarge):
                self.engine.add(prompt_ids, params)
            return
        request_id = self.engine.add(prompt_ids, params)
        self.asked[request_id] = (prompt_ids, params)
        self.token_ids[request_id] = []

    def abort(self, request_id: int) -> None:
        assert self.engine.abort(request_id)
        prompt_ids, params = self.asked.pop(request_id)
        got = self.token_ids.pop(request_id)
        eos_token_ids = self.engine.limits.eos_token_ids
        assert answer_alone(prompt_ids, params, eos_token_ids)[: len(got)] == got

    def step(self) -> None:
        for output in self.engine.step():
            self.token_ids[output.request_id].append(output.token_id)
            if output.finished:
                prompt_ids, params = self.asked.pop(output.request_id)
                got = self.token_ids.pop(output.request_id)
                assert got == answer_alone(prompt_ids, params, self.engine.limits.eos_token_ids)
                self.num_answered += 1
        self._check_progress()

    def resize(self, num_blocks: int) -> None:
        limits = self.engine.limits
        needed = max(
            (
                limits.num_blocks_for(len(prompt_ids) + params.max_new_tokens - 1)
                for prompt_ids, params in self.asked.values()
            ),
            default=1,
        )
        if needed > num_blocks:
            with pytest.raises(DoesNotFit, match=f"ask for at least {needed}"):
                self.engine.resize_kvcache(num_blocks)
            assert self.engine.limits == limits
            return
        self.engine.resize_kvcache(num_blocks)
        assert self.engine.limits.num_blocks == self.runner.limits.num_blocks == num_blocks

    def check(self) -> None:
        self.engine.check_integrity()
        check_contents(self.engine)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
            self.check()
        assert not self.asked
        assert self.engine.num_free_blocks == self.engine.limits.num_blocks

    def _check_progress(self) -> None:
        """The oldest request gets its turn in every second step at the latest, so it ends."""
        running = self.engine._scheduler._running
        oldest = (running[0].request_id, running[0].num_computed) if running else None
        is_stuck = oldest is not None and oldest == self._oldest
        self._steps_without_progress = self._steps_without_progress + 1 if is_stuck else 0
        assert self._steps_without_progress < 2
        self._oldest = oldest


class EngineMachine(RuleBasedStateMachine):
    """Every order of adding, stepping, aborting, failing and resizing."""

    @initialize(
        num_blocks=st.integers(1, 9),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_batch=st.integers(1, 4),
        prefill_chunk_size=st.integers(1, 6),
        eos_token_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=20).map(tuple),
        has_rings=st.booleans(),
    )
    def start(self, **sizes: Any) -> None:
        self.trial = Trial(max_seq_len=40, **sizes)

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 12),
        rest=st.lists(st.integers(0, 2), max_size=6),
        max_new_tokens=st.integers(1, 14),
        seed=st.none() | st.integers(0, 3),
        count=st.integers(1, 3),
    )
    def add(
        self,
        stem: list[int],
        cut: int,
        rest: list[int],
        max_new_tokens: int,
        seed: int | None,
        count: int,
    ) -> None:
        params = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=0.0 if seed is None else 1.0, seed=seed
        )
        for index in range(count):
            self.trial.add(stem[:cut] + rest, params.for_answer(index))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.trial.step()

    @precondition(lambda self: self.trial.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.trial.abort(data.draw(st.sampled_from(sorted(self.trial.asked))))

    @rule(num_blocks=st.integers(1, 14))
    def resize(self, num_blocks: int) -> None:
        self.trial.resize(num_blocks)

    @precondition(lambda self: self.trial.engine.has_work)
    @rule()
    def fail(self) -> None:
        self.trial.runner.fail_next = True
        with pytest.raises(OSError, match="gone away"):
            self.trial.engine.step()

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "trial"):
            self.trial.check()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)


@pytest.mark.parametrize("has_rings", [False, True])
def test_ten_thousand_random_requests_through_a_small_pool_all_end_with_their_own_answers(
    has_rings: bool,
) -> None:
    num_requests = 2_000 if has_rings else 10_000
    choose = random.Random(20)
    trial = Trial(
        num_blocks=9,
        max_seq_len=40,
        max_batch=4,
        decoder_batch_sizes=(4, 2, 1),
        prefill_chunk_size=6,
        eos_token_ids=(5, 50),
        has_rings=has_rings,
    )
    num_aborted = num_added = 0
    while num_added < num_requests or trial.engine.has_work:
        if num_added < num_requests and trial.engine.num_waiting < 6:
            num_added += 1
            stem = choose.choice(STEMS)[: choose.randrange(1, 13)]
            prompt_ids = stem + [choose.randrange(3) for _ in range(choose.randrange(6))]
            params = SamplingParams(
                max_new_tokens=choose.randrange(1, 17),
                temperature=choose.choice([0.0, 1.0]),
                seed=num_added,
            )
            trial.add(prompt_ids, params)
        if trial.asked and choose.random() < 0.01:
            trial.abort(choose.choice(sorted(trial.asked)))
            num_aborted += 1
        if choose.random() < 0.01:
            trial.resize(choose.randrange(4, 12))
        trial.step()
        if choose.random() < 0.05:
            trial.check()
    trial.finish()
    counters = trial.engine.counters()
    assert trial.num_answered + num_aborted <= num_requests
    assert trial.num_answered > num_requests * 0.9
    assert counters.num_preemptions > num_requests // 100
    assert has_rings == (counters.num_reused_tokens == 0)
