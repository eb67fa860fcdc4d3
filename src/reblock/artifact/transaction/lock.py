"""One edit of an artifact at a time: a lock on its directory, which ends with its holder.

The lock is an advisory one of the system (`flock`), so a command that is killed leaves none. An
edit replaces the directory; who has waited for it therefore locks what stands there afterwards.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reblock.errors import ArtifactBusy, EditFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EditLock", "edit_lock", "try_flock"]

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
def edit_lock(
    directory: str,
    *,
    timeout_s: float | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[EditLock]:
    """Keep other edits of the artifact in `directory` out, waiting for one that is under way.

    Args:
        directory: Where the artifact is.
        timeout_s: How long to wait, in seconds; None for as long as it takes.
        on_wait: Called once with who holds the lock, where the wait takes longer than a second.

    Raises:
        ArtifactBusy: The other edit was not done in time.
        EditFailed: No directory is there that can be opened.
    """
    descriptor = _open_locked(directory, _Patience(directory, timeout_s, on_wait))
    try:
        yield EditLock(directory, descriptor)
    finally:
        os.close(descriptor)


def try_flock(descriptor: int) -> bool | None:
    """Lock an open file if nobody else has; None where its file system knows no such lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class _Patience:
    """Sleeps between two attempts, says so once when that has taken a while, and ends."""

    def __init__(
        self, directory: str, timeout_s: float | None, on_wait: Callable[[str], None] | None
    ) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        self._start = time.monotonic()

    def sleep(self, descriptor: int) -> None:
        waited = time.monotonic() - self._start
        if self._timeout_s is not None and waited >= self._timeout_s:
            holder = _holder(descriptor)
            raise ArtifactBusy(
                f"{self._directory!r} is being edited by {holder}, which was not done within "
                f"{self._timeout_s:g} s; nothing was changed. Wait for it, or give more time "
                "with --lock-timeout",
                path=self._directory,
                holder=holder,
            )
        if self._on_wait is not None and waited >= _NOTICE_S:
            self._on_wait(_holder(descriptor))
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
            # Where a file system has no locks on directories, `EditLock.check` is what is left.
            while try_flock(descriptor) is False:
                patience.sleep(descriptor)
            is_there = _identity_at(directory) == _identity(os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        if is_there:
            return descriptor
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return who holds the lock on an open file, as well as the system tells; see proc_locks(5)."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    wanted = f"{device}:{status.st_ino}"
    with suppress(OSError), open("/proc/locks", encoding="ascii") as file:
        for line in file:
            # 1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF; "->" marks one that waits.
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
                return f"process {fields[4]}{_command(fields[4])}"
    return "another process"


def _command(process: str) -> str:
    with suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
        words = os.fsdecode(file.read(4096)).split("\0")
        text = " ".join(words).strip()
        if text and text.isprintable():
            return f" ({text if len(text) <= 200 else text[:200] + '...'})"
    return ""


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_at(path: str) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(path))
    except OSError:
        return None
