"""Command lines that make a plan come true, ready to be pasted."""

from __future__ import annotations

import shlex
from fractions import Fraction
from typing import TYPE_CHECKING

from reblock.planning.obstacles import obstacles_for_rbln
from reblock.planning.result import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        "weight-dtype": settings.weight_dtype,
    }
    if is_count_asked:
        options["kvcache-num-blocks"] = num_blocks
    elif target.is_cpu or isinstance(budget.amount, Fraction):
        options["memory-budget"] = budget.text
    else:
        # optimum-rbln reads no size with a point in it, and no GiB.
        options["memory-budget"] = budget.amount
    name = _as_argument(subject.source.name)
    if not target.is_cpu and _has_no_command(subject):
        return ()
    if target.is_cpu:
        words = ["reblock", "compile", name]
    else:
        options["npu"] = target.device.name
        options["num-devices"] = target.num_devices
        words = ["optimum-rbln-cli", "--model-id", name]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option}", str(value)]
    text = "compile it"
    if not target.is_cpu:
        kind = subject.model.spec.architecture or subject.model.spec.model_type
        text = f"compile it where optimum-rbln is installed, if it has a class for {kind}"
    return (Command(text=text, line=_join(words)),)


def _has_no_command(subject: ModelSubject) -> bool:
    """Return whether optimum-rbln has no plain option for what was planned."""
    return bool(obstacles_for_rbln(subject.source, subject.settings))


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
    words = ["reblock", command, _as_argument(artifact.directory), *arguments]
    if artifact.module is not None:
        words += ["--module", artifact.module]
    return _join(words)


def _as_argument(name: str) -> str:
    """Return a name that no command line takes for an option."""
    return f"./{name}" if name.startswith("-") else name


def _join(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    """Return a word in the shell's own escapes, for what a terminal would obey or not show."""
    escaped = word.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return f"$'{escaped}'"
