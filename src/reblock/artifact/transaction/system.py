"""What edits need of the system and the standard library does not offer as such."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "check_replaceable",
    "clone",
    "exchange",
    "holds_mounts",
    "is_mount_point",
    "keep_metadata",
    "remove_tree",
    "sync_path",
    "sync_tree",
]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# ioctl_ficlone(2): _IOW(0x94, 9, int)
_FICLONE = 0x40049409
# ioctl_iflags(2): _IOR('f', 1, long), and the flags that keep a file from being replaced
_FS_IOC_GETFLAGS = 0x80086601
_IMMUTABLE_OR_APPEND = 0x10 | 0x20
# What the system answers where a user may not give files away, or a container knows no such user.
_OWNER_REFUSED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP}
# An attribute that the other file system does not know or the user may not set is no failure.
_ATTRIBUTE_REFUSED = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENODATA, errno.EINVAL}


def exchange(first: str, second: str) -> None:
    """Exchange what stands at two paths in one step, by renameat2(2).

    Raises:
        OSError: the system refused, with ENOSYS where it has no such step.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), second)
    if libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), second)


def clone(source: int, destination: int) -> bool:
    """Let two open files share their blocks on the disk until one is written; False if refused."""
    try:
        fcntl.ioctl(destination, _FICLONE, source)
    except OSError as error:
        if error.errno in {errno.EIO, errno.ENOSPC, errno.EDQUOT}:
            raise
        return False
    return True


def sync_path(path: str) -> None:
    """Force a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def sync_tree(directory: str) -> None:
    """Force every file that was written in a directory, and every directory, to the disk."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            # A file with other links was not written here.
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                sync_path(path)
        sync_path(parent)


def remove_tree(directory: str) -> bool:
    """Remove a directory with its content and return whether it is gone.

    What is mounted in it is not touched, and neither is what a symbolic link leads to.
    """
    if not os.path.lexists(directory):
        return True
    if not stat.S_ISDIR(os.lstat(directory).st_mode) or holds_mounts(directory):
        return False
    with suppress(RecursionError):  # somebody has nested directories deeper than an artifact may
        shutil.rmtree(directory, ignore_errors=True)
        if os.path.lexists(directory):
            _let_in(directory)
            shutil.rmtree(directory, ignore_errors=True)
    return not os.path.lexists(directory)


def _let_in(directory: str) -> None:
    """Make directories writable: those that are not keep what is in them.

    Files stay as they are, as others may have links to them. Directories are named by open
    descriptors, so that nobody can put a link in the place of one.
    """
    _make_writable(directory, None)
    with suppress(OSError):
        for _, names, _, descriptor in os.fwalk(directory):
            for name in names:
                _make_writable(name, descriptor)


def _make_writable(name: str, parent: int | None) -> None:
    with suppress(OSError):
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(name, flags, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IRWXU)
        finally:
            os.close(descriptor)


def is_mount_point(path: str) -> bool:
    """Return whether something is mounted on exactly `path`, which is a real path."""
    return os.fsencode(path) in _mount_points()


def holds_mounts(directory: str) -> bool:
    """Return whether something is mounted on a directory or below it; it is a real path."""
    start = os.fsencode(directory)
    return any(point == start or point.startswith(start + b"/") for point in _mount_points())


def _mount_points() -> set[bytes]:
    """Return where something is mounted; see proc_pid_mountinfo(5)."""
    points = set()
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            escaped = line.split(b" ")[4]
            points.add(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), escaped))
    return points


def check_replaceable(directory: str, name: str) -> None:
    """Check that a rename can put another file in the place of one in `directory`.

    Raises:
        OSError: it cannot, with the reason.
    """
    path = os.path.join(directory, name)
    if not os.path.lexists(path):
        return
    status, parent = os.lstat(path), os.stat(os.path.dirname(path))
    user = os.geteuid()
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if is_mount_point(path):
        raise OSError(errno.EBUSY, "something is mounted on it", path)
    if parent.st_mode & stat.S_ISVTX and user not in {0, status.st_uid, parent.st_uid}:
        raise OSError(errno.EPERM, "belongs to somebody else, in a directory with t", path)
    if any(map(_is_kept_as_it_is, (path, os.path.dirname(path)))):
        raise OSError(errno.EPERM, "is marked as not to be changed (lsattr)", path)


def _is_kept_as_it_is(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        answer = fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:  # a file system that knows no such flags
        return False
    finally:
        os.close(descriptor)
    return bool(int.from_bytes(answer[:4], sys.byteorder) & _IMMUTABLE_OR_APPEND)


def keep_metadata(original: str, written: str, *, keep_times: bool) -> None:
    """Give the file or directory `written` what another has, but for its content.

    That is the mode, extended attributes (access control lists are such), where allowed the
    owner, and on request the times.
    """
    status = os.stat(original)
    _give_to(written, status.st_uid, status.st_gid)
    # Before the mode, which may forbid to write them.
    _copy_attributes(original, written)
    os.chmod(written, stat.S_IMODE(status.st_mode))
    if keep_times:
        os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))


def _give_to(path: str, user: int, group: int) -> None:
    """Give a file to a user and a group, or at least to the group, as far as that is allowed."""
    for owner in ((user, group), (-1, group)):
        try:
            os.chown(path, *owner)
        except OSError as error:
            if error.errno not in _OWNER_REFUSED:
                raise
        else:
            return


def _copy_attributes(original: str, written: str) -> None:
    try:
        names = os.listxattr(original)
    except OSError as error:
        if error.errno not in _ATTRIBUTE_REFUSED:
            raise
        return
    for name in names:
        _try_attribute(lambda name=name: os.setxattr(written, name, os.getxattr(original, name)))  # type: ignore[misc]
    # A directory can give what is made in it lists of access that the original has not.
    for name in set(os.listxattr(written)) - set(names):
        if name.startswith(("system.posix_acl_", "user.")):
            _try_attribute(lambda name=name: os.removexattr(written, name))  # type: ignore[misc]


def _try_attribute(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        if error.errno not in _ATTRIBUTE_REFUSED:
            raise
