"""What the numbers of a benchmark belong to: the machine and the versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

__all__ = ["cpu_name", "describe_machine", "machine_line"]


def describe_machine() -> dict[str, object]:
    """Return the machine and the versions, for the JSON beside the numbers."""
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("reblock", "torch", "transformers")},
    }


def machine_line() -> str:
    """Return the same on one line."""
    machine = describe_machine()
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, reblock {machine['reblock']}"
    )


def cpu_name() -> str:
    """Return the processor's name, or the machine's where it has none."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
