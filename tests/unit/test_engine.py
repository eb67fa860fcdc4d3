from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reblock
from fakes import (
    VOCAB_SIZE,
    FakeRunner,
    FakeSampler,
    continue_alone,
    make_limits,
)
from reblock.engine import Engine, SamplingParams
from reblock.errors import RequestTooLarge, UsageError


def make_engine(**changes: Any) -> Engine:
    return Engine(FakeRunner(make_limits(**changes)), sampler=FakeSampler())


def params_of(max_new_tokens: int, *, ignore_eos: bool = False) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)


def run_to_end(engine: Engine) -> tuple[dict[int, list[int]], dict[int, str]]:
    token_ids: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, str] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in reasons, "nothing comes after the last token"
            token_ids[output.request_id].append(output.token_id)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
    assert engine.num_free_blocks == engine.limits.num_blocks
    return dict(token_ids), reasons


def test_one_request_is_answered_as_without_paging() -> None:
    engine = make_engine()
    request_id = engine.add([1, 2, 3, 4, 5], params_of(6))
    token_ids, reasons = run_to_end(engine)
    assert token_ids == {request_id: continue_alone([1, 2, 3, 4, 5], 6)}
    assert reasons == {request_id: "length"}


@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_a_request_that_fills_the_pool_ends_and_so_does_the_one_behind_it(num_blocks: int) -> None:
    # blocks of 4: a request of exactly num_blocks blocks, with the unstored last token on top
    engine = make_engine(num_blocks=num_blocks, max_seq_len=64)
    prompt_ids = list(range(num_blocks * 4 - 2))
    first = engine.add(prompt_ids, params_of(3))
    second = engine.add([9], params_of(2))
    token_ids, _ = run_to_end(engine)
    assert token_ids[first] == continue_alone(prompt_ids, 3)
    assert token_ids[second] == continue_alone([9], 2)
    with pytest.raises(RequestTooLarge, match=f"the KV cache has {num_blocks}"):
        engine.add(prompt_ids, params_of(4))


def test_tokens_of_two_requests_come_out_in_turns() -> None:
    engine = make_engine()
    ids = {engine.add([7], params_of(4)), engine.add([8], params_of(4))}
    outputs = []
    while engine.has_work:
        outputs.append({output.request_id for output in engine.step()})
    assert ids in outputs


def test_a_request_that_waited_reuses_blocks_without_seeing_what_was_in_them() -> None:
    engine = make_engine(num_blocks=2, max_batch=2)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [1, 6, 1, 8, 0]]
    ids = [engine.add(prompt, params_of(3)) for prompt in prompts]
    assert engine.step() == []
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    token_ids, _ = run_to_end(engine)
    assert [token_ids[i] for i in ids] == [continue_alone(prompt, 3) for prompt in prompts]


def test_an_eos_token_ends_a_request_early_and_is_given_out() -> None:
    alone = continue_alone([1, 2], 8)
    engine = make_engine(eos_token_ids=(alone[2],))
    request_id = engine.add([1, 2], params_of(8))
    token_ids, reasons = run_to_end(engine)
    assert token_ids[request_id] == alone[: alone.index(alone[2]) + 1]
    assert reasons == {request_id: "stop"}


def test_an_eos_token_as_first_token_ends_a_request_at_once() -> None:
    first = continue_alone([1, 2], 1)[0]
    engine = make_engine(eos_token_ids=(first,))
    engine.add([1, 2], params_of(8))
    outputs = engine.step()
    assert [(output.token_id, output.finished) for output in outputs] == [(first, True)]
    assert not engine.has_work


def test_ignore_eos_goes_on_to_the_full_length() -> None:
    alone = continue_alone([1, 2], 8)
    engine = make_engine(eos_token_ids=(alone[2],))
    request_id = engine.add([1, 2], params_of(8, ignore_eos=True))
    token_ids, reasons = run_to_end(engine)
    assert token_ids[request_id] == alone
    assert reasons == {request_id: "length"}


def test_eos_tokens_given_to_the_engine_replace_those_of_the_limits() -> None:
    alone = continue_alone([1, 2], 8)
    runner = FakeRunner(make_limits(eos_token_ids=(alone[0],)))
    engine = Engine(runner, eos_token_ids=[alone[1]], sampler=FakeSampler())
    engine.add([1, 2], params_of(8))
    token_ids, _ = run_to_end(engine)
    assert list(token_ids.values()) == [alone[:2]]


def test_a_request_of_one_token_takes_no_decoding() -> None:
    runner = FakeRunner(make_limits())
    engine = Engine(runner, sampler=FakeSampler())
    engine.add([1, 2], params_of(1))
    run_to_end(engine)
    assert runner.calls == [("prefill", 0)]


def test_an_empty_prompt_is_refused_and_leaves_the_engine_idle() -> None:
    engine = make_engine()
    with pytest.raises(UsageError, match="no tokens"):
        engine.add([], params_of(1))
    assert not engine.has_work


def test_a_refused_request_leaves_those_before_it_alone() -> None:
    engine = make_engine()
    request_id = engine.add([1], params_of(3))
    with pytest.raises(RequestTooLarge):
        engine.add([1], params_of(16))
    engine.check_integrity()
    token_ids, _ = run_to_end(engine)
    assert token_ids == {request_id: continue_alone([1], 3)}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_aborting_at_any_time_frees_the_blocks_and_nobody_else_notices(num_steps: int) -> None:
    engine = make_engine()
    aborted = engine.add([1, 2, 3, 4, 5], params_of(6))
    kept = engine.add([6, 7], params_of(5))
    kept_ids = []
    for _ in range(num_steps):
        kept_ids += [out.token_id for out in engine.step() if out.request_id == kept]
    assert engine.abort(aborted)
    engine.check_integrity()
    token_ids, _ = run_to_end(engine)
    assert aborted not in token_ids
    assert kept_ids + token_ids[kept] == continue_alone([6, 7], 5)


def test_aborting_what_has_ended_or_never_was_says_so() -> None:
    engine = make_engine()
    request_id = engine.add([1], params_of(1))
    run_to_end(engine)
    assert not engine.abort(request_id)
    assert not engine.abort(99)


def test_a_step_without_work_does_nothing() -> None:
    assert make_engine().step() == []


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_a_step_that_fails_can_be_repeated(num_steps: int) -> None:
    runner = FakeRunner(make_limits())
    engine = Engine(runner, sampler=FakeSampler())
    prompts = {engine.add(prompt, params_of(4)): prompt for prompt in ([1, 2, 3, 4], [5])}
    token_ids: dict[int, list[int]] = defaultdict(list)
    for _ in range(num_steps):
        for output in engine.step():
            token_ids[output.request_id].append(output.token_id)
    runner.fail_next = True
    with pytest.raises(OSError, match="gone away"):
        engine.step()
    engine.check_integrity()
    for request_id, rest in run_to_end(engine)[0].items():
        token_ids[request_id] += rest
    assert token_ids == {i: continue_alone(prompt, 4) for i, prompt in prompts.items()}


def test_generate_returns_the_answers_in_the_order_of_the_prompts() -> None:
    engine = make_engine(num_blocks=3)
    prompts = [[5] * 7, [1], [2, 2]]
    completions = engine.generate(prompts, params_of(4))
    assert [c.token_ids for c in completions] == [continue_alone(p, 4) for p in prompts]
    assert {c.finish_reason for c in completions} == {"length"}


def test_generate_runs_nothing_when_one_prompt_is_refused() -> None:
    runner = FakeRunner(make_limits())
    engine = Engine(runner, sampler=FakeSampler())
    with pytest.raises(RequestTooLarge):
        engine.generate([[1], [2] * 16], params_of(4))
    assert runner.calls == []
    assert not engine.has_work
    engine.check_integrity()


def test_generate_frees_everything_when_the_runner_fails() -> None:
    runner = FakeRunner(make_limits())
    engine = Engine(runner, sampler=FakeSampler())
    runner.fail_next = True
    with pytest.raises(OSError, match="gone away"):
        engine.generate([[1], [2]], params_of(4))
    engine.check_integrity()
    assert engine.num_free_blocks == 8


def test_generate_refuses_to_mix_with_other_requests() -> None:
    engine = make_engine()
    engine.add([1], params_of(1))
    with pytest.raises(RuntimeError, match="idle engine"):
        engine.generate([[1]], params_of(1))


def test_integrity_check_finds_a_request_that_the_engine_forgot(engines: list[Engine]) -> None:
    engine = make_engine()
    engines.clear()
    request_id = engine.add([1], params_of(1))
    del engine._live[request_id]
    with pytest.raises(RuntimeError, match="has 0 requests but the scheduler 1"):
        engine.check_integrity()


class Trial:
    """An engine under test, with what is known of every request that it accepted."""

    def __init__(self, engine: Engine, eos_token_ids: tuple[int, ...]) -> None:
        self.engine = engine
        self.eos_token_ids = eos_token_ids
        self.expected: dict[int, list[int]] = {}
        self.token_ids: dict[int, list[int]] = defaultdict(list)
        self.abort_at: dict[int, int] = {}
        self.ended: set[int] = set()
        self.num_steps = 0
        self.most_steps = 0

    def add(self, prompt_ids: list[int], max_new_tokens: int, abort_after: int | None) -> None:
        limits = self.engine.limits
        num_tokens = len(prompt_ids) + max_new_tokens
        num_storable = limits.num_blocks * limits.block_size
        if num_tokens > limits.max_seq_len or num_tokens - 1 > num_storable:
            with pytest.raises(RequestTooLarge):
                self.engine.add(prompt_ids, params_of(max_new_tokens))
            return
        request_id = self.engine.add(prompt_ids, params_of(max_new_tokens))
        self.expected[request_id] = continue_alone(prompt_ids, max_new_tokens, self.eos_token_ids)
        # each step reads a prompt token or makes one of an answer, for one request or more
        self.most_steps = max(self.most_steps, self.num_steps) + num_tokens
        if abort_after is not None:
            self.abort_at[request_id] = self.num_steps + abort_after

    def step(self) -> None:
        self._abort_what_is_due()
        had_work = self.engine.has_work
        self.num_steps += 1
        for output in self.engine.step():
            assert output.request_id not in self.ended
            self.token_ids[output.request_id].append(output.token_id)
            if output.finished:
                self.ended.add(output.request_id)
        self.engine.check_integrity()
        assert not had_work or self.num_steps <= self.most_steps, "every step makes progress"

    def _abort_what_is_due(self) -> None:
        for request_id, when in self.abort_at.items():
            if when == self.num_steps:
                assert self.engine.abort(request_id) == (request_id not in self.ended)
                self.ended.add(request_id)

    def check_answers(self) -> None:
        assert self.ended >= set(self.expected)
        assert self.engine.num_free_blocks == self.engine.limits.num_blocks
        for request_id, answer in self.expected.items():
            got = self.token_ids[request_id]
            assert got == (answer[: len(got)] if request_id in self.abort_at else answer)


requests = st.tuples(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14),  # prompt
    st.integers(1, 10),  # max_new_tokens
    st.one_of(st.none(), st.none(), st.integers(0, 12)),  # steps until it is aborted
    st.integers(0, 4),  # steps before the next request
)


@settings(deadline=None, max_examples=150)
@given(
    num_blocks=st.integers(1, 7),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_batch=st.integers(1, 4),
    prefill_chunk_size=st.integers(1, 6),
    eos_token_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=40),
    asked=st.lists(requests, max_size=10),
)
def test_random_requests_on_small_pools_all_end_with_the_answer_they_have_alone(
    num_blocks: int,
    block_size: int,
    max_batch: int,
    prefill_chunk_size: int,
    eos_token_ids: set[int],
    asked: list[tuple[list[int], int, int | None, int]],
) -> None:
    engine = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch=max_batch,
        decoder_batch_sizes=(max_batch, 1),
        prefill_chunk_size=prefill_chunk_size,
        eos_token_ids=tuple(eos_token_ids),
    )
    trial = Trial(engine, tuple(eos_token_ids))
    for prompt_ids, max_new_tokens, abort_after, num_between in asked:
        trial.add(prompt_ids, max_new_tokens, abort_after)
        for _ in range(num_between):
            trial.step()
    while engine.has_work:
        trial.step()
    trial.check_answers()


def test_the_engine_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, reblock.engine, reblock.engine.text, reblock.cli.generate\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    source = os.path.dirname(os.path.dirname(reblock.__file__))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stdout.strip() == "[]"
