"""The report as markdown: medians, the best in brackets, and how reblock stands to its peers."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from peers.engines import ENGINES
from peers.measure import AGREEMENT_TOKENS, BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["report_text"]

REBLOCK = "reblock"
GIGA = 1e9


def report_text(document: dict[str, Any]) -> str:
    """Return the whole report."""
    lines = ["# reblock against its peers", "", document["machine_line"] + ".", ""]
    lines += [document["settings_line"], "", *(f"* {note}" for note in document["notes"]), ""]
    for model, found in document["models"].items():
        lines += [f"## {model}", ""]
        for name, write in SECTIONS.items():
            if found.get(name):
                lines += [*write(found[name], found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _engines(engines: dict[str, Any], found: dict[str, Any]) -> list[str]:
    weights = found["weights"]
    lines = [
        (
            f"{weights['all'] / 1e6:.1f} million weights, of which a token reads "
            f"{weights['read'] / 1e6:.1f} million."
        ),
        "",
        "| engine | version | what | same tokens as transformers |",
        "|---|---|---|---|",
    ]
    for name, engine in engines.items():
        agreed = engine["agreement"]
        same = "" if agreed is None else f"{agreed} of the first {AGREEMENT_TOKENS}"
        if engine["problem"]:
            same = f"{same}; out: {engine['problem']}" if same else f"out: {engine['problem']}"
        lines.append(f"| {name} | {engine['version']} | {engine['what']} | {_cell(same)} |")
    return lines


def _decoding(section: dict[str, Any], found: dict[str, Any]) -> list[str]:
    reading = section["read"]
    lines = [
        "### Decoding and reading prompts",
        "",
        (
            "Tokens per second: prompts of 32 tokens, 64 new ones, while all rows are decoded; "
            "and a prompt of 512 by the time to its first token. Median of "
            f"{_count(section['decode'])} rounds (best). Reading memory: "
            f'{_spread(reading, GIGA, 1)} GB/s. "Of limit" is what reading the weights alone '
            "would allow."
        ),
        "",
        "| engine | batch 1 | of limit | batch 8 | prompt of 512 |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, rates in _in_order(section["decode"]):
        num_bytes = found["weights"]["read"] * ENGINES[name].weight_bytes
        limit = median(rates["1"]) * num_bytes / median(reading)
        cells = [_spread(rates["1"]), f"{limit:.0%}", _spread(rates["8"])]
        cells.append(_spread(section["prefill"][name], 1, 0))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [""]
    for what, values in _columns(section).items():
        lines.append(f"* {what}: {_against_best(values)}")
    lines += _own_ratios(section["decode"])
    return lines


def _columns(section: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    columns = {
        f"decoding, batch {batch}": {
            name: rates[batch] for name, rates in section["decode"].items()
        }
        for batch in ("1", "8")
    }
    return columns | {"prompt of 512": section["prefill"]}


def _own_ratios(decode: dict[str, Any]) -> list[str]:
    """How much faster narrower weights are."""
    lines = []
    for name in decode:
        if ENGINES[name].package == REBLOCK != name and REBLOCK in decode:
            ratios = []
            for batch in ("1", "8"):
                ratio = median(decode[name][batch]) / median(decode[REBLOCK][batch])
                ratios.append(f"{ratio:.2f} at batch {batch}")
            lines.append(f"* {name} by reblock in float32: {', '.join(ratios)}")
    return lines


def _against_best(values: dict[str, list[float]]) -> str:
    """Say how reblock in float32 stands to the best peer in float32."""
    peers = {name: rates for name, rates in values.items() if ENGINES[name].package != REBLOCK}
    if REBLOCK not in values or not peers:
        return "nothing to compare"
    best = max(peers, key=lambda name: median(peers[name]))
    ratio = median(values[REBLOCK]) / median(peers[best])
    paired = [own / other for own, other in zip(values[REBLOCK], peers[best], strict=False)]
    return (
        f"reblock {ratio:.2f} x {best}, the best peer (round by round {min(paired):.2f} to "
        f"{max(paired):.2f})"
    )


def _overhead(runs: Sequence[dict[str, int]], _found: dict[str, Any]) -> list[str]:
    outside = [1 - run["pieces_ns"] / run["all_ns"] for run in runs]
    parts = [(run["scheduler_ns"] + run["sampler_ns"]) / run["all_ns"] for run in runs]
    return [
        "### Outside the programs",
        "",
        (
            f"Of the time of a decoding step at batch 8, scheduler and sampler took "
            f"{median(parts):.2%} ({min(parts):.2%} to {max(parts):.2%}); all that is outside the "
            f"compiled pieces, what hands them their tensors too, {median(outside):.2%} "
            f"({min(outside):.2%} to {max(outside):.2%})."
        ),
    ]


def _trace(section: dict[str, Any], _found: dict[str, Any]) -> list[str]:
    lines = [
        "### Serving a trace",
        "",
        (
            "The same requests at the same times by all; as many side by side as the pool holds. "
            "Medians of the runs that are counted; an engine that took twice as long as the best "
            "ran once. Times are to the first token, from the arrival."
        ),
        "",
        "| pool | engine | runs | tokens/s | p50 | p99 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    verdicts = []
    for pool, engines in section.items():
        for name, runs in _in_order(engines):
            p50, p99 = (
                median(run[f"first_token_{which}_s"] for run in runs) for which in ("p50", "p99")
            )
            rates = [run["tokens_per_s"] for run in runs]
            lines.append(
                f"| {pool} | {name} | {len(runs)} | {_spread(rates)} | {p50:.2f} s | {p99:.2f} s |"
            )
        values = {name: [run["tokens_per_s"] for run in runs] for name, runs in engines.items()}
        verdicts.append(f"* {pool} pool: {_against_best(values)}")
    return [*lines, "", *verdicts]


def _blocks(section: dict[str, Any], _found: dict[str, Any]) -> list[str]:
    lines = [
        "### More blocks, more served",
        "",
        (
            "The first half of the trace by one artifact that `reblock set` resized, nothing else "
            "changed."
        ),
        "",
        "| blocks | tokens in the cache | tokens/s | time to first token, p50 | preemptions |",
        "|---:|---:|---:|---:|---:|",
    ]
    for count, runs in sorted(section.items(), key=lambda item: int(item[0])):
        rates = [run["tokens_per_s"] for run in runs]
        p50 = median(run["first_token_p50_s"] for run in runs)
        lines.append(
            f"| {count} | {int(count) * BLOCK_TOKENS:,} | {_spread(rates)} | {p50:.2f} s "
            f"| {median(run['preemptions'] for run in runs):.0f} |"
        )
    return lines


def _cache(section: dict[str, Any], _found: dict[str, Any]) -> list[str]:
    lines = [
        "### Reading the cache",
        "",
        (
            "Decoding steps of 8 rows at a context of 8192 and of 128 tokens. The blocks hold "
            "random numbers, not what a prompt left, and the runner is called without the "
            "engine. What a step takes longer is put against the keys and values that it has to "
            "read in addition."
        ),
        "",
        (
            "| cache | step at 128 | step at 8192 | GB more to read | GB/s | of reading memory "
            "| peak memory before, after the steps |"
        ),
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for dtype, found in section.items():
        if "problem" in found:
            lines.append(f"| {dtype} | {_cell(found['problem'])} | | | | | |")
            continue
        short, long = (median(seconds) for seconds in found["step_s"].values())
        rate = found["bytes"] / (long - short)
        lines.append(
            f"| {dtype} | {short * 1e3:.1f} ms | {long * 1e3:.1f} ms "
            f"| {found['bytes'] / GIGA:.2f} | {rate / GIGA:.1f} "
            f"| {rate / median(found['read']):.0%} | {found['peak_bytes_before'] / GIGA:.2f} GB, "
            f"{found['peak_bytes_after'] / GIGA:.2f} GB (cache {found['kv_bytes'] / GIGA:.2f} GB) |"
        )
    return lines


def _memory(section: dict[str, Any], _found: dict[str, Any]) -> list[str]:
    lines = ["### Memory", ""]
    if "problem" in section:
        return [*lines, section["problem"]]
    planned = section["planned_bytes"]
    peaks = ", ".join(
        f"{peak / 2**20:,.1f} MiB ({peak / planned:.1%})" for peak in section["peak_bytes"]
    )
    held = section["kv_bytes"]
    exact = "exactly" if set(held) == {section["planned_kv_bytes"]} else "NOT"
    used = " and ".join(map(str, sorted(set(section["used_blocks"]))))
    return [
        *lines,
        (
            f"Planned {planned / 2**20:,.1f} MiB; peak RSS of `reblock bench` with {used} of "
            f"{section['blocks']} blocks in use: {peaks}. KV cache: {held[0]:,} bytes, {exact} as "
            "planned."
        ),
    ]


SECTIONS: dict[str, Callable[[Any, dict[str, Any]], list[str]]] = {
    "engines": _engines,
    "decoding": _decoding,
    "overhead": _overhead,
    "trace": _trace,
    "blocks": _blocks,
    "cache": _cache,
    "memory": _memory,
}


def _spread(values: Sequence[float], unit: float = 1, digits: int = 1) -> str:
    """The median and the best."""
    return f"{median(values) / unit:,.{digits}f} ({max(values) / unit:,.{digits}f})"


def _in_order(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return what was found of each engine, in the order of all tables."""
    return [(name, values[name]) for name in ENGINES if name in values]


def _count(decode: dict[str, Any]) -> int:
    return max((len(rates["1"]) for rates in decode.values()), default=0)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
