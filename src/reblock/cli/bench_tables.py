"""The tables of `reblock bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.cli.tables import labelled, make_table, render, size

if TYPE_CHECKING:
    from rich.table import Table

    from reblock.bench.report import BenchReport, Percentiles

__all__ = ["report_text"]

_NS_PER_S = 10**9
_NS_PER_MS = 10**6


def report_text(report: BenchReport) -> str:
    """Return what was measured, for people."""
    tables = render(_times(report), _counters(report), _shares(report))
    return f"{_summary(report)}\n\n{tables}"


def _summary(report: BenchReport) -> str:
    limits, per_second = report.limits, report.per_second
    served = f"{len(report.completed):,} of {len(report.requests):,} served"
    if report.refused:
        served += (
            f"; {len(report.refused):,} refused, as one request can have "
            f"{limits.max_request_tokens:,} tokens at most"
        )
    duration = f"{_seconds(report.duration_ns)} s"
    if report.idle_ns:
        duration += f", {_seconds(report.idle_ns)} s of it without a request (skipped)"
    cache = (
        f"{limits.num_blocks:,} blocks of {limits.block_size:,} tokens, "
        f"{size(report.kv_bytes)}; up to {report.counters.most_used_blocks:,} used"
    )
    speed = (
        f"{per_second(len(report.completed)):,.2f} requests; "
        f"{per_second(report.num_prompt_tokens):,.1f} tokens of prompts and "
        f"{per_second(report.num_new_tokens):,.1f} of answers"
    )
    rows = [
        ("KV cache", cache),
        ("requests", f"{served}; up to {report.most_running:,} of {limits.max_batch:,} at once"),
        ("time", duration),
        ("per second", speed),
    ]
    if report.peak_bytes is not None:
        rows.append(("memory", f"{size(report.peak_bytes)} at most, of the whole process"))
    return labelled(rows)


def _times(report: BenchReport) -> Table:
    table = make_table("Milliseconds", "", "p50", "p90", "p99", "most")
    rows = (
        ("to the first token", report.first_token),
        ("per token after it, averages of requests", report.per_token),
        ("between two tokens", report.between_tokens),
        ("to the last token", report.completion),
    )
    for name, found in rows:
        table.add_row(name, *_milliseconds(found))
    return table


def _milliseconds(found: Percentiles | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    values = (found.p50_ns, found.p90_ns, found.p99_ns, found.max_ns)
    return [f"{value / _NS_PER_MS:,.1f}" for value in values]


def _counters(report: BenchReport) -> Table:
    counters = report.counters
    table = make_table("Counters", "", "")
    for name, value in (
        ("blocks free", counters.num_free_blocks),
        ("blocks used", counters.num_used_blocks),
        ("blocks cached", counters.num_cached_blocks),
        ("preemptions", counters.num_preemptions),
        ("tokens prefilled", counters.num_prefilled_tokens),
        ("tokens reused", counters.num_reused_tokens),
        ("tokens decoded", counters.num_decoded_tokens),
    ):
        table.add_row(name, f"{value:,}")
    return table


def _shares(report: BenchReport) -> Table:
    counters = report.counters
    parts = {
        "scheduler": counters.scheduler_ns,
        "programs": counters.programs_ns,
        "sampler": counters.sampler_ns,
    }
    parts["all else"] = max(0, report.busy_ns - sum(parts.values()))
    table = make_table("Time with requests", "", "s", "%")
    for name, spent_ns in parts.items():
        table.add_row(name, _seconds(spent_ns), f"{report.share_of_busy(spent_ns) * 100:.1f}")
    return table


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / _NS_PER_S:,.3f}"
