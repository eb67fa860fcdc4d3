"""Measures what the programs of a new artifact take besides weights and KV cache.

    python -m reblock.backends.torch.profile DIRECTORY REFERENCE

runs in a process of its own, the way `reblock generate` would: the same libraries, the tokenizer,
every program at its largest shapes, the sampler. It prints one line of JSON,
{"runtime_bytes": r, "workspace_bytes": w, "error": e}:

    runtime     what is resident once everything is loaded, less weights and KV cache
    workspace   how far the peak rises above that while the programs run, and as much again, but
                no more than 64 MiB: the gaps of the allocator's heap are others in every run
    error       |compiled - transformers| / |transformers|, of the logits in REFERENCE

DIRECTORY holds an artifact of one block. Linux counts the resident memory; see proc_pid_status(5).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reblock.artifact.reader import Artifact, open_artifact
from reblock.backends.torch.runner import TorchRunner
from reblock.engine.request import SamplingParams
from reblock.engine.sampler import TorchSampler
from reblock.engine.text import Tokenizer
from reblock.errors import ReblockError
from reblock.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Loaded", "load_in_full", "resident_bytes", "with_gaps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An artifact that this process has loaded, all of its weights touched.

    `resident_bytes` is what the whole process had in memory then.
    """

    runner: TorchRunner
    tokenizer: Tokenizer | None
    weight_bytes: int
    resident_bytes: int


def load_in_full(artifact: Artifact) -> Loaded:
    """Load everything that it takes to generate text."""
    tokenizer = None
    if os.path.exists(os.path.join(artifact.directory, "tokenizer_config.json")):
        tokenizer = Tokenizer.load(artifact.directory)
    runner = TorchRunner(artifact, artifact.config.kvcache_num_blocks)
    weight_bytes = _touch(runner)
    gc.collect()
    return Loaded(
        runner=runner,
        tokenizer=tokenizer,
        weight_bytes=weight_bytes,
        resident_bytes=resident_bytes("VmRSS"),
    )


def resident_bytes(field: str) -> int:
    """Return VmRSS (resident now) or VmHWM (the most there was) of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise ReblockError(f"the system does not tell {field} of a process in /proc/self/status")


def _touch(runner: TorchRunner) -> int:
    """Bring all weights into memory and return their bytes."""
    total = 0
    for tensor in runner.weights.values():
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[::4096].sum()
        total += flat.numel()
    return total


# Few, because a step in bfloat16 can take seconds on processors without instructions for it.
_LENGTHS = 4


def _run_growing(runner: TorchRunner) -> None:
    """Run every program on sequences that grow to the longest, as they do when they are served.

    All blocks of a table are the same one, since only shapes count here.
    """
    limits = runner.limits
    chunk = limits.prefill_chunk_size
    sampler = TorchSampler()
    state = sampler.start(
        SamplingParams(max_new_tokens=1, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=0)
    )
    for part in range(1, _LENGTHS + 1):
        length = max(chunk, limits.max_seq_len * part // _LENGTHS)
        table = [0] * limits.num_blocks_for(length)
        tokens = [0] * length
        sampler.choose([runner.prefill([0] * chunk, length - chunk, table, 0)], [state], [tokens])
        for size in limits.decoder_batch_sizes:
            slots = list(range(size))
            logits = runner.decode([0] * size, [length - 1] * size, [table] * size, slots)
            sampler.choose(logits, [state] * size, [tokens] * size)


# glibc cuts tensors of less than 32 MiB out of its heap. What runs leave between them has been none
# and has been as much as what was live; beyond twice that the heap gives memory back.
_MOST_GAPS_BYTES = 64 * MIB


def with_gaps(num_bytes: int) -> int:
    """Return the workspace to plan with, where a run has shown `num_bytes` of it."""
    return num_bytes + min(num_bytes, _MOST_GAPS_BYTES)


def _compare(artifact: Artifact, reference: dict[str, Tensor]) -> float:
    """Return how far the compiled logits are from the reference, relative to its norm."""
    ids = reference["input_ids"].tolist()
    expected = reference["logits"]  # [n, vocabulary], after each of the last n tokens
    steps = len(expected)
    runner = TorchRunner(artifact, -(-len(ids) // artifact.config.kvcache_block_size))
    table = list(range(runner.limits.num_blocks))
    chunk = runner.limits.prefill_chunk_size
    prompt = ids[: len(ids) - steps + 1]
    for start in range(0, len(prompt), chunk):
        logits = runner.prefill(prompt[start : start + chunk], start, table, 0)
    computed = [
        logits,
        *(runner.decode([ids[p]], [p], [table], [0])[0] for p in range(len(prompt), len(ids))),
    ]
    difference = torch.linalg.vector_norm(torch.stack(computed) - expected)
    return float(difference / torch.linalg.vector_norm(expected))


def main() -> None:
    """Measure the artifact that the command line names and print the result."""
    directory, reference_path = sys.argv[1:]
    from safetensors.torch import load_file

    artifact = open_artifact(directory)
    loaded = load_in_full(artifact)
    held = loaded.weight_bytes + loaded.runner.kv_bytes
    runtime = max(0, loaded.resident_bytes - held)
    _run_growing(loaded.runner)
    workspace = max(0, resident_bytes("VmHWM") - loaded.resident_bytes)
    del loaded
    error = _compare(artifact, load_file(reference_path))
    print(
        json.dumps(
            {"runtime_bytes": runtime, "workspace_bytes": with_gaps(workspace), "error": error}
        )
    )


if __name__ == "__main__":
    main()
