"""What edits need of the system and the standard library does not offer as such."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress

__all__ = ["clone", "exchange", "keep_metadata", "remove_tree", "sync_path", "sync_tree"]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# ioctl_ficlone(2): _IOW(0x94, 9, int)
_FICLONE = 0x40049409
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
    """Remove a directory with its content and return whether it is gone."""
    shutil.rmtree(directory, ignore_errors=True)
    if not os.path.lexists(directory):
        return True
    # Directories that may not be written keep what is in them. Files stay as they are: others
    # may have links to them.
    with suppress(OSError):
        os.chmod(directory, stat.S_IRWXU)
    for parent, names, _ in os.walk(directory):
        for path in (os.path.join(parent, name) for name in names):
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(directory, ignore_errors=True)
    return not os.path.lexists(directory)


def keep_metadata(original: str, written: str, *, keep_times: bool) -> None:
    """Give the file or directory `written` what another has, but for its content.

    That is the mode, extended attributes (access control lists are such), where allowed the
    owner, and on request the times.
    """
    status = os.stat(original)
    with suppress(PermissionError):
        os.chown(written, status.st_uid, status.st_gid)
    # Before the mode, which may forbid to write them.
    _copy_attributes(original, written)
    os.chmod(written, stat.S_IMODE(status.st_mode))
    if keep_times:
        os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_attributes(original: str, written: str) -> None:
    try:
        names = os.listxattr(original)
    except OSError as error:
        if error.errno not in _ATTRIBUTE_REFUSED:
            raise
        return
    for name in names:
        try:
            os.setxattr(written, name, os.getxattr(original, name))
        except OSError as error:
            if error.errno not in _ATTRIBUTE_REFUSED:
                raise
