"""Command lines that make a plan come true, ready to be pasted."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from reblock.planning.result import Command

if TYPE_CHECKING:
    from reblock.artifact.reader import Artifact
    from reblock.budget import MemoryBudget
    from reblock.planning.candidate import Candidate, ModelSubject

__all__ = ["artifact_commands", "model_commands"]


def model_commands(
    subject: ModelSubject,
    candidate: Candidate,
    budget: MemoryBudget,
    *,
    num_blocks: int,
    is_count_asked: bool,
) -> tuple[Command, ...]:
    """Return how to compile the model as it was planned.

    Unless a count was asked for, the budget stands there and not the count: once the programs are
    compiled and measured, it gives the count that is right for them.
    """
    settings, target = subject.settings, subject.target
    options: dict[str, object] = {
        "batch-size": candidate.batch_size,
        "max-seq-len": candidate.max_seq_len,
        "attn-impl": candidate.attn_impl,
        "kvcache-partition-len": candidate.kvcache_partition_len,
        "prefill-chunk-size": settings.prefill_chunk_size,
        "dtype": settings.dtype,
    }
    if is_count_asked:
        options["kvcache-num-blocks"] = num_blocks
    else:
        options["memory-budget"] = budget.text
    name = subject.source.name
    if target.is_cpu:
        words = ["reblock", "compile", name]
    else:
        options["npu"] = target.device.name
        options["num-devices"] = target.num_devices
        words = ["optimum-rbln-cli", "--model-id", name]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option}", str(value)]
    text = "compile it" if target.is_cpu else "compile it with optimum-rbln"
    return (Command(text=text, line=shlex.join(words)),)


def artifact_commands(
    artifact: Artifact, *, num_blocks: int, needed_bytes: int
) -> tuple[Command, ...]:
    """Return how to give the artifact the count, by the count and by the smallest budget for it."""
    held = artifact.config.kvcache_num_blocks
    if num_blocks == held:
        return (Command(text="the artifact has that count", line=_reblock("get", artifact)),)
    return (
        Command(text="set the count", line=_reblock("set", artifact, str(num_blocks))),
        Command(
            text="or see what changes first",
            line=_reblock("set", artifact, "--memory-budget", str(needed_bytes), "--dry-run"),
        ),
    )


def _reblock(command: str, artifact: Artifact, *arguments: str) -> str:
    words = ["reblock", command, artifact.directory, *arguments]
    if artifact.module is not None:
        words += ["--module", artifact.module]
    return shlex.join(words)
