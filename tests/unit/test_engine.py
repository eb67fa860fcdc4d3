from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

import pytest

from fakes import (
    ByteTokenizer,
    FakeRunner,
    FakeSampler,
    check_contents,
    continue_alone,
    make_limits,
)
from loaded_modules import modules_loaded_by
from reblock.engine import Engine, SamplingParams, TokenOutput
from reblock.errors import DoesNotFit, InvalidBlockCount, RequestTooLarge, UsageError

if TYPE_CHECKING:
    from reblock.engine.detokenizer import Detokenizer


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
    with pytest.raises(UsageError, match="needs an idle engine"):
        engine.generate([[1]], params_of(1))


def test_integrity_check_finds_a_request_that_the_engine_forgot(engines: list[Engine]) -> None:
    engine = make_engine()
    engines.clear()
    request_id = engine.add([1], params_of(1))
    del engine._live[request_id]
    with pytest.raises(RuntimeError, match="has 0 requests but the scheduler 1"):
        engine.check_integrity()


def answers_of(engine: Engine) -> dict[int, list[TokenOutput]]:
    outputs: dict[int, list[TokenOutput]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def byte_detokenizer() -> Detokenizer:
    return ByteTokenizer().detokenizer([])


def shown_bytes(token_ids: list[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def test_an_answer_comes_with_its_text_as_it_grows() -> None:
    engine = make_engine()
    request_id = engine.add([1, 2], params_of(8), detokenizer=byte_detokenizer())
    outputs = answers_of(engine)[request_id]
    assert "".join(output.text for output in outputs) == shown_bytes(continue_alone([1, 2], 8))
    assert sum(output.text != "" for output in outputs) > 1


def test_the_token_that_ends_an_answer_is_no_part_of_its_text() -> None:
    alone = continue_alone([1, 2], 8)
    engine = make_engine(eos_token_ids=(alone[3],))
    request_id = engine.add([1, 2], params_of(8), detokenizer=byte_detokenizer())
    outputs = answers_of(engine)[request_id]
    assert [output.token_id for output in outputs] == alone[:4]
    assert "".join(output.text for output in outputs) == shown_bytes(alone[:3])


def ascii_prompt(length: int) -> tuple[list[int], str]:
    """A prompt whose answer begins with `length` characters that are one token each."""
    for first in range(1, 10_000):
        prompt = [first % 256, first // 256]
        answer = continue_alone(prompt, length)
        if all(32 <= token_id < 127 for token_id in answer) and len(set(answer)) == length:
            return prompt, shown_bytes(answer)
    raise AssertionError("there is none")


@pytest.mark.parametrize("num_characters", [1, 2])
def test_a_stop_string_ends_an_answer_and_is_no_part_of_its_text(num_characters: int) -> None:
    prompt, text = ascii_prompt(4)
    stop = text[1 : 1 + num_characters]
    engine = make_engine()
    params = SamplingParams(max_new_tokens=9, stop=("never", stop))
    request_id = engine.add(prompt, params, detokenizer=byte_detokenizer())
    outputs = answers_of(engine)[request_id]
    assert "".join(output.text for output in outputs) == text[0]
    assert len(outputs) == 1 + num_characters
    last = outputs[-1]
    assert (last.finish_reason, last.matched_stop) == ("stop", stop)
    assert engine.num_free_blocks == engine.limits.num_blocks


def test_what_might_become_a_stop_string_is_shown_when_the_answer_ends_without_it() -> None:
    prompt, text = ascii_prompt(4)
    engine = make_engine()
    params = SamplingParams(max_new_tokens=4, stop=(text[2:] + "!",))
    request_id = engine.add(prompt, params, detokenizer=byte_detokenizer())
    outputs = answers_of(engine)[request_id]
    assert [output.text for output in outputs] == [text[0], text[1], "", text[2:]]
    assert (outputs[-1].finish_reason, outputs[-1].matched_stop) == ("length", None)


class FailingDetokenizer:
    """Turns tokens into stars, until it has had so many."""

    def __init__(self, num_good: int) -> None:
        self.num_good = num_good

    def add(self, token_id: int) -> str:
        self.num_good -= 1
        if self.num_good < 0:
            raise OSError("no such token")
        return "*"

    def flush(self) -> str:
        if self.num_good < 1:
            raise OSError("nothing is held")
        return ""


def failing_after(num_good: int) -> Detokenizer:
    return cast("Detokenizer", FailingDetokenizer(num_good))


@pytest.mark.parametrize("num_good", [0, 1, 2, 3])
def test_a_detokenizer_that_raises_ends_its_own_request_and_costs_no_other_a_token(
    num_good: int,
) -> None:
    engine = make_engine(max_batch=4)
    prompts = [[5, 6, 7], [8, 9], [1, 2]]
    first = engine.add(prompts[0], params_of(6))
    failing = engine.add(prompts[1], params_of(6), detokenizer=failing_after(num_good))
    last = engine.add(prompts[2], params_of(6), detokenizer=byte_detokenizer())
    outputs: dict[int, list[TokenOutput]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
        check_contents(engine)
    answers = {key: [output.token_id for output in found] for key, found in outputs.items()}
    assert answers[first] == continue_alone(prompts[0], 6)
    assert answers[last] == continue_alone(prompts[2], 6)
    assert answers[failing] == continue_alone(prompts[1], num_good + 1)
    *before, end = outputs[failing]
    assert [(output.text, output.error) for output in before] == [("*", None)] * num_good
    assert (end.text, end.finish_reason) == ("", "error")
    assert isinstance(end.error, OSError)
    assert engine.num_free_blocks == engine.limits.num_blocks


def test_a_detokenizer_that_raises_at_the_very_end_is_told_too() -> None:
    engine = make_engine()
    request_id = engine.add([1, 2], params_of(3), detokenizer=failing_after(3))
    *_, end = answers_of(engine)[request_id]
    assert (end.finish_reason, str(end.error)) == ("error", "nothing is held")
    engine.check_integrity()


class InterruptingDetokenizer(FailingDetokenizer):
    def add(self, token_id: int) -> str:
        raise KeyboardInterrupt


def test_an_interrupted_step_leaves_no_request_with_more_tokens_than_it_asked_for() -> None:
    engine = make_engine()
    detokenizer = cast("Detokenizer", InterruptingDetokenizer(0))
    engine.add([1, 2], params_of(2), detokenizer=detokenizer)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_work
    engine.check_integrity()


def test_blocks_are_counted_before_the_requests_that_end_return_them() -> None:
    engine = make_engine(prefill_chunk_size=9)
    engine.generate([[1] * 9], params_of(1))
    counters = engine.counters()
    assert (counters.most_used_blocks, counters.num_used_blocks) == (3, 0)


def test_stop_strings_without_a_detokenizer_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(UsageError, match="need a detokenizer"):
        engine.add([1], SamplingParams(max_new_tokens=1, stop=("a",)))
    assert not engine.has_work


def test_log_probabilities_come_with_the_tokens_of_the_requests_that_asked() -> None:
    engine = make_engine()
    asked = engine.add([1, 2], SamplingParams(max_new_tokens=3, logprobs=2))
    other = engine.add([3, 4], params_of(3))
    outputs = answers_of(engine)
    assert [len(output.logprobs.top) for output in outputs[asked] if output.logprobs] == [2] * 3
    assert [output.logprobs for output in outputs[other]] == [None] * 3
    (completion,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=3, logprobs=0))
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 3


def test_several_answers_to_one_prompt_share_its_blocks_and_draw_by_seeds_of_their_own() -> None:
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=5)
    engine = make_engine(max_batch=4, prefill_chunk_size=9)
    prompt = list(range(9))
    ids = engine.add_several(prompt, params, 3, make_detokenizer=byte_detokenizer)
    outputs = answers_of(engine)
    answers = [[output.token_id for output in outputs[request_id]] for request_id in ids]
    assert engine.counters().num_prefilled_tokens == 9 + 1 + 1
    assert engine.counters().num_reused_tokens == 2 * 8
    assert len({tuple(answer) for answer in answers}) == 3
    assert all(output.text for outputs in outputs.values() for output in outputs[-1:])
    for index, answer in enumerate(answers):
        alone = make_engine().generate([prompt], params.for_answer(index))
        assert alone[0].token_ids == answer


def test_several_answers_to_each_prompt_are_returned_prompt_by_prompt() -> None:
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=5)
    prompts = [[1, 2, 3], [4, 5]]
    completions = make_engine().generate(prompts, params, num_answers=2)
    alone = [
        make_engine().generate([prompt], params.for_answer(index))[0]
        for prompt in prompts
        for index in range(2)
    ]
    assert completions == alone
    assert len({tuple(completion.token_ids) for completion in completions}) == 4


@pytest.mark.parametrize(
    "num_answers", [0, -1, 1.5, "2", None, True, pytest.param(-(10**5000), id="-huge")]
)
def test_a_number_of_answers_that_is_none_is_refused(num_answers: Any) -> None:
    engine = make_engine()
    with pytest.raises(UsageError, match="at least one answer"):
        engine.add_several([1], params_of(1), num_answers)
    with pytest.raises(UsageError, match="at least one answer"):
        engine.generate([[1]], params_of(1), num_answers=num_answers)
    assert not engine.has_work


def test_of_several_answers_none_is_queued_where_a_detokenizer_cannot_be_made() -> None:
    engine = make_engine()
    made: list[Detokenizer] = []

    def make() -> Detokenizer:
        if made:
            raise OSError("no second one")
        made.append(byte_detokenizer())
        return made[0]

    with pytest.raises(OSError, match="no second one"):
        engine.add_several([1], params_of(1), 3, make_detokenizer=make)
    assert not engine.has_work
    engine.check_integrity()


def test_a_prompt_that_can_be_read_only_once_has_several_answers() -> None:
    engine = make_engine()
    ids = engine.add_several(iter([1, 2]), params_of(3), 2)
    assert run_to_end(engine)[0] == dict.fromkeys(ids, continue_alone([1, 2], 3))


@pytest.mark.parametrize("prompt_ids", [[1, 256], [-1], ["1"], None])
def test_what_the_model_cannot_read_is_refused_and_the_others_are_served(prompt_ids: Any) -> None:
    engine = make_engine()
    request_id = engine.add([1, 255, 0], params_of(3))
    for refuse in (
        lambda: engine.add(prompt_ids, params_of(3)),
        lambda: engine.add_several(prompt_ids, params_of(3), 2),
        lambda: make_engine().generate([[1], prompt_ids], params_of(3)),
    ):
        with pytest.raises(UsageError, match="token id"):
            refuse()
    assert run_to_end(engine)[0] == {request_id: continue_alone([1, 255, 0], 3)}


def test_several_answers_that_do_not_fit_are_refused_together() -> None:
    engine = make_engine()
    with pytest.raises(RequestTooLarge):
        engine.add_several([1], params_of(16), 3)
    assert not engine.has_work


def test_a_sampled_answer_is_the_same_though_it_was_preempted() -> None:
    params = SamplingParams(max_new_tokens=13, temperature=1.0, seed=3)
    sizes = {"max_seq_len": 99, "prefill_chunk_size": 9}
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    undisturbed = [make_engine(**sizes).generate([prompt], params)[0] for prompt in prompts]
    engine = make_engine(num_blocks=5, **sizes)
    assert engine.generate(prompts, params) == undisturbed
    assert engine.counters().num_preemptions > 0


@pytest.mark.parametrize("num_blocks", [4, 5, 8, 9, 50])
def test_answers_go_on_as_if_nothing_had_been_when_the_cache_is_resized(num_blocks: int) -> None:
    runner = FakeRunner(make_limits(max_batch=3))
    engine = Engine(runner, sampler=FakeSampler())
    prompts = {engine.add([number] * 5, params_of(11)): [number] * 5 for number in range(4)}
    token_ids: dict[int, list[int]] = defaultdict(list)
    sizes = itertools.cycle([num_blocks, 8])
    while engine.has_work:
        for output in engine.step():
            token_ids[output.request_id].append(output.token_id)
        engine.resize_kvcache(next(sizes))
        engine.check_integrity()
        check_contents(engine)
    assert engine.limits == runner.limits
    assert token_ids == {i: continue_alone(prompt, 11) for i, prompt in prompts.items()}


def test_a_resize_that_a_live_request_could_not_survive_changes_nothing() -> None:
    engine = make_engine()
    request_id = engine.add([1] * 9, params_of(5))  # 13 tokens, 4 blocks
    engine.step()
    with pytest.raises(DoesNotFit, match=f"request {request_id} .* ask for at least 4"):
        engine.resize_kvcache(3)
    assert engine.limits.num_blocks == 8
    assert run_to_end(engine)[0] == {request_id: continue_alone([1] * 9, 5)}
    engine.resize_kvcache(3)
    assert engine.limits.num_blocks == 3
    with pytest.raises(RequestTooLarge, match="the KV cache has 3"):
        engine.add([1] * 9, params_of(5))


def test_a_resize_that_the_system_refuses_changes_no_answer() -> None:
    runner = FakeRunner(make_limits())
    runner.most_blocks = 8
    engine = Engine(runner, sampler=FakeSampler())
    request_id = engine.add([1] * 5, params_of(8))
    engine.step()
    with pytest.raises(DoesNotFit, match="memory for 8 blocks"):
        engine.resize_kvcache(9)
    assert engine.limits.num_blocks == runner.limits.num_blocks == 8
    assert run_to_end(engine)[0] == {request_id: continue_alone([1] * 5, 8)}


def test_a_resize_to_the_same_size_asks_nothing_of_the_runner() -> None:
    runner = FakeRunner(make_limits())
    runner.most_blocks = 0
    Engine(runner, sampler=FakeSampler()).resize_kvcache(8)


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 1.5, True, "x"])
def test_a_resize_to_no_number_of_blocks_is_a_usage_error(num_blocks: Any) -> None:
    with pytest.raises(InvalidBlockCount):
        make_engine().resize_kvcache(num_blocks)


def test_counters_add_up() -> None:
    engine = make_engine()
    first = engine.counters()
    assert (first.num_blocks, first.num_free_blocks) == (8, 8)
    assert (first.num_prefilled_tokens, first.num_decoded_tokens, first.programs_ns) == (0, 0, 0)
    engine.generate([[1, 2, 3, 4, 5]], params_of(4))
    engine.add([1, 2, 3, 4, 5, 6], params_of(3))
    engine.step()
    counters = engine.counters()
    assert (counters.num_running, counters.num_waiting, counters.num_preemptions) == (1, 0, 0)
    # The last token of an answer is read by nobody.
    assert counters.num_prefilled_tokens == 5 + 2
    assert counters.num_reused_tokens == 4
    assert counters.num_decoded_tokens == 3
    assert counters.num_used_blocks == 2
    total = counters.num_free_blocks + counters.num_used_blocks + counters.num_cached_blocks
    assert total == counters.num_blocks
    assert min(counters.scheduler_ns, counters.programs_ns, counters.sampler_ns) > 0


def test_an_engine_that_lost_a_block_says_so_when_it_becomes_idle(engines: list[Engine]) -> None:
    engine = make_engine()
    engines.clear()
    engine.add([1], params_of(1))
    engine._scheduler._tables.pool.allocate(1)
    with pytest.raises(RuntimeError, match="are handed out"):
        engine.step()


def test_the_engine_package_loads_neither_torch_nor_transformers() -> None:
    imports = "reblock.engine, reblock.engine.text, reblock.cli.generate"
    assert modules_loaded_by(imports, "torch", "transformers", "numpy") == []
