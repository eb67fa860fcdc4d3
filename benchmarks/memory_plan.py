"""What an artifact is planned to take, beside what the process that serves it takes.

    python benchmarks/memory_plan.py [DIRECTORY] [--blocks N ...] [--new-tokens 64] [--json FILE]

Without a directory, a small random model is compiled. For every block count, a copy of the
artifact is resized and a full batch of prompts is answered by `reblock generate`. Peak RSS is
VmHWM; PSS is sampled, and at the end. Both are of the whole process: interpreter, torch,
tokenizer, weights, KV cache, workspace. The plan is what a memory budget is compared with. This
measures; it decides nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import describe_machine, machine_line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from process_memory import generate_watched
from reblock.artifact.reader import Artifact, open_artifact
from reblock.artifact.resize import apply_resize, plan_resize
from tiny_models import compile_llama

if TYPE_CHECKING:
    from process_memory import ServedMemory

TEXT = "The cache holds the keys and the values of every token that was read. "
COLUMNS = (
    "num_blocks",
    "weights_bytes",
    "runtime_bytes",
    "workspace_bytes",
    "kv_bytes",
    "planned_bytes",
    "peak_rss_bytes",
    "peak_pss_bytes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", metavar="DIRECTORY", nargs="?")
    parser.add_argument("--blocks", type=int, nargs="+", help="default: fewest, middle, most")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    if args.directory is not None:
        report(args.directory, args)
        return
    with tempfile.TemporaryDirectory(prefix="reblock-benchmark-") as directory:
        report(str(compile_llama(Path(directory), num_layers=2)), args)


def report(directory: str, args: argparse.Namespace) -> None:
    artifact = open_artifact(directory)
    bounds = artifact.bounds
    counts = args.blocks or [bounds.minimum, (bounds.minimum + bounds.full) // 2, bounds.full]
    rows = []
    for count in counts:
        rows.append(measure(artifact, count, args.new_tokens))
        print(rows[-1], file=sys.stderr)
    config = artifact.config
    print(machine_line())
    print(
        f"{config.cls_name}, {config.dtype}, batch {config.batch_size}, "
        f"{config.max_seq_len} tokens, blocks of {config.kvcache_block_size}\n"
    )
    print_table(rows)
    if args.json:
        result = {"machine": describe_machine(), "artifact": directory, "rows": rows}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


def measure(artifact: Artifact, num_blocks: int, new_tokens: int) -> dict[str, Any]:
    """Serve a full batch with a cache of that many blocks and return plan and measurement."""
    # Beside the artifact, where the weights can be linked.
    parent = Path(artifact.directory).resolve().parent
    with tempfile.TemporaryDirectory(prefix="reblock-benchmark-", dir=parent) as directory:
        resized = Path(directory, "artifact")
        apply_resize(artifact, plan_resize(artifact, num_blocks), str(resized))
        served = serve(artifact, resized, num_blocks, new_tokens)
    plan = artifact.memory_plan()
    static = {term: sum(map(sum, grid)) for term, grid in plan.static.items()}
    return {
        "num_blocks": num_blocks,
        "weights_bytes": static["Weight"],
        "runtime_bytes": static["Runtime"],
        "workspace_bytes": static["Workspace"],
        "kv_bytes": plan.kv_bytes_at(num_blocks)[0][0],
        "planned_bytes": plan.total_at(num_blocks)[0][0],
        "peak_rss_bytes": served.peak_rss_bytes,
        "peak_pss_bytes": served.peak_pss_bytes,
        "most_running": served.report["most_running"],
        "num_tokens": served.report["num_new_tokens"]
        + sum(result["num_prompt_tokens"] for result in served.report["results"]),
    }


def serve(artifact: Artifact, directory: Path, num_blocks: int, new_tokens: int) -> ServedMemory:
    """Answer as many prompts as run side by side, of a length at which all of them do."""
    config = artifact.config
    blocks_each = num_blocks // config.batch_size
    # No tokenizer needs more than a token a byte.
    room = min(blocks_each * config.kvcache_block_size, config.max_seq_len) - new_tokens - 64
    text = (TEXT * (1 + room // len(TEXT)))[:room]
    # As often as it takes to make a report of more than a pipe holds; see `generate_watched`.
    rounds = -(-8_192 // (len(text) * config.batch_size))
    prompts = [f"{number}. {text}" for number in range(config.batch_size * rounds)]
    return generate_watched(directory, prompts, "--max-new-tokens", str(new_tokens))


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| blocks | weights | runtime | workspace | KV cache | planned | peak RSS | peak PSS |"
        " RSS / planned |"
    )
    print("|---:" * 9 + "|")
    for row in rows:
        sizes = [f"{row[column] / 2**20:,.1f} MiB" for column in COLUMNS[1:]]
        share = f"{row['peak_rss_bytes'] / row['planned_bytes']:.1%}"
        print(f"| {row['num_blocks']} | {' | '.join(sizes)} | {share} |")


if __name__ == "__main__":
    main()
