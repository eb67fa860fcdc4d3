"""An edit in place: some files of an artifact are replaced, all of them in one step."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from reblock.artifact.location import CONFIG_NAME
from reblock.artifact.transaction.carry import (
    ExchangeImpossible,
    Sharing,
    Watch,
    carry_over,
)
from reblock.artifact.transaction.clean_up import clean_up_for_edit
from reblock.artifact.transaction.journal import finish_journal, journal_in
from reblock.artifact.transaction.stage import edit_failed, left_note, stage_beside
from reblock.artifact.transaction.system import check_replaceable, holds_mounts, keep_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reblock.artifact.transaction.lock import EditLock
    from reblock.progress import Progress

__all__ = ["keep_file_metadata", "replace_files"]

# What the system answers where it could never exchange the two: another mount, a mount point, a
# directory of somebody else in one with the sticky bit, a file system without that step.
_CANNOT_EXCHANGE = {
    errno.EXDEV,
    errno.EBUSY,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
}


def replace_files(
    lock: EditLock,
    *,
    names: Collection[str],
    write: Callable[[str], None],
    check: Callable[[str, str | None], None],
    progress: Progress,
    is_last: bool = False,
) -> list[str]:
    """Replace files of the artifact that is locked.

    Args:
        lock: The lock on the artifact.
        names: The files that are replaced, or new, by their paths within the artifact. All others
            stay as they are.
        write: Writes these files into the directory that it is given, where the directories that
            they lie in are. It may be called twice.
        check: Given a directory and another, or None, whose files stand in for those in the
            first; raises where that is not the artifact that was to be written.
        progress: Is told of large files that have to be copied.
        is_last: Whether signals stay ignored once the change is made, for a command that then has
            only to say so and to end.

    Returns:
        Notes on what is left to be done: the artifact is changed, but something that the system
        did not let be removed or moved is still there.

    Raises:
        EditFailed: The system refused a write; the artifact is unchanged.
    """
    lock.check()
    target = os.path.realpath(lock.directory)
    if not os.access(target, os.W_OK):
        # Found out here, because an exchange writes to the parent directory and not to this one.
        raise edit_failed(_refusal(target), lock.directory, target)
    notes = [left_note(path) for path in clean_up_for_edit(lock)]
    if _may_exchange(target):
        try:
            return notes + _exchange(lock, target, names, write, check, progress, is_last=is_last)
        except ExchangeImpossible as reason:
            notes += getattr(reason, "__notes__", [])
    return notes + _journal(lock, target, names, write, check, is_last=is_last)


def _refusal(directory: str) -> OSError:
    is_read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
    code = errno.EROFS if is_read_only else errno.EACCES
    return OSError(code, os.strerror(code), directory)


def _may_exchange(target: str) -> bool:
    parent = os.path.dirname(target)
    is_one_device = os.stat(parent).st_dev == os.stat(target).st_dev
    # What is mounted in it would be carried off with the old artifact.
    return os.access(parent, os.W_OK) and is_one_device and not holds_mounts(target)


def _exchange(
    lock: EditLock,
    target: str,
    names: Collection[str],
    write: Callable[[str], None],
    check: Callable[[str, str | None], None],
    progress: Progress,
    *,
    is_last: bool,
) -> list[str]:
    with stage_beside(target, is_last=is_last) as stage:
        watch = Watch(target)
        carry_over(target, stage.path, leave_out=names, sharing=Sharing.REPLACE, progress=progress)
        write(stage.path)
        keep_file_metadata(target, stage.path, names)
        check(stage.path, None)
        lock.check()
        try:
            stage.commit_replace(watch.check)
        except OSError as error:
            if error.errno in _CANNOT_EXCHANGE:
                raise ExchangeImpossible from error
            raise
    return [] if stage.left is None else [left_note(stage.left)]


def _journal(
    lock: EditLock,
    target: str,
    names: Collection[str],
    write: Callable[[str], None],
    check: Callable[[str, str | None], None],
    *,
    is_last: bool,
) -> list[str]:
    with journal_in(target, is_last=is_last) as journal:
        watch = Watch(target)
        for name in names:
            check_replaceable(target, name)
        for directory in sorted({os.path.dirname(name) for name in names} - {""}):
            os.makedirs(os.path.join(journal.staged, directory))
            keep_metadata(
                os.path.join(target, directory),
                os.path.join(journal.staged, directory),
                keep_times=False,
            )
        write(journal.staged)
        keep_file_metadata(target, journal.staged, names)
        check(target, journal.staged)
        lock.check()
        journal.commit(lambda: watch.check(target))
    try:
        finish_journal(target)
    except OSError as error:
        where = os.fsdecode(error.filename or target)
        note = (
            f"the change is made, but {where} could not be moved or removed: {error.strerror}; "
            "the next command that edits this artifact tries again"
        )
        return [note]
    return []


def keep_file_metadata(source: str, stage: str, names: Collection[str]) -> None:
    """Give files in `stage` the modes and attributes of those of their names in `source`.

    One that is new gets those of the configuration beside it.
    """
    for name in names:
        original = os.path.join(source, name)
        if not os.path.exists(original):
            original = os.path.join(source, os.path.dirname(name), CONFIG_NAME)
        keep_metadata(original, os.path.join(stage, name), keep_times=False)
