"""How the process that runs programs waits and allocates, where its user has not said."""

from __future__ import annotations

import ctypes
import os

from reblock.units import MIB

__all__ = ["keep_freed_memory", "set_waiting"]

# Turns of a loop, 10 to 20 us in all: longer than most waits between two operators.
_SPINS = 1000


def set_waiting() -> None:
    """Let threads that wait for each other spin for a moment and then sleep.

    To be called before torch is loaded, which is when OpenMP reads it. Threads that sleep at once
    take twice as long and more for the steps of a small model, because waking takes longer than
    what an operator does. Threads that spin as long as libgomp lets them (300,000 turns) stand
    still where other work shares the cores: they take the time from the thread they wait for.
    docs/performance.md has the numbers.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    # libgomp goes by the count, other OpenMP libraries by the policy.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["GOMP_SPINCOUNT"] = str(_SPINS)


# Parameters of mallopt(3), and the environment that overrules them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = "glibc.malloc."

# The most that glibc takes for one, and what it pairs with it when it finds them by itself.
_MMAP_THRESHOLD_BYTES = 32 * MIB
_TRIM_THRESHOLD_BYTES = 2 * _MMAP_THRESHOLD_BYTES


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB that was freed, for the next operator to use.

    Without it a tensor of some megabytes goes back to the system when its operator is done, and the
    next one pays for as many pages that the system clears. Other C libraries are left alone.
    """
    is_told = any(name in os.environ for name in _VARIABLES)
    if is_told or _TUNABLES in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
