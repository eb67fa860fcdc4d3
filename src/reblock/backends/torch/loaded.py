"""Loads an artifact and compares the memory that it takes with its plan.

    python -m reblock.backends.torch.loaded DIRECTORY

runs in a process of its own, so that nothing else is measured and compiled code that crashes takes
nothing with it. It prints one line of JSON, {"outcome": o, "detail": d}, as in
`reblock.artifact.verify.Check`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import torch

from reblock.artifact.reader import open_artifact
from reblock.backends.loading import memory_faults
from reblock.backends.torch.host import check_host
from reblock.backends.torch.profile import load_in_full
from reblock.errors import DoesNotFit, HostMismatch, ReblockError
from reblock.units import format_gib

if TYPE_CHECKING:
    from reblock.artifact.reader import Artifact
    from reblock.artifact.verify import Outcome


def _check(artifact: Artifact) -> tuple[Outcome, str]:
    info, plan = artifact.config.reblock, artifact.memory_plan()
    assert info is not None
    try:
        check_host(info, path=artifact.directory, torch_version=torch.__version__)
    except HostMismatch as error:
        return "skipped", str(error)
    total, available = plan.total_at(plan.current_blocks)[0][0], artifact.device().available_bytes
    if total > available:
        return "skipped", f"it takes {format_gib(total)}, and {format_gib(available)} are here"
    try:
        loaded = load_in_full(artifact)
    except DoesNotFit as error:
        return "skipped", str(error)
    tensors = loaded.runner.cache.tensors
    faults = memory_faults(
        plan,
        weight_bytes=loaded.weight_bytes,
        cache_bytes={name: t.numel() * t.element_size() for name, t in tensors.items()},
        resident_bytes=loaded.resident_bytes,
    )
    if faults:
        return "failed", "; ".join(faults)
    terms = {name: grid[0][0] for name, grid in plan.static.items()}
    terms["KV cache"] = plan.kv_bytes_at(plan.current_blocks)[0][0]
    planned = ", ".join(f"{name} {format_gib(num_bytes)}" for name, num_bytes in terms.items())
    return "passed", f"{planned}; {format_gib(loaded.resident_bytes)} resident when loaded"


def main() -> None:
    """Check the artifact that the command line names and print the result."""
    (directory,) = sys.argv[1:]
    # What libraries and compiled code print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        outcome, detail = _check(open_artifact(directory))
    except ReblockError as error:
        outcome, detail = "failed", str(error)
    answers.write(json.dumps({"outcome": outcome, "detail": detail}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
