"""Whether an artifact takes the memory that its plan says, found out by loading it elsewhere.

Imports no backend itself: the process that is started does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reblock.artifact.verify import Check
from reblock.errors import HostMismatch, MissingDependency
from reblock.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.config import RBLNConfig
    from reblock.memory import MemoryPlan

__all__ = ["check_backend", "check_memory", "memory_faults", "require_torch"]

_NAME = "memory"
# Libraries and allocators take a little more or less each time.
_TOLERANCE_PERCENT = 2


def require_torch(purpose: str) -> None:
    """Check that what runs and compiles models is installed; `purpose` begins the message.

    Raises:
        MissingDependency: It is not.
    """
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            install = "pip install 'reblock[torch]'"
            raise MissingDependency(
                f"{purpose} needs {package}, which is not installed: {install}",
                package=package,
                install=install,
            )


def check_backend(config: RBLNConfig, directory: str) -> None:
    """Check that the artifact in `directory` is one that runs here.

    Raises:
        HostMismatch: It is for an RBLN device.
    """
    if config.backend != "torch":
        raise HostMismatch(
            f"compiled by optimum-rbln for {config.npu or 'an RBLN device'}, and optimum-rbln runs "
            "it; programs for the cpu are run here: compile the model again, with reblock",
            path=directory,
        )


def check_memory(directory: str) -> Check:
    """Load the artifact in `directory` in a process of its own and compare its memory.

    Its compiled code runs there, so its other checks should have passed before.
    """
    try:
        require_torch("loading it")
    except MissingDependency as error:
        return Check(name=_NAME, outcome="skipped", detail=str(error))
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "reblock.backends.torch.loaded", directory],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        check=False,
    )
    if outcome.returncode != 0:
        detail = f"loading it ended with {_end(outcome.returncode)}"
        if lines := outcome.stderr.strip().splitlines():
            detail += f": {lines[-1]}"
        return Check(name=_NAME, outcome="failed", detail=detail)
    answer = json.loads(outcome.stdout)
    return Check(name=_NAME, outcome=answer["outcome"], detail=answer["detail"])


def memory_faults(
    plan: MemoryPlan, *, weight_bytes: int, cache_bytes: Mapping[str, int], resident_bytes: int
) -> list[str]:
    """Return what differs between the plan of one cpu and the memory that was taken.

    Args:
        plan: The plan.
        weight_bytes: What all weights hold: as planned, exactly.
        cache_bytes: What every tensor of the KV cache holds: as planned, exactly.
        resident_bytes: What the whole process takes: as planned, and 2 % more at most.
    """
    faults = []
    planned = sum(map(sum, plan.static.get("Weight", ())))
    if weight_bytes != planned:
        faults.append(_differs("the weights", weight_bytes, planned))
    for cache in plan.caches:
        held, planned = cache_bytes.get(cache.name, 0), sum(map(sum, cache.bytes_grid))
        if held != planned:
            faults.append(_differs(f"cache {cache.name!r}", held, planned))
    planned = sum(map(sum, plan.total_at(plan.current_blocks)))
    if resident_bytes * 100 > planned * (100 + _TOLERANCE_PERCENT):
        faults.append(_differs("the whole process", resident_bytes, planned))
    return faults


def _differs(what: str, held: int, planned: int) -> str:
    return f"{what}: {format_bytes(held)}, where the plan says {format_bytes(planned)}"


def _end(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
