"""How long choosing tokens takes, beside the logits processors of transformers.

    python benchmarks/sampling.py [--threads N] [--rounds 9] [--json FILE]

Each case is one call for all rows of a batch, as after a step of a decoder: the sampler of the
engine, and transformers' processors with softmax and multinomial on the whole batch, as `generate`
has them. Both run in one process, in turn, round by round: what else the machine does meanwhile
hits both alike. With "sure" logits 35 tokens have 0.9 of the probability and some hundreds 0.99 of
it; with "unsure" ones it takes three quarters of the vocabulary to have 0.9.

The second table is a step of the engine at batch 8, greedy, on a runner that computes nothing and
returns logits: what is left is the scheduler, the sampler and the outputs. The last two columns are
means, with all that the machine did in between.

Numbers are medians in milliseconds: on the clock, and in brackets of the processor, of all threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from machine import describe_machine, machine_line
from transformers.generation import logits_process as hf

from reblock.engine import Engine, EngineLimits, SamplingParams
from reblock.engine.sampler import TorchSampler

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (1, 8, 32)
VOCABULARIES = (32_000, 128_256)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    },
    "logprobs 5": {"logprobs": 5},
}
NUM_TOKENS = 512  # of each request so far
STEP_VOCABULARIES = (32_000, 49_152, 128_256)
STEP_ROWS, NUM_STEPS = 8, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{machine_line()}, {torch.get_num_threads()} threads\n")
    cases = measure_cases(args.rounds)
    print()
    steps = measure_steps()
    if args.json:
        document = {"machine": describe_machine(), "cases": cases, "steps": steps}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure_cases(rounds: int) -> list[dict[str, object]]:
    """Print a line for each case; return them for the JSON."""
    print("| vocabulary | logits | rows | what | reblock | transformers | of processor |")
    print("|---:|---|---:|---|---:|---:|---:|")
    results: list[dict[str, object]] = []
    for vocab_size in VOCABULARIES:
        for name, scale in (("sure", 4.0), ("unsure", 0.5)):
            kinds = KINDS if name == "sure" else {"top_p 0.9": KINDS["top_p 0.9"]}
            for rows in ROWS:
                logits = make_logits(rows, vocab_size, scale)
                for kind, options in kinds.items():
                    ours, theirs = in_turn(make_runs(logits, options), rounds)
                    print(
                        f"| {vocab_size:,} | {name} | {rows} | {kind} | {shown(ours)} "
                        f"| {shown(theirs)} "
                        f"| {theirs['processor_s'] / ours['processor_s']:.1f} |",
                        flush=True,
                    )
                    results.append(
                        {
                            "vocab_size": vocab_size,
                            "logits": name,
                            "rows": rows,
                            "kind": kind,
                            "reblock": ours,
                            "transformers": theirs,
                        }
                    )
    return results


def make_logits(rows: int, vocab_size: int, scale: float) -> torch.Tensor:
    """Random logits; the larger the scale, the fewer tokens have most of the probability."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((rows, vocab_size), generator=generator) * scale


def make_runs(logits: torch.Tensor, options: dict[str, Any]) -> list[Callable[[], object]]:
    """Return one call of the engine's sampler and one of transformers' processors."""
    rows, vocab_size = logits.shape
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (rows, NUM_TOKENS), generator=generator)
    sampler, token_ids = TorchSampler(), tokens.tolist()
    params = [SamplingParams(max_new_tokens=1, seed=row, **options) for row in range(rows)]
    states = [sampler.start(one) for one in params]
    processors = make_processors(options)

    def theirs() -> object:
        if "logprobs" in options:
            return logits.log_softmax(dim=-1).topk(options["logprobs"])
        scores = processors(tokens, logits)
        if "temperature" not in options:
            return scores.argmax(dim=-1).tolist()
        return torch.multinomial(scores.softmax(dim=-1), 1).tolist()

    return [lambda: sampler.choose(logits, states, token_ids), theirs]


def make_processors(options: dict[str, Any]) -> hf.LogitsProcessorList:
    """What `generate` of transformers would apply, in its order."""
    classes = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    named = [make(options[name]) for name, make in classes.items() if name in options]
    return hf.LogitsProcessorList(named)


def in_turn(runs: list[Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Return the median seconds of each over all rounds; one round before is not counted."""
    clock: list[list[float]] = [[] for _ in runs]
    processor: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for index, run in enumerate(runs):
            started, computed = time.perf_counter(), time.process_time()
            run()
            if number > 0:
                clock[index].append(time.perf_counter() - started)
                processor[index].append(time.process_time() - computed)
    return [
        {"clock_s": statistics.median(seconds), "processor_s": statistics.median(computed_s)}
        for seconds, computed_s in zip(clock, processor, strict=True)
    ]


def shown(seconds: dict[str, float]) -> str:
    return f"{seconds['clock_s'] * 1e3:.3f} ({seconds['processor_s'] * 1e3:.3f})"


class IdleRunner:
    """A runner that computes nothing: its logits are there already."""

    kv_bytes = 0

    def __init__(self, vocab_size: int) -> None:
        self._logits = make_logits(STEP_ROWS, vocab_size, 4.0)
        self.limits = EngineLimits(
            num_blocks=1024,
            block_size=128,
            max_seq_len=4096,
            max_batch=STEP_ROWS,
            decoder_batch_sizes=(STEP_ROWS,),
            prefill_chunk_size=512,
            vocab_size=vocab_size,
            eos_token_ids=(),
            has_rings=False,
        )

    def prefill(self, *_: object) -> torch.Tensor:
        return self._logits[0]

    def decode(self, token_ids: list[int], *_: object) -> torch.Tensor:
        return self._logits[: len(token_ids)]

    def resize(self, *_: object) -> None:
        raise NotImplementedError


def measure_steps() -> list[dict[str, object]]:
    """Print a line for each vocabulary; return them for the JSON."""
    print("| vocabulary | step | scheduler | sampler |")
    print("|---:|---:|---:|---:|")
    results: list[dict[str, object]] = []
    for vocab_size in STEP_VOCABULARIES:
        engine = Engine(IdleRunner(vocab_size))
        for row in range(STEP_ROWS):
            # prompts that differ, so that no blocks are shared
            engine.add([row] * NUM_TOKENS, SamplingParams(max_new_tokens=NUM_STEPS + 20))
        while engine.num_waiting or engine.counters().num_decoded_tokens < 10 * STEP_ROWS:
            engine.step()
        before = engine.counters()
        (step,) = in_turn([engine.step], NUM_STEPS)
        after = engine.counters()
        scheduler, sampler = (
            (getattr(after, name) - getattr(before, name)) / NUM_STEPS / 1e9
            for name in ("scheduler_ns", "sampler_ns")
        )
        print(f"| {vocab_size:,} | {shown(step)} | {scheduler * 1e3:.3f} | {sampler * 1e3:.3f} |")
        results.append(
            {"vocab_size": vocab_size, **step, "scheduler_s": scheduler, "sampler_s": sampler}
        )
    return results


if __name__ == "__main__":
    main()
