from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from fakes import VOCAB_SIZE, FakeRunner, FakeSampler, check_contents, make_limits
from reblock.bench import replay as replay_module
from reblock.bench.clock import SkippingClock
from reblock.bench.document import as_document
from reblock.bench.replay import peak_bytes, replay
from reblock.bench.report import Percentiles
from reblock.bench.trace import Trace, TraceRequest
from reblock.engine.engine import Engine
from reblock.engine.request import SamplingParams

if TYPE_CHECKING:
    from reblock.bench.report import BenchReport
    from reblock.engine.limits import EngineLimits

S = 10**9
PREFILL_NS, DECODE_NS = 10 * S, 1 * S


class FakeClock:
    """Stands still but for what is passed and what the fake programs take."""

    def __init__(self) -> None:
        self.time_ns = 123_456
        self.passed: list[int] = []

    def now_ns(self) -> int:
        return self.time_ns

    def pass_ns(self, duration_ns: int) -> None:
        self.passed.append(duration_ns)
        self.time_ns += duration_ns


class TimedRunner(FakeRunner):
    """Takes 10 s for a chunk and 1 s for a decoding step, and remembers the first chunks."""

    def __init__(self, limits: EngineLimits, clock: FakeClock) -> None:
        super().__init__(limits)
        self.first_chunks: list[list[int]] = []
        self._clock = clock

    def prefill(self, token_ids: list[int], start: int, block_table: list[int], slot: int) -> Any:
        self._clock.time_ns += PREFILL_NS
        if start == 0:
            self.first_chunks.append(token_ids)
        return super().prefill(token_ids, start, block_table, slot)

    def decode(self, *arguments: Any) -> Any:
        self._clock.time_ns += DECODE_NS
        return super().decode(*arguments)


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    return Trace(
        requests=tuple(
            TraceRequest(arrival_s=arrival, num_prompt_tokens=prompt, num_new_tokens=new)
            for arrival, prompt, new in requests
        )
    )


class Bench:
    """An engine on a fake clock; chunks are of 3 tokens and blocks of 4."""

    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock()
        self.runner = TimedRunner(make_limits(**changes), self.clock)
        self.engine = Engine(self.runner, sampler=FakeSampler())

    def run(self, *requests: tuple[float, int, int], **changes: Any) -> BenchReport:
        arguments: dict[str, Any] = {"clock": self.clock, "seed": 1}
        return replay(self.engine, trace_of(*requests), **{**arguments, **changes})


def seconds(values: tuple[int, ...]) -> list[float]:
    return [value / S for value in values]


def test_one_request_is_timed_from_its_arrival() -> None:
    report = Bench().run((0.0, 5, 3))
    (times,) = report.requests
    assert seconds(times.token_ns) == [20, 21, 22]  # two chunks, two steps
    assert times.ns_per_token == 1 * S
    assert report.duration_ns == 22 * S
    assert report.idle_ns == 0
    assert (report.num_prompt_tokens, report.num_new_tokens) == (5, 3)
    assert report.per_second(report.num_new_tokens) == 3 / 22


def test_two_requests_at_once_wait_for_each_other_as_they_do_in_the_engine() -> None:
    report = Bench().run((0.0, 3, 3), (0.0, 3, 2))
    # chunk of the first, step of the first, chunk of the second, step of both
    assert [seconds(times.token_ns) for times in report.requests] == [[10, 11, 22], [21, 22]]
    assert report.requests[0].gaps_ns == [1 * S, 11 * S]
    assert report.most_running == 2
    assert report.counters.most_used_blocks == 3  # in the last step, with which both end
    counters = report.counters
    assert (counters.num_prefilled_tokens, counters.num_decoded_tokens) == (6, 3)
    assert (counters.num_free_blocks, counters.num_used_blocks) == (6, 0)


def test_a_request_that_ends_with_its_first_token_ran_beside_the_others() -> None:
    assert Bench().run((0.0, 3, 1)).most_running == 1
    assert Bench().run((0.0, 3, 3), (0.0, 3, 1)).most_running == 2


def test_blocks_of_requests_that_end_with_their_first_token_were_used() -> None:
    assert Bench().run((0.0, 3, 1), (0.0, 3, 1)).counters.most_used_blocks == 1
    assert Bench(prefill_chunk_size=9).run((0.0, 9, 1)).counters.most_used_blocks == 3


def test_what_arrives_within_a_step_waits_from_its_arrival_on() -> None:
    report = Bench().run((0.0, 3, 1), (4.0, 3, 1))
    assert [seconds(times.token_ns) for times in report.requests] == [[10], [16]]
    assert report.duration_ns == 20 * S


def test_an_idle_engine_passes_the_time_until_the_next_request_and_counts_it() -> None:
    bench = Bench()
    report = bench.run((2.0, 3, 1), (30.0, 3, 1))
    assert bench.clock.passed == [2 * S, 18 * S]
    assert report.idle_ns == 20 * S
    assert report.duration_ns == 40 * S
    assert report.busy_ns == 20 * S
    assert [seconds(times.token_ns) for times in report.requests] == [[10], [10]]
    assert report.share_of_busy(5 * S) == 0.25


def test_time_is_not_passed_while_the_engine_has_a_request() -> None:
    bench = Bench()
    bench.run((0.0, 3, 6), (14.5, 3, 1))
    assert bench.clock.passed == []


def test_requests_that_can_never_fit_are_reported_and_the_others_served() -> None:
    # 16 tokens at most by max_seq_len; by blocks, 3 of 4 tokens and one that is not stored, 13
    bench = Bench(num_blocks=3)
    report = bench.run((0.0, 12, 2), (0.0, 12, 1), (1.0, 2**31 - 1, 1))
    assert [times.is_refused for times in report.requests] == [True, False, True]
    assert [request.num_prompt_tokens for request in report.refused] == [12, 2**31 - 1]
    assert len(report.completed) == 1
    assert report.num_prompt_tokens == 12


def test_what_is_left_out_is_what_the_engine_itself_would_refuse() -> None:
    for num_blocks in (1, 2, 3, 4, 8):
        for num_prompt in range(1, 20):
            engine = Bench(num_blocks=num_blocks).engine
            report = Bench(num_blocks=num_blocks).run((0.0, num_prompt, 1))
            try:
                engine.abort(engine.add([1] * num_prompt, SamplingParams(max_new_tokens=1)))
                is_refused = False
            except ValueError:
                is_refused = True
            assert report.requests[0].is_refused is is_refused


def test_a_trace_of_which_nothing_fits_has_a_report_of_nothing() -> None:
    report = Bench().run((3.0, 20, 1))
    assert report.first_token is None
    assert report.per_token is None
    assert report.between_tokens is None
    assert report.completion is None
    assert report.busy_ns == 0
    assert report.share_of_busy(1) == 0
    assert report.duration_ns == report.idle_ns == 3 * S
    assert Bench().run((0.0, 20, 1)).per_second(1) == 0


def test_no_token_ends_an_answer() -> None:
    report = Bench(eos_token_ids=tuple(range(VOCAB_SIZE))).run((0.0, 2, 9))
    assert report.num_new_tokens == 9


def test_prompts_are_the_same_for_a_seed_whatever_else_is_served() -> None:
    first, second, other = Bench(), Bench(), Bench()
    first.run((0.0, 30, 1), (0.0, 3, 1), (0.0, 2, 1))
    second.run((0.0, 3, 1), (0.0, 3, 1), (0.0, 3, 1))
    other.run((0.0, 3, 1), (0.0, 3, 1), (0.0, 3, 1), seed=2)
    assert first.runner.first_chunks[0] == second.runner.first_chunks[1]
    assert len(set(map(tuple, second.runner.first_chunks))) == 3
    assert second.runner.first_chunks != other.runner.first_chunks


def test_prompts_are_of_all_tokens_of_the_vocabulary_and_no_others() -> None:
    bench = Bench(prefill_chunk_size=16, vocab_size=5)
    bench.run(*[(0.0, 15, 1)] * 20)
    assert {token for chunk in bench.runner.first_chunks for token in chunk} == set(range(5))


def test_preemptions_are_served_to_the_end_and_counted() -> None:
    # Two answers grow to 4 blocks each, and there are 5.
    bench = Bench(num_blocks=5, max_batch=2)
    report = bench.run((0.0, 3, 13), (0.0, 3, 13))
    assert report.counters.num_preemptions > 0
    assert [len(times.token_ns) for times in report.requests] == [13, 13]
    assert report.counters.most_used_blocks == 5
    assert report.counters.num_prefilled_tokens + report.counters.num_reused_tokens > 6


def test_the_number_of_ended_requests_is_told_after_every_step() -> None:
    told: list[int] = []
    bench = Bench()
    bench.run((0.0, 3, 2), (0.0, 20, 1), on_step=told.append)
    assert told == [1, 2]


def test_a_replay_that_is_interrupted_leaves_the_engine_without_requests() -> None:
    bench = Bench()

    def interrupt(_num_ended: int) -> None:
        check_contents(bench.engine)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run((0.0, 3, 5), (0.0, 3, 5), on_step=interrupt)
    assert not bench.engine.has_work


def test_an_engine_that_has_requests_is_refused() -> None:
    bench = Bench()
    bench.engine.add([1], SamplingParams(max_new_tokens=1))
    with pytest.raises(RuntimeError, match="without requests"):
        bench.run((0.0, 3, 1))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7], (7, 7, 7, 7)),
        ([2, 1], (1, 2, 2, 2)),
        (list(range(10, 0, -1)), (5, 9, 10, 10)),
        (list(range(1, 101)), (50, 90, 99, 100)),
        (list(range(1, 202)), (101, 181, 199, 201)),
    ],
)
def test_percentiles_are_by_nearest_rank(values: list[int], expected: tuple[int, ...]) -> None:
    found = Percentiles.of(values)
    assert found is not None
    assert (found.p50_ns, found.p90_ns, found.p99_ns, found.max_ns) == expected


def test_the_skipping_clock_goes_on_and_is_put_forward() -> None:
    clock = SkippingClock()
    before = clock.now_ns()
    clock.pass_ns(10**18)
    assert clock.now_ns() >= before + 10**18


def test_the_most_memory_is_what_the_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peak_bytes()
    assert found is None or found > 2**20

    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(replay_module, "open", refuse, raising=False)
    assert peak_bytes() is None


def test_the_document_has_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "peak_bytes", lambda: 4096)
    document = json.loads(json.dumps(as_document(Bench().run((0.0, 5, 3), (30.0, 20, 1)))))
    assert document.pop("reblock_version")
    parts = document.pop("time_in")
    assert list(parts) == ["scheduler", "programs", "sampler"]
    assert all(part["seconds"] > 0 and part["share_of_busy"] > 0 for part in parts.values())
    once = dict.fromkeys(("p50", "p90", "p99", "max"), 20.0)
    one = dict.fromkeys(once, 1.0)
    assert document == {
        "schema_version": 1,
        "limits": {
            "num_blocks": 8,
            "block_size": 4,
            "max_seq_len": 16,
            "max_batch": 2,
            "max_request_tokens": 16,
        },
        "kv_bytes": 4096,
        "peak_bytes": 4096,
        "seed": 1,
        "num_requests": 2,
        "num_completed": 1,
        "num_refused": 1,
        "num_prompt_tokens": 5,
        "num_new_tokens": 3,
        "duration_s": 30.0,
        "idle_s": 8.0,
        "requests_per_s": 1 / 30,
        "prompt_tokens_per_s": 5 / 30,
        "new_tokens_per_s": 0.1,
        "most_running": 1,
        "most_used_blocks": 2,
        "time_to_first_token_s": once,
        "time_per_output_token_s": one,
        "time_between_tokens_s": one,
        "time_to_completion_s": dict.fromkeys(once, 22.0),
        "counters": {
            "num_blocks": 8,
            "num_free_blocks": 7,
            "num_used_blocks": 0,
            "num_cached_blocks": 1,
            "num_running": 0,
            "num_waiting": 0,
            "num_preemptions": 0,
            "num_prefilled_tokens": 5,
            "num_reused_tokens": 0,
            "num_decoded_tokens": 2,
        },
        "requests": [
            {
                "arrival_s": 0.0,
                "num_prompt_tokens": 5,
                "num_new_tokens": 3,
                "is_refused": False,
                "first_token_s": 20.0,
                "completed_s": 22.0,
            },
            {
                "arrival_s": 30.0,
                "num_prompt_tokens": 20,
                "num_new_tokens": 1,
                "is_refused": True,
                "first_token_s": None,
                "completed_s": None,
            },
        ],
    }
