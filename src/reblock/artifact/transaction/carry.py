"""Bringing the files that an edit does not change into its stage, without writing through them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import nullcontext, suppress
from enum import Enum
from typing import TYPE_CHECKING

from reblock.artifact.location import JOURNAL_NAME
from reblock.artifact.transaction.system import clone, exchange, keep_metadata
from reblock.errors import EditFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from io import RawIOBase

    from reblock.progress import Progress

__all__ = ["ExchangeImpossible", "Sharing", "Watch", "carry_over", "is_inside"]

# Where hard links are refused for a reason that a copy does not share: another owner's file under
# fs.protected_hardlinks, too many links, a file system without links.
_LINK_REFUSED = {errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV}
# Smaller files are those that people edit; an artifact of its own must not share them.
_LARGE_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
# Artifacts are flat, but for modules within modules.
_MAX_DEPTH = 64


class Sharing(Enum):
    """How a stage comes by the files that do not change.

    REPLACE: it takes the place of its source: hard links, else clones (reflinks), else copies.
    SHARE:   it will stand beside its source: clones, else hard links of large files, else copies.
    COPY:    it will stand beside its source and shares nothing with it.
    """

    REPLACE = "replace"
    SHARE = "share"
    COPY = "copy"


class ExchangeImpossible(Exception):  # noqa: N818  no error of the user; caught in `replace`
    """The stage cannot take the place of its target in one step."""


def carry_over(
    source: str,
    destination: str,
    *,
    leave_out: Collection[str],
    sharing: Sharing,
    progress: Progress,
) -> None:
    """Bring the content of the directory `source` into the directory `destination`, as it is.

    Symbolic links stay what they are where the destination will replace the source. Else those
    that lead out of the source are replaced by the file they lead to.

    Args:
        source: The artifact; its files are linked or read, never written.
        destination: An existing directory.
        leave_out: Files that the caller writes itself, by their paths within `source`.
        sharing: Whether files may be shared with the source, and how.
        progress: Is told of large files that have to be copied.

    Raises:
        ExchangeImpossible: the two lie on different file systems or mounts, or what would be
            copied could not be put in place in one step.
        OSError: a file cannot be linked or copied.
    """
    carrier = _Carrier(os.path.realpath(source), sharing, progress)
    carrier.carry(source, destination, leave_out=frozenset([*leave_out, JOURNAL_NAME]))


class Watch:
    """Whether a directory is still as it was, in all that is in it, wherever it stands now."""

    def __init__(self, directory: str) -> None:
        """Take note of what is in `directory`.

        Raises:
            OSError: it cannot be read, or is nested deeper than an artifact may be.
        """
        self._before = _snapshot(directory)

    def check(self, directory: str) -> None:
        """Check that `directory` is the one of which note was taken, and that nothing is changed.

        Raises:
            EditFailed: Something is, by another program than reblock.
        """
        changed = sorted(dict(self._before.items() ^ _snapshot(directory).items()))
        if changed:
            path = os.path.join(directory, changed[0])
            raise EditFailed(
                f"{path!r} was changed by another program during the edit, which has changed "
                "nothing; run it again",
                path=path,
            )


def _snapshot(directory: str) -> dict[str, tuple[int, int, int, int]]:
    """Return what tells whether anything in `directory` is changed: an identity of each entry."""
    top = os.lstat(directory)
    found = {"": (top.st_mode, top.st_ino, 0, 0)}
    pending = [""]
    while pending:
        inner = pending.pop()
        if inner.count(os.sep) > _MAX_DEPTH:
            raise OSError(errno.ELOOP, f"is nested deeper than {_MAX_DEPTH} directories", directory)
        with os.scandir(os.path.join(directory, inner)) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                path = os.path.join(inner, entry.name)
                if path == JOURNAL_NAME:
                    continue
                size, time = status.st_size, status.st_mtime_ns
                if stat.S_ISDIR(status.st_mode):
                    size = time = 0  # what is in it is listed itself
                    pending.append(path)
                found[path] = (status.st_mode, status.st_ino, size, time)
    return found


def is_inside(path: str, directory: str) -> bool:
    """Return whether `path` is `directory` or lies in it; both are real paths."""
    return os.path.commonpath([directory, path]) == directory


class _Carrier:
    """Brings files from a source into a stage; `root` is the real path of the source."""

    def __init__(self, root: str, sharing: Sharing, progress: Progress) -> None:
        self._root = root
        self._sharing = sharing
        self._progress = progress

    def carry(self, source: str, destination: str, leave_out: frozenset[str]) -> None:
        # Read at once: a directory that somebody empties would seem to hold only a part.
        with os.scandir(source) as found:
            entries = list(found)
        for entry in entries:
            target = os.path.join(destination, entry.name)
            if entry.name in leave_out:
                continue
            if entry.is_symlink():
                self._carry_link(entry.path, target)
            elif entry.is_dir():
                os.mkdir(target)
                self.carry(entry.path, target, _within(entry.name, leave_out))
                keep_metadata(entry.path, target, keep_times=True)
            else:
                self._carry_file(entry.path, target)

    def _carry_link(self, path: str, target: str) -> None:
        text, real = os.readlink(path), os.path.realpath(path)
        keeps = self._sharing is Sharing.REPLACE or self._leads_inside(path, text)
        if not keeps and os.path.exists(real):
            if not os.path.isdir(real):
                self._carry_file(real, target)
                return
            # Not copied: it could be anything, an ancestor of the artifact included.
            text = real
        os.symlink(text, target)
        shutil.copystat(path, target, follow_symlinks=False)

    def _leads_inside(self, path: str, text: str) -> bool:
        """Return whether a link leads to an entry of the source, be that a link out of it."""
        holder = os.path.realpath(os.path.dirname(os.path.join(os.path.dirname(path), text)))
        is_entry = os.path.basename(text) not in {"", os.curdir, os.pardir}
        return not os.path.isabs(text) and is_entry and is_inside(holder, self._root)

    def _carry_file(self, path: str, target: str) -> None:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is neither a file, a directory nor a link", path)
        is_large = status.st_size > _LARGE_BYTES
        if self._sharing is Sharing.REPLACE:
            if self._link(path, target):
                return
            if is_large:
                # Asked first, because a copy can take minutes.
                _check_exchange(os.path.dirname(target))
        elif (
            self._sharing is Sharing.SHARE
            and is_large
            and (_clone_file(path, target) or self._link(path, target))
        ):
            return
        self._copy(path, target, status.st_size)

    def _link(self, path: str, target: str) -> bool:
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno == errno.EXDEV and self._sharing is Sharing.REPLACE:
                raise ExchangeImpossible from error
            if error.errno not in _LINK_REFUSED:
                raise
            return False
        return True

    def _copy(self, path: str, target: str, size: int) -> None:
        is_large = size > _LARGE_BYTES
        if is_large and shutil.disk_usage(os.path.dirname(target)).free < size:
            raise OSError(errno.ENOSPC, f"there is no room for another {size:,} bytes", target)
        name = os.path.basename(target)
        with (
            open(path, "rb", buffering=0) as source,
            open(target, "xb", buffering=0) as copy,
            self._progress.bytes_stage(f"copying {name}", size)
            if is_large
            else nullcontext(_ignore) as advance,
        ):
            may_clone = self._sharing is not Sharing.COPY
            if not (may_clone and clone(source.fileno(), copy.fileno())):
                _copy_bytes(source, copy, size, advance)
        keep_metadata(path, target, keep_times=True)


def _within(directory: str, paths: frozenset[str]) -> frozenset[str]:
    """Return those of the paths that lead into a directory, from there on."""
    start = f"{directory}{os.sep}"
    return frozenset(path.removeprefix(start) for path in paths if path.startswith(start))


def _clone_file(path: str, target: str) -> bool:
    with open(path, "rb", buffering=0) as source, open(target, "xb", buffering=0) as copy:
        is_cloned = clone(source.fileno(), copy.fileno())
    if is_cloned:
        keep_metadata(path, target, keep_times=True)
    else:
        os.unlink(target)
    return is_cloned


def _copy_bytes(
    source: RawIOBase, copy: RawIOBase, size: int, advance: Callable[[int], None]
) -> None:
    # No more than it had: a file of the system's can go on without end.
    # Into one buffer, which takes half as long as reading into new ones.
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size > 0 and (num_read := source.readinto(buffer[:size])):
        size -= num_read
        remaining = buffer[:num_read]
        while remaining:
            remaining = remaining[copy.write(remaining) :]
        advance(num_read)


def _ignore(num_bytes: int) -> None:
    """Take the place of a progress bar."""


def _check_exchange(directory: str) -> None:
    """Exchange two empty directories within `directory`, to see whether its file system can.

    Raises:
        ExchangeImpossible: it cannot.
    """
    probes = [os.path.join(directory, f".reblock-probe-{number}") for number in (1, 2)]
    try:
        for probe in probes:
            os.mkdir(probe)
        exchange(*probes)
    except OSError as error:
        raise ExchangeImpossible from error
    finally:
        for probe in probes:
            with suppress(FileNotFoundError):
                os.rmdir(probe)
