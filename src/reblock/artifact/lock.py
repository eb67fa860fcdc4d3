"""One edit of an artifact at a time: a lock on its directory, which ends with its holder.

The lock is an advisory one of the system (`flock`), so a command that is killed leaves none. An
edit replaces the directory; who has waited for it therefore locks what stands there afterwards.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reblock.errors import EditFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EditLock", "edit_lock"]

_POLL_S = 0.02
_NOTICE_S = 1.0


class EditLock:
    """Held on the artifact in `directory`; made by `edit_lock`."""

    def __init__(self, directory: str, descriptor: int) -> None:
        self.directory = directory
        self._identity = _identity(os.fstat(descriptor))

    def check(self) -> None:
        """Check that the directory is still the one that was locked.

        It may not be where something other than reblock replaced it, or where the file system
        has no locks.

        Raises:
            EditFailed: It is another one or gone.
        """
        if _identity_at(self.directory) != self._identity:
            raise EditFailed(
                f"{self.directory!r} was replaced by another command meanwhile, and this one has "
                "changed nothing; run it again",
                path=self.directory,
            )


@contextmanager
def edit_lock(directory: str, on_wait: Callable[[], None] | None = None) -> Iterator[EditLock]:
    """Keep other edits of the artifact in `directory` out, waiting for one that is under way.

    Args:
        directory: Where the artifact is.
        on_wait: Called once, where the wait takes longer than a second.

    Raises:
        EditFailed: No directory is there that can be opened.
    """
    descriptor = _open_locked(directory, _Patience(on_wait))
    try:
        yield EditLock(directory, descriptor)
    finally:
        os.close(descriptor)


class _Patience:
    """Sleeps between two attempts, and says so once when that has taken a while."""

    def __init__(self, on_wait: Callable[[], None] | None) -> None:
        self._on_wait = on_wait
        self._notice_at = time.monotonic() + _NOTICE_S

    def sleep(self) -> None:
        if self._on_wait is not None and time.monotonic() >= self._notice_at:
            self._on_wait()
            self._on_wait = None
        time.sleep(_POLL_S)


def _open_locked(directory: str, patience: _Patience) -> int:
    while True:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise EditFailed(
                f"{directory!r} cannot be opened for an edit: {error.strerror}", path=directory
            ) from error
        try:
            while not _try_lock(descriptor):
                patience.sleep()
            is_there = _identity_at(directory) == _identity(os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        if is_there:
            return descriptor
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks on directories, as NFS may be; `check` is what is left.
        return True
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_at(path: str) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(path))
    except OSError:
        return None
