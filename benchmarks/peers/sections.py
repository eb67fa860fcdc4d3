"""The measurements. Each returns numbers as they came; `report` makes medians of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from statistics import median
from typing import TYPE_CHECKING, Any

from peers.artifacts import CACHE_CONTEXT, POOL_BLOCKS, UnavailableError
from peers.engines import ENGINES
from peers.measure import BLOCK_TOKENS, Lineup, Settings, note, prompts
from peers.processes import Worker, WorkerError
from peers.serving import MAX_BATCH, MAX_RUNNING, Request
from reblock.artifact.reader import open_artifact
from reblock.bench.trace import TokenRange, Trace, TraceRequest, format_trace, make_trace
from reblock.engine.limits import EngineLimits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from peers.artifacts import Shop
    from peers.serving import Served

__all__ = [
    "BLOCK_COUNTS",
    "POOLS",
    "measure_blocks",
    "measure_cache",
    "measure_decoding",
    "measure_memory",
    "measure_overhead",
    "measure_trace",
    "trace_requests",
]

PROMPT, ANSWER, LONG_PROMPT = 32, 64, 512
POOLS = {"ample": POOL_BLOCKS, "a quarter": POOL_BLOCKS // 4}
BLOCK_COUNTS = (36, 48, 64, 80, 96, 120, 144)
RATE_PER_S = 8.0
PROMPT_TOKENS, NEW_TOKENS = TokenRange(fewest=32, most=256), TokenRange(fewest=16, most=80)
SHORT_CONTEXT, STEPS = 128, 5
FULL_BLOCKS = 256  # as many as the longest sequences fill, 8 of them
REBLOCK = "reblock"


def measure_decoding(lineup: Lineup, rounds: int) -> dict[str, Any]:
    """Decoding of 1 and 8 rows and reading of a long prompt, by every engine in every round.

    The round before the first is not counted: it pays for what is done at first use.
    """
    result: dict[str, Any] = {"read": [], "decode": {}, "prefill": {}}
    for number in range(rounds + 1):
        note(f"decoding, round {number} of {rounds}")
        for name in lineup.in_turn(number):
            if number:
                result["read"] += lineup.read_rates()
            rates = _decode_once(lineup, name, number)
            if rates is None or not number:
                continue
            decode = result["decode"].setdefault(name, {"1": [], "8": []})
            decode["1"].append(rates[0])
            decode["8"].append(rates[1])
            result["prefill"].setdefault(name, []).append(rates[2])
    return result


def _decode_once(lineup: Lineup, name: str, number: int) -> tuple[float, float, float] | None:
    rates = []
    for rows in (1, MAX_BATCH):
        requests = prompts(lineup.vocabulary, f"decode {number} {rows}", rows, PROMPT, ANSWER)
        served = lineup.serve(name, requests)
        if served is None:
            return None
        rates.append(served.decode_rate())
    served = lineup.serve(name, prompts(lineup.vocabulary, f"read {number}", 1, LONG_PROMPT, 1))
    if served is None:
        return None
    return rates[0], rates[1], LONG_PROMPT / served.token_s[0][0]


def measure_overhead(lineup: Lineup, rounds: int) -> list[dict[str, int]]:
    """Nanoseconds of each part of reblock's engine, for 8 rows."""
    found = []
    for number in range(rounds):
        requests = prompts(lineup.vocabulary, f"parts {number}", MAX_BATCH, PROMPT, ANSWER)
        parts = lineup.ask(REBLOCK, "parts", requests=[request.to_json() for request in requests])
        if parts is not None:
            found.append(parts)
    return found


def trace_requests(vocabulary: int, num_requests: int) -> list[Request]:
    """Return requests that arrive faster than they are served."""
    limits = EngineLimits(
        num_blocks=POOL_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_seq_len=1024,
        max_batch=MAX_RUNNING,
        decoder_batch_sizes=(MAX_RUNNING,),
        prefill_chunk_size=LONG_PROMPT,
        vocab_size=vocabulary,
        eos_token_ids=(),
        has_rings=False,
    )
    trace = make_trace(
        seed=0,
        num_requests=num_requests,
        limits=limits,
        rate_per_s=RATE_PER_S,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
    )
    draw = random.Random(0)
    return [
        Request(
            prompt_ids=draw.choices(range(vocabulary), k=request.num_prompt_tokens),
            num_new_tokens=request.num_new_tokens,
            arrival_s=request.arrival_s,
        )
        for request in trace.requests
    ]


def measure_trace(lineup: Lineup, settings: Settings) -> dict[str, Any]:
    """The same requests by every engine that batches, from an ample cache and a small one."""
    requests = trace_requests(lineup.vocabulary, settings.num_requests)
    result: dict[str, Any] = {}
    for pool, num_blocks in POOLS.items():
        found: dict[str, list[dict[str, float]]] = {}
        names = [
            name
            for name in lineup.names()
            if ENGINES[name].has_batching
            and ENGINES[name].weight_bytes == 4
            and lineup.load(name, num_blocks)
            and lineup.serve(name, prompts(lineup.vocabulary, "warm", 2, PROMPT, 4))
        ]
        for number in range(settings.trace_rounds):
            for name in lineup.in_turn(number, _worth_repeating(names, found)):
                note(f"trace, {pool} pool, round {number + 1}: {name}")
                served = lineup.serve(name, requests)
                if served is not None:
                    found.setdefault(name, []).append(_trace_numbers(served, requests))
        result[pool] = found
    return result


def _worth_repeating(names: list[str], found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Leave out what took more than twice as long as the best: a second run changes nothing."""
    if not found:
        return names
    best = max(runs[0]["tokens_per_s"] for runs in found.values())
    return [name for name, runs in found.items() if runs[0]["tokens_per_s"] * 2 > best]


def _trace_numbers(served: Served, requests: Sequence[Request]) -> dict[str, float]:
    pairs = zip(served.token_s, requests, strict=True)
    first = sorted(times[0] - request.arrival_s for times, request in pairs)
    end = max(times[-1] for times in served.token_s)
    return {
        "tokens_per_s": sum(map(len, served.token_s)) / end,
        "first_token_p50_s": first[-(-len(first) * 50 // 100) - 1],
        "first_token_p99_s": first[-(-len(first) * 99 // 100) - 1],
        "last_token_s": end,
        "last_arrival_s": requests[-1].arrival_s,
    }


def measure_blocks(lineup: Lineup, settings: Settings) -> dict[str, list[dict[str, float]]]:
    """Half of the trace by reblock from artifacts that differ in their block count alone."""
    requests = trace_requests(lineup.vocabulary, settings.num_requests // 2)
    result: dict[str, list[dict[str, float]]] = {}
    for number in range(settings.trace_rounds):
        shift = number % len(BLOCK_COUNTS)
        for num_blocks in BLOCK_COUNTS[shift:] + BLOCK_COUNTS[:shift]:
            note(f"{num_blocks} blocks, round {number + 1}")
            if not lineup.load(REBLOCK, num_blocks):
                return result
            lineup.serve(REBLOCK, prompts(lineup.vocabulary, "warm", 2, PROMPT, 4))
            served = lineup.serve(REBLOCK, requests)
            preemptions = lineup.ask(REBLOCK, "num_preemptions")
            if served is not None:
                numbers = _trace_numbers(served, requests)
                numbers["preemptions"] = preemptions
                result.setdefault(str(num_blocks), []).append(numbers)
    return result


def measure_cache(settings: Settings, shop: Shop) -> dict[str, Any]:
    """Steps of 8 rows at a short and at a long context, for both types of caches."""
    result: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        try:
            artifact = shop.cache_artifact(dtype)
            result[dtype] = _cache_steps(settings, shop, artifact, dtype)
        except (UnavailableError, WorkerError) as error:
            result[dtype] = {"problem": str(error)}
    return result


def _cache_steps(settings: Settings, shop: Shop, artifact: Path, dtype: str) -> dict[str, Any]:
    config = shop.config()
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size
    per_token *= 4 if dtype == "float32" else 2
    steps: dict[int, list[float]] = {SHORT_CONTEXT: [], CACHE_CONTEXT: []}
    rates: list[float] = []
    logs = settings.directory / "logs"
    with Lineup(settings, shop, []) as machine:
        worker = Worker(ENGINES[REBLOCK], sys.executable, logs / "cache.log", settings.threads)
        try:
            worker.ask("load", artifact=str(artifact), threads=settings.threads)
            before = worker.ask("fill_cache")
            for number in range(settings.rounds + 1):
                note(f"cache, {dtype}, round {number} of {settings.rounds}")
                reading = machine.read_rates()
                for context, seconds in steps.items():
                    step = worker.ask("decode_at", context=context, steps=STEPS)
                    if number:
                        seconds.append(median(step["seconds"]))
                rates += reading if number else []
            after = worker.ask("decode_at", context=CACHE_CONTEXT, steps=1)["peak_bytes"]
        finally:
            worker.close()
    return {
        "step_s": steps,
        "read": rates,
        "bytes": (CACHE_CONTEXT - SHORT_CONTEXT) * MAX_BATCH * per_token,
        "peak_bytes_before": before,
        "peak_bytes_after": after,
        "kv_bytes": CACHE_CONTEXT * MAX_BATCH * per_token,
    }


def measure_memory(settings: Settings, shop: Shop) -> dict[str, Any]:
    """The peak of `reblock bench` while every block of the cache is in use, and the plan."""
    try:
        directory = shop.resized(shop.artifact("float32"), FULL_BLOCKS)
    except UnavailableError as error:
        return {"problem": str(error)}
    plan = open_artifact(str(directory)).memory_plan()
    tokens = FULL_BLOCKS * BLOCK_TOKENS // MAX_RUNNING
    request = TraceRequest(arrival_s=0.0, num_prompt_tokens=tokens - ANSWER, num_new_tokens=ANSWER)
    path = settings.directory / "full_cache.jsonl"
    path.write_text(format_trace(Trace(requests=(request,) * MAX_RUNNING)))
    line = [sys.executable, "-m", "reblock", "bench", str(directory), "--trace", str(path)]
    line += ["--threads", str(settings.threads), "--json"]
    runs = []
    for number in range(min(2, settings.rounds)):
        note(f"memory, round {number + 1}")
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {"problem": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
        runs.append(json.loads(done.stdout))
    return {
        "planned_bytes": plan.total_at(plan.current_blocks)[0][0],
        # What the caches hold; the plan's total has them rounded up to large pages.
        "planned_kv_bytes": sum(sum(map(sum, cache.bytes_grid)) for cache in plan.caches),
        "peak_bytes": [run["peak_bytes"] for run in runs],
        "kv_bytes": [run["kv_bytes"] for run in runs],
        "used_blocks": [run["most_used_blocks"] for run in runs],
        "blocks": plan.current_blocks,
    }
