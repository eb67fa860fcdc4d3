"""Watches the memory of a process that serves: `reblock generate`, from outside, through /proc."""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import subprocess
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ServedMemory", "generate_watched", "peak_rss_bytes", "pss_bytes", "resident_at"]

_SAMPLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedMemory:
    """What `reblock generate --json` reported and the memory that it took to do so."""

    report: dict[str, Any]
    peak_rss_bytes: int
    peak_pss_bytes: int


def peak_rss_bytes(pid: int) -> int:
    """Return the most physical memory that a process has had (VmHWM)."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def pss_bytes(pid: int) -> int:
    """Return the physical memory of a process, where a page counts in part if others share it."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def resident_at(pid: int, address: int, num_bytes: int) -> int:
    """Return how many bytes of physical memory are behind some addresses of a process."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    first, end = address // page_bytes, -(-(address + num_bytes) // page_bytes)
    with open(f"/proc/{pid}/pagemap", "rb") as file:
        file.seek(first * 8)
        entries = struct.unpack(f"{end - first}Q", file.read((end - first) * 8))
    # See pagemap in the kernel's documentation: the highest bit is of a page that is present.
    return page_bytes * sum(entry >> 63 for entry in entries)


def generate_watched(
    directory: Path, prompts: Sequence[str], *options: str, timeout_s: float = 300
) -> ServedMemory:
    """Run `reblock generate --json` and return its report and the most memory it has had.

    The report is longer than the pipe that it is written to, and is read only after the last
    look at the process. So the process cannot end before, with its peak unseen.
    """
    reading, writing = os.pipe()
    capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1)  # the smallest that there is
    command = os.path.join(sysconfig.get_path("scripts"), "reblock")
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    process = subprocess.Popen(
        [command, "generate", str(directory), "--json", *arguments, *options],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    with open(reading, "rb") as output, process:
        try:
            peak_pss = _watch(process, reading, timeout_s)
            peak_rss = peak_rss_bytes(process.pid)
        except (ProcessLookupError, FileNotFoundError, StopIteration) as error:
            # It has ended, which it does not before its report is read, unless it has failed.
            raise RuntimeError(f"reblock generate failed: {process.communicate()[1]}") from error
        text = output.read()
    assert len(text) > capacity, "the report is too short for the process to wait"
    return ServedMemory(
        report=json.loads(text),
        peak_rss_bytes=peak_rss,
        peak_pss_bytes=peak_pss,
    )


def _watch(process: subprocess.Popen[str], reading: int, timeout_s: float) -> int:
    """Look at a process until it writes and return the most that its PSS was."""
    peak, looks = 0, 0
    while not select.select([reading], [], [], _SAMPLE_S)[0]:
        peak, looks = max(peak, pss_bytes(process.pid)), looks + 1
        if looks * _SAMPLE_S > timeout_s:
            process.kill()
            raise TimeoutError(f"reblock generate has not answered in {timeout_s} s")
    return max(peak, pss_bytes(process.pid))
