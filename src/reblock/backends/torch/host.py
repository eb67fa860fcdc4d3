"""What a compiled program needs of the machine that runs it: an instruction set and a torch.

Programs are compiled for one of the levels of the x86-64 psABI rather than for the very processor
at hand, so an artifact runs on every machine of that level, and one word says which that is.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from reblock.errors import HostMismatch

if TYPE_CHECKING:
    from reblock.info import ReblockInfo

__all__ = ["check_host", "compiler_march", "host_isa"]

# Flags of /proc/cpuinfo that each level adds to the one before.
_X86_LEVELS = (
    ("x86-64-v2", ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")),
    ("x86-64-v3", ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")),
    ("x86-64-v4", ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")),
)
_ALIASES = {"AMD64": "x86_64", "arm64": "aarch64"}


def _cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    with open(cpuinfo, encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def host_isa() -> str:
    """Return the instruction set of this machine: "x86-64" to "x86-64-v4", or its name."""
    machine = _ALIASES.get(platform.machine(), platform.machine())
    if machine != "x86_64":
        return machine
    flags = _cpu_flags()
    level = "x86-64"
    for name, needed in _X86_LEVELS:
        if not flags.issuperset(needed):
            break
        level = name
    return level


def compiler_march(isa: str) -> str | None:
    """Return the `-march` to compile `isa` with; None leaves the choice to torch."""
    return isa if isa.startswith("x86-64") else None


def _runs_on(needed: str, host: str) -> bool:
    levels = ("x86-64", *(name for name, _ in _X86_LEVELS))
    if needed in levels and host in levels:
        return levels.index(needed) <= levels.index(host)
    return needed == host


def check_host(info: ReblockInfo, *, path: str, torch_version: str) -> None:
    """Check that programs compiled as `info` says can run here.

    Raises:
        HostMismatch: another torch, or a processor without the instruction set, is here.
    """
    if info.torch_version != torch_version:
        raise HostMismatch(
            f"compiled with torch {info.torch_version}, but torch {torch_version} is "
            f"installed; install torch=={info.torch_version.partition('+')[0]}, or compile the "
            "model again",
            path=path,
        )
    host = host_isa()
    if not _runs_on(info.isa, host):
        raise HostMismatch(
            f"compiled for {info.isa} processors, but this one is {host}; run it on such "
            "a machine, or compile the model again here",
            path=path,
        )
