"""A directory that is built beside its target and put in its place in one step.

Both of it lie in the directory that holds the target, so that a rename can move it there:

    .<name>.reblock-<8 hex digits>        the stage; after an exchange, the old artifact
    .<name>.reblock-<8 hex digits>.lock   an empty file, locked while its maker is at work

The second is made first and removed last. So whatever kills the maker, what it leaves has a
marker that is no longer locked, and the next command can tell that it may be removed. What has no
marker is nobody's but the user's.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reblock.artifact.transaction.lock import try_flock
from reblock.artifact.transaction.system import (
    exchange,
    keep_metadata,
    remove_tree,
    sync_path,
    sync_tree,
)
from reblock.artifact.transaction.undisturbed import undisturbed
from reblock.errors import DestinationExists, EditFailed, ReblockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Stage",
    "destination_exists",
    "edit_failed",
    "left_note",
    "remove_dead_stages",
    "stage_beside",
]

# Of the 255 that a name may have: the rest is for what makes the name of a stage.
_MAX_NAME_BYTES = 200
_MARKER = re.compile(r"\..+\.reblock-[0-9a-f]{8}\.lock", re.DOTALL)
_MARKER_SUFFIX = ".lock"


class Stage:
    """A directory being built at `path`, to be put at `target`; made by `stage_beside`.

    `left` is, in the end, what the system did not let be removed: the stage, the old artifact
    or the marker, or None.
    """

    def __init__(self, path: str, target: str, *, is_last: bool) -> None:
        self.path = path
        self.target = target
        self._is_last = is_last
        self.is_committed = False
        self.left: str | None = None

    def commit_new(self, check: Callable[[], None] | None = None) -> None:
        """Put the stage at the target, where nothing or an empty directory is.

        `check` is called just before that.

        Raises:
            DestinationExists: something has appeared there in the meantime.
            OSError: the system refused; nothing has changed.
        """
        sync_tree(self.path)
        if check is not None:
            check()
        with undisturbed(is_last=self._is_last):
            try:
                os.rename(self.path, self.target)  # replaces an empty directory, nothing else
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise destination_exists(self.target) from error
                raise
            self._confirm(lambda: os.rename(self.target, self.path))

    def commit_replace(self, check: Callable[[str], None]) -> None:
        """Put the stage at the target; what was there is at `path` afterwards, to be removed.

        `check` is given the place of what is replaced, just before that and just after: what
        others have done to it in between would be lost with it, and so the step is undone.

        Raises:
            OSError: the system refused; nothing has changed.
            EditFailed: `check` has raised it; nothing has changed.
        """
        sync_tree(self.path)
        check(self.target)
        with undisturbed(is_last=self._is_last):
            exchange(self.path, self.target)
            self._confirm(lambda: exchange(self.path, self.target), check=lambda: check(self.path))

    def _confirm(self, undo: Callable[[], None], check: Callable[[], None] | None = None) -> None:
        """Force the step that was taken to the disk, or undo it."""
        self.is_committed = True
        try:
            if check is not None:
                check()
            sync_path(os.path.dirname(self.target))
        except (OSError, EditFailed) as error:
            try:
                undo()
            except OSError:
                raise ReblockError(
                    f"{self.target!r} was written, but the system did not confirm that it reached "
                    f"the disk: {error}"
                ) from error
            self.is_committed = False
            raise


@contextmanager
def stage_beside(target: str, *, is_last: bool = False) -> Iterator[Stage]:
    """Yield an empty `Stage` in the directory that holds `target`, making that where needed.

    A symbolic link at `target` is followed: what it leads to is what a commit replaces. The
    stage gets the mode and, where the system allows, the owner of a directory at the target.
    What stands at `path` is removed at the end: what was not committed, directories made on the
    way included, or what was replaced. Of a failure, what the system does not let be removed is
    named in a note of the exception.

    Args:
        target: Where the stage is to be put.
        is_last: Whether signals stay ignored once it has been put there, for a command that then
            has only to say so and to end.

    Raises:
        EditFailed: the system refused a write before the commit; the target is unchanged.
    """
    real = os.path.realpath(target)
    parent, name = os.path.split(real)
    made: list[str] = []
    marker = -1
    stage = Stage(os.path.join(parent, _stage_name(name)), real, is_last=is_last)
    try:
        _make_directories(parent, made)
        marker = _make_marker(stage.path + _MARKER_SUFFIX)
        os.mkdir(stage.path)
        if os.path.isdir(real):
            keep_metadata(real, stage.path, keep_times=False)
        yield stage
    except OSError as error:
        if stage.is_committed:
            raise ReblockError(f"{target!r} was written, but then: {error}") from error
        failure = edit_failed(error, target, parent)
        _clean_up(stage, made, failure)
        raise failure from error
    except BaseException as error:
        _clean_up(stage, made, error)
        raise
    else:
        _clean_up(stage, made)
    finally:
        if marker >= 0:
            os.close(marker)


def remove_dead_stages(parent: str) -> list[str]:
    """Remove from `parent` the stages whose makers are gone; return those that stay."""
    try:
        names = sorted(name for name in os.listdir(parent) if _MARKER.fullmatch(name))
    except OSError:
        return []
    left = []
    for name in names:
        marker = os.path.join(parent, name)
        descriptor = _open_marker(marker)
        if descriptor is None:
            continue
        try:
            # Locked before it is looked at again: its maker may just have been done with it.
            if try_flock(descriptor) and os.path.lexists(marker):
                with undisturbed():
                    if not _remove(marker.removesuffix(_MARKER_SUFFIX)):
                        left.append(marker.removesuffix(_MARKER_SUFFIX))
        finally:
            os.close(descriptor)
    return left


def destination_exists(destination: str) -> DestinationExists:
    """Return the error for a destination that is taken."""
    return DestinationExists(
        f"{destination!r} exists and is not an empty directory; give another output directory",
        path=destination,
    )


def edit_failed(error: OSError, target: str, parent: str) -> EditFailed:
    """Return the error for what the system refused, before anything was changed."""
    where = error.filename or parent
    hint = ""
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        hint = "; write to a directory that you may change, with --output-dir"
    return EditFailed(
        f"cannot write {target!r}, nothing was changed: {os.fsdecode(where)}: "
        f"{error.strerror or error}{hint}",
        path=os.fsdecode(where),
    )


def _stage_name(name: str) -> str:
    while len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = name[:-1]
    return f".{name}.reblock-{os.urandom(4).hex()}"


def _make_marker(path: str) -> int:
    """Make the marker of a stage, locked, and return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            while try_flock(descriptor) is False:
                pass  # another command is looking at it, which takes no time
            if os.path.lexists(path):
                # Others may have to look at it, and remove it.
                os.fchmod(descriptor, 0o644)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was taken for a dead one before it could be locked


def _open_marker(path: str) -> int | None:
    """Open what looks like a marker; None where it is none of ours or cannot be opened."""
    # Some file systems let only those lock a file who may write it.
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            continue
        except OSError:
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == 0:
            return descriptor
        os.close(descriptor)
        return None
    return None


def _clean_up(stage: Stage, made: list[str], reason: BaseException | None = None) -> None:
    """Remove what is at the stage's path; `reason` is told of what could not be removed."""
    with undisturbed():
        _remove(stage.path)
        for path in (stage.path, stage.path + _MARKER_SUFFIX):
            if os.path.lexists(path):
                stage.left = path
                break
        if stage.left is not None and reason is not None:
            reason.add_note(left_note(stage.left))
        if not stage.is_committed:
            for directory in reversed(made):
                with suppress(OSError):  # somebody else has put something there
                    os.rmdir(directory)


def left_note(path: str) -> str:
    """Return what to say of a path that could not be removed."""
    return f"{path} could not be removed; the next command on this artifact tries again"


def _remove(path: str) -> bool:
    """Remove a stage and its marker; the marker stays where the stage does."""
    if not remove_tree(path):
        return False
    with suppress(OSError):
        os.unlink(path + _MARKER_SUFFIX)
    return not os.path.lexists(path + _MARKER_SUFFIX)


def _make_directories(path: str, made: list[str]) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        os.mkdir(directory)
        made.append(directory)
