"""Mounts that nobody else sees, and system calls that a process denies to itself."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_RELATIME = 1, 32, 4096, 16384, 1 << 21
# nosuid, nodev, noexec, noatime, nodiratime: numbers that statvfs and mount have in common.
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
_ST_RELATIME = 4096


def namespace_prefix() -> list[str]:
    """Return a command line that runs another one where it may mount what nobody else sees."""
    if os.geteuid() == 0:
        return ["unshare", "--mount"]
    return ["unshare", "--user", "--map-root-user", "--mount"]


@cache
def may_mount() -> bool:
    """Return whether this system lets the tests mount file systems of their own."""
    probe = [*namespace_prefix(), "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def need_mounts() -> None:
    """Skip the test where file systems cannot be mounted."""
    if not may_mount():
        pytest.skip("this system does not let the tests mount file systems of their own")


def need_overlay() -> None:
    """Skip the test where no overlay can be mounted."""
    need_mounts()
    script = "mount -t tmpfs t /mnt && mkdir /mnt/l /mnt/u /mnt/w /mnt/m && mount -t overlay -o "
    script += "lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/w,userxattr o /mnt/m"
    probe = [*namespace_prefix(), "sh", "-c", script]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this system does not let the tests mount an overlay")


def remount_read_only(path: str) -> None:
    """Make all that is mounted at and below `path` read-only, for this process alone.

    The process must be in a mount namespace of its own, as `namespace_prefix` starts one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.unshare, _CLONE_NEWNS)
    _call(libc.mount, os.fsencode(path), os.fsencode(path), None, _MS_BIND | _MS_REC, None)
    for place in _mount_points_below(path):
        flags = os.statvfs(place).f_flag
        kept = flags & _KEPT_FLAGS | (_MS_RELATIME if flags & _ST_RELATIME else 0)
        remount = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept
        _call(libc.mount, None, os.fsencode(place), None, remount, None)


def _mount_points_below(path: str) -> set[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        places = [line.split()[4] for line in file]
    return {place for place in places if place == path or place.startswith(path + "/")}


def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    if function(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), function.__name__)


# Numbers of system calls on x86-64 and on the architectures with the generic table.
_NUMBERS = {
    "x86_64": {"link": 86, "linkat": 265, "renameat2": 316, "ioctl": 16},
    "aarch64": {"linkat": 37, "renameat2": 276, "ioctl": 29},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# What a file system answers that has no hard links, and one that cannot exchange directories.
NO_LINKS = [("link", errno.EPERM), ("linkat", errno.EPERM)]
NO_EXCHANGE = [("renameat2", errno.EINVAL)]
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def need_filters() -> None:
    """Skip the test where a process cannot deny itself system calls."""
    if platform.machine() not in _NUMBERS:
        pytest.skip(f"the numbers of system calls on {platform.machine()} are not known here")


def refuse_calls(refused: Sequence[tuple[str, int]]) -> None:
    """Let each of these system calls of this process fail with its error number from now on.

    Stands in for file systems that cannot be mounted here, such as one without hard links.
    """
    if not refused:
        return
    numbers = _NUMBERS[platform.machine()]
    program = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    for name, code in refused:
        if name in numbers:  # where there is no `link`, the C library calls `linkat`
            program.append(struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, numbers[name]))
            program.append(struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | code))
    program.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    filters = ctypes.create_string_buffer(b"".join(program))
    described = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.prctl, _PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
    _call(libc.prctl, _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), described, 0, 0)
