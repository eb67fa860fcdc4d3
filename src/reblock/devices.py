"""The devices an artifact can be compiled for, and the memory each of them has."""

from __future__ import annotations

import difflib
import os.path
from dataclasses import dataclass

from reblock.errors import ReblockError, UnknownDevice
from reblock.units import GIB, KIB, MIB

__all__ = [
    "CPU_DEFAULT_PARTITION_LEN",
    "CPU_MIN_PARTITION_LEN",
    "CPU_RESERVE_BYTES",
    "KNOWN_DEVICES",
    "Device",
    "get_device",
    "read_cpu_device",
]

# For the interpreter, torch and its thread pools, which no program's memory plan knows of.
CPU_RESERVE_BYTES = 256 * MIB

CPU_MIN_PARTITION_LEN = 16
CPU_DEFAULT_PARTITION_LEN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device: its memory and the limits of its attention kernels.

    The reserve is what the system keeps of every chiplet. Eager attention takes sequences of up
    to `max_eager_seq_len`, and flash attention partitions of `min_partition_len` to
    `max_partition_len` tokens; None is no limit.
    """

    name: str
    dram_bytes: int
    num_chiplets: int
    reserve_bytes_per_chiplet: int
    max_eager_seq_len: int | None
    min_partition_len: int
    max_partition_len: int | None
    default_partition_len: int

    @property
    def available_bytes_per_chiplet(self) -> int:
        """What programs may use of one chiplet."""
        return max(0, self.dram_bytes // self.num_chiplets - self.reserve_bytes_per_chiplet)

    @property
    def available_bytes(self) -> int:
        """What programs may use of the device, all chiplets together."""
        return self.available_bytes_per_chiplet * self.num_chiplets


def _atom(name: str) -> Device:
    return Device(
        name=name,
        dram_bytes=16 * GIB,
        num_chiplets=1,
        reserve_bytes_per_chiplet=288 * MIB,
        max_eager_seq_len=32_768,
        min_partition_len=1_024,
        max_partition_len=32_768,
        default_partition_len=16_384,
    )


def _rebel(name: str) -> Device:
    return Device(
        name=name,
        dram_bytes=144 * GIB,
        num_chiplets=4,
        reserve_bytes_per_chiplet=1 * GIB,
        max_eager_seq_len=16_384,
        min_partition_len=1_024,
        max_partition_len=16_384,
        default_partition_len=8_192,
    )


_ACCELERATORS = {
    device.name: device
    for device in (
        _atom("RBLN-CA02"),
        _atom("RBLN-CA12"),
        _atom("RBLN-CA22"),
        _atom("RBLN-CA25"),
        _rebel("RBLN-CR03"),
        _rebel("RBLN-CR13"),
    )
}

KNOWN_DEVICES = (*_ACCELERATORS, "cpu")


def get_device(name: str) -> Device:
    """Return the device called `name`; "cpu" is the machine this runs on.

    Raises:
        UnknownDevice: There is none of that name.
    """
    if name == "cpu":
        return read_cpu_device()
    if name not in _ACCELERATORS:
        nearest = difflib.get_close_matches(name.upper(), _ACCELERATORS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownDevice(
            f"device {name!r} is not known; known are {', '.join(KNOWN_DEVICES)}{hint}",
            device=name,
            known=KNOWN_DEVICES,
        )
    return _ACCELERATORS[name]


def read_cpu_device(root: str = "/") -> Device:
    """Return the cpu device: its memory is what this process may use of this machine's.

    That is the least of the physical memory and of the limits of the process's control group
    and of every group above it, so that a container counts its own share and not its host's.

    Args:
        root: Where `proc` and `sys` are found.

    Raises:
        ReblockError: The machine does not say how much memory it has.
    """
    return Device(
        name="cpu",
        dram_bytes=min([_read_physical_bytes(root), *_read_cgroup_limits(root)]),
        num_chiplets=1,
        reserve_bytes_per_chiplet=CPU_RESERVE_BYTES,
        max_eager_seq_len=None,
        min_partition_len=CPU_MIN_PARTITION_LEN,
        max_partition_len=None,
        default_partition_len=CPU_DEFAULT_PARTITION_LEN,
    )


def _read_physical_bytes(root: str) -> int:
    path = os.path.join(root, "proc/meminfo")
    for line in _read_lines(path):
        name, _, value = line.partition(":")
        number = value.removesuffix("kB").strip()
        if name == "MemTotal" and number.isdecimal():
            return int(number) * KIB
    raise ReblockError(f"{path} does not say how much memory this machine has (MemTotal)")


def _read_cgroup_limits(root: str) -> list[int]:
    limits: list[int] = []
    for line in _read_lines(os.path.join(root, "proc/self/cgroup")):
        # hierarchy:controllers:path; version 2 has no controllers.
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            # Where both versions are mounted, version 2 lies one level down.
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                limits += _read_limits_upwards(root, mount, group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _read_limits_upwards(
                root, "sys/fs/cgroup/memory", group, "memory.limit_in_bytes"
            )
    return limits


def _read_limits_upwards(root: str, mount: str, group: str, file: str) -> list[int]:
    """Return the limits of a group and of all above it.

    Version 1 writes "no limit" as a number near 2**63. It needs no care: it is never the least.
    """
    # Inside a container the group's path may be the host's, of which the mount shows only the
    # end; its root is then the container's own group, and is always read.
    parts = [part for part in group.split("/") if part not in ("", "..")]
    # "max", which is no number, is version 2's word for no limit.
    return [
        int(line)
        for depth in range(len(parts) + 1)
        for line in _read_lines(os.path.join(root, mount, *parts[:depth], file))
        if line.isdecimal()
    ]


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        # A group without a limit has no such file, and neither has a machine without groups.
        return []
