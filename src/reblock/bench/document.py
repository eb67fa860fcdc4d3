"""A report as JSON; docs/bench.md describes every key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from reblock._version import __version__

if TYPE_CHECKING:
    from reblock.bench.report import BenchReport, Percentiles, RequestTimes

__all__ = ["SCHEMA_VERSION", "as_document"]

SCHEMA_VERSION = 1

_NS_PER_S = 10**9


def as_document(report: BenchReport) -> dict[str, object]:
    """Return everything that was measured; times are seconds, sizes bytes."""
    counters = asdict(report.counters)
    parts = {name: counters.pop(f"{name}_ns") for name in ("scheduler", "programs", "sampler")}
    limits = report.limits
    return {
        "schema_version": SCHEMA_VERSION,
        "reblock_version": __version__,
        "limits": {
            "num_blocks": limits.num_blocks,
            "block_size": limits.block_size,
            "max_seq_len": limits.max_seq_len,
            "max_batch": limits.max_batch,
            "max_request_tokens": limits.max_request_tokens,
        },
        "kv_bytes": report.kv_bytes,
        "peak_bytes": report.peak_bytes,
        "seed": report.seed,
        "num_requests": len(report.requests),
        "num_completed": len(report.completed),
        "num_refused": len(report.refused),
        "num_prompt_tokens": report.num_prompt_tokens,
        "num_new_tokens": report.num_new_tokens,
        "duration_s": _seconds(report.duration_ns),
        "idle_s": _seconds(report.idle_ns),
        "requests_per_s": report.per_second(len(report.completed)),
        "prompt_tokens_per_s": report.per_second(report.num_prompt_tokens),
        "new_tokens_per_s": report.per_second(report.num_new_tokens),
        "most_running": report.most_running,
        "most_used_blocks": counters.pop("most_used_blocks"),
        "time_to_first_token_s": _percentiles(report.first_token),
        "time_per_output_token_s": _percentiles(report.per_token),
        "time_between_tokens_s": _percentiles(report.between_tokens),
        "time_to_completion_s": _percentiles(report.completion),
        "counters": counters,
        "time_in": {
            name: {"seconds": _seconds(spent_ns), "share_of_busy": report.share_of_busy(spent_ns)}
            for name, spent_ns in parts.items()
        },
        "requests": [_request(times) for times in report.requests],
    }


def _percentiles(found: Percentiles | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {
        "p50": _seconds(found.p50_ns),
        "p90": _seconds(found.p90_ns),
        "p99": _seconds(found.p99_ns),
        "max": _seconds(found.max_ns),
    }


def _request(times: RequestTimes) -> dict[str, object]:
    first, last = (times.token_ns[0], times.token_ns[-1]) if times.token_ns else (None, None)
    return {
        "arrival_s": times.request.arrival_s,
        "num_prompt_tokens": times.request.num_prompt_tokens,
        "num_new_tokens": times.request.num_new_tokens,
        "is_refused": times.is_refused,
        "first_token_s": None if first is None else _seconds(first),
        "completed_s": None if last is None else _seconds(last),
    }


def _seconds(duration_ns: int) -> float:
    return duration_ns / _NS_PER_S
