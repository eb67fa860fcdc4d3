from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from fakes import make_limits
from reblock.bench import trace as trace_module
from reblock.bench.trace import (
    MAX_REQUESTS,
    TokenRange,
    Trace,
    TraceRequest,
    format_trace,
    make_trace,
    read_trace,
)
from reblock.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = make_limits(max_seq_len=64, num_blocks=100)


def request(arrival_s: float = 0.0, num_prompt: int = 3, num_new: int = 2) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, num_prompt_tokens=num_prompt, num_new_tokens=num_new)


def fields(**changes: Any) -> dict[str, Any]:
    return {"arrival_s": 0, "num_prompt_tokens": 3, "num_new_tokens": 2, **changes}


def written(path: Path, text: str) -> str:
    file = path / "trace.json"
    file.write_text(text, encoding="utf-8")
    return str(file)


def make(**changes: Any) -> Trace:
    arguments: dict[str, Any] = {"seed": 7, "num_requests": 200, "limits": LIMITS, **changes}
    return make_trace(**arguments)


@pytest.mark.parametrize("separator", ["array", "lines"])
def test_a_trace_is_read_from_an_array_and_from_lines_and_put_in_order(
    tmp_path: Path, separator: str
) -> None:
    objects = [fields(arrival_s=2, num_prompt_tokens=9), fields(arrival_s=0.5)]
    if separator == "array":
        text = json.dumps(objects, indent=1)
    else:
        text = "\n\n".join(map(json.dumps, objects)) + "\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.requests == (request(0.5), request(2.0, num_prompt=9))
    assert trace.requests[0].arrival_ns == 500_000_000


def test_requests_that_arrive_together_stay_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = json.dumps([fields(num_new_tokens=count) for count in (5, 1, 3)])
    trace = read_trace(written(tmp_path, text))
    assert [each.num_new_tokens for each in trace.requests] == [5, 1, 3]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "holds 0 requests"),
        ("[]", "holds 0 requests"),
        ("[", "is no valid JSON"),
        ("hello", "line 1: is no valid JSON"),
        ("\n7", "line 2: is no JSON object"),
        ("[7]", r"requests\[0\] must be an object, not 7"),
        ('[], "more": 1', "has more than one array"),
        (json.dumps({"arrival_s": 0}), "line 1: num_prompt_tokens is missing"),
        (json.dumps([fields(), {}]), r"requests\[1\]\.arrival_s is missing"),
        (json.dumps(fields(arrival_s=-1)), "arrival_s must be from 0 to 604,800, not -1"),
        (json.dumps(fields(arrival_s=604801)), "arrival_s must be from 0 to 604,800"),
        (json.dumps(fields(arrival_s="now")), "arrival_s must be a number"),
        (json.dumps(fields(num_prompt_tokens=0)), "num_prompt_tokens must be from 1 to"),
        (json.dumps(fields(num_new_tokens=1.5)), "num_new_tokens must be a whole number"),
        (json.dumps(fields(num_new_tokens=2**31)), "num_new_tokens must be from 1 to"),
        (
            json.dumps(fields(model="x")),
            "line 1: model is not known; known are arrival_s, num",
        ),
        (json.dumps([fields(x=1)]), r"trace.json: requests\[0\]\.x is not known"),
        ("[" * 40 + "]" * 40, "nested too deep"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path: Path, text: str, fault: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=fault) as caught:
        read_trace(path)
    assert path in str(caught.value)


def test_a_trace_that_is_missing_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the trace '.*nowhere': No such file"):
        read_trace(str(tmp_path / "nowhere"))


def test_a_trace_above_the_bounds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, json.dumps([fields(), fields()]))
    assert len(read_trace(path).requests) == 2
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 1)
    with pytest.raises(UsageError, match=r"holds 2 requests, and must hold from 1 to 1$"):
        read_trace(path)
    monkeypatch.setattr(trace_module, "MAX_JSON_BYTES", 100)
    with pytest.raises(UsageError, match="is larger than 100 bytes"):
        read_trace(path)


def test_what_is_written_is_read_back_as_it_was(tmp_path: Path) -> None:
    trace = make(rate_per_s=3.7)
    assert read_trace(written(tmp_path, format_trace(trace))) == trace


def test_the_largest_trace_can_be_read_back(tmp_path: Path) -> None:
    trace = make(
        num_requests=MAX_REQUESTS,
        rate_per_s=0.06,
        prompt_tokens=TokenRange(fewest=2**31 - 1, most=2**31 - 1),
        new_tokens=TokenRange(fewest=2**31 - 1, most=2**31 - 1),
    )
    assert read_trace(written(tmp_path, format_trace(trace))) == trace


def test_a_made_trace_is_the_same_for_the_same_seed_only() -> None:
    assert make(rate_per_s=2.0) == make(rate_per_s=2.0)
    assert make(rate_per_s=2.0) != make(rate_per_s=2.0, seed=8)


def test_a_made_trace_stays_what_it_is_in_every_version() -> None:
    trace = make(num_requests=3, rate_per_s=2.0)
    assert trace.requests == (
        request(0.0, 21, 10),
        request(0.251118, 4, 5),
        request(1.112069, 7, 24),
    )


def test_lengths_are_drawn_from_the_whole_range_and_not_from_more() -> None:
    trace = make(
        prompt_tokens=TokenRange(fewest=5, most=8), new_tokens=TokenRange(fewest=2, most=2)
    )
    assert {each.num_prompt_tokens for each in trace.requests} == {5, 6, 7, 8}
    assert {each.num_new_tokens for each in trace.requests} == {2}


def test_lengths_that_are_not_given_fit_the_engine() -> None:
    trace = make(num_requests=2000)
    for name in ("num_prompt_tokens", "num_new_tokens"):
        lengths = {getattr(each, name) for each in trace.requests}
        assert lengths == set(range(1, 33))  # half of max_seq_len


def test_without_a_rate_all_arrive_at_once() -> None:
    assert {each.arrival_s for each in make().requests} == {0.0}


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = [each.arrival_s for each in make(num_requests=20_000, rate_per_s=4.0).requests]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(0.25, rel=0.03)
    assert variance == pytest.approx(0.25**2, rel=0.08)  # of an exponential distribution


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_requests": 0}, "from 1 to 32,768 requests, and 0 were asked for"),
        ({"num_requests": MAX_REQUESTS + 1}, "and 32,769 were asked for"),
        ({"rate_per_s": 0.0}, r"must be a number of requests above 0, not 0\.0"),
        ({"rate_per_s": float("nan")}, "not nan"),
        ({"rate_per_s": float("inf")}, "not inf"),
        ({"rate_per_s": 1e-5}, "the last of 200 requests would arrive after more than 604,800 s"),
        ({"rate_per_s": 1e-300}, "would arrive after more than 604,800 s"),
        ({"rate_per_s": 5e-324}, "would arrive after more than 604,800 s"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        make(**changes)


@pytest.mark.parametrize("requests", [(), (request(2.0), request(1.0))])
def test_a_trace_is_not_empty_and_in_order(requests: tuple[TraceRequest, ...]) -> None:
    with pytest.raises(ValueError, match="in the order in which they arrive"):
        Trace(requests=requests)


@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (3, 2), (1, 2**31)])
def test_a_range_without_a_number_is_refused(fewest: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"from {fewest} to {most} tokens"):
        TokenRange(fewest=fewest, most=most)
