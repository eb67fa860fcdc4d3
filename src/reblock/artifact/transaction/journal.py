"""Changing the files of a directory that cannot be exchanged as a whole, such as a mount point.

    <artifact>/.reblock-edit/staged/      the files that change, being written
    <artifact>/.reblock-edit/committed/   the same, complete: now they are the artifact's

The one step that counts is the rename of `staged` to `committed`. From then on every reader takes
the files there for those beside it (`location.locate`), and they are moved up one by one. Whoever
comes to an edit that was cut off removes what was staged, or moves up what was committed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reblock.artifact.location import CONFIG_NAME, JOURNAL_NAME, committed_directory
from reblock.artifact.transaction.stage import edit_failed
from reblock.artifact.transaction.system import (
    keep_metadata,
    remove_tree,
    sync_path,
    sync_tree,
)
from reblock.artifact.transaction.undisturbed import undisturbed
from reblock.errors import EditFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Journal", "finish_journal", "journal_in"]

_STAGED_NAME = "staged"


class Journal:
    """An edit of the artifact in `directory`; files to change are written into `staged`."""

    def __init__(self, directory: str, *, is_last: bool) -> None:
        self._is_last = is_last
        self.directory = directory
        self.path = os.path.join(directory, JOURNAL_NAME)
        self.staged = os.path.join(self.path, _STAGED_NAME)
        self.is_committed = False

    def commit(self, check: Callable[[], None]) -> None:
        """Make the staged files the artifact's; `check` is called just before that.

        Raises:
            OSError: the system refused; nothing has changed.
        """
        sync_tree(self.path)
        sync_path(self.directory)
        check()
        committed = committed_directory(self.directory)
        with undisturbed(is_last=self._is_last):
            os.rename(self.staged, committed)
            try:
                sync_path(self.path)
            except OSError:
                os.rename(committed, self.staged)
                raise
            self.is_committed = True


@contextmanager
def journal_in(directory: str, *, is_last: bool = False) -> Iterator[Journal]:
    """Yield a `Journal` in `directory`, which its caller has locked and cleaned up.

    At the end what was committed is moved up, and what was not is removed.

    Raises:
        EditFailed: the system refused a write before the commit; nothing has changed.
    """
    journal = Journal(directory, is_last=is_last)
    try:
        for path in (journal.path, journal.staged):
            os.mkdir(path)
            keep_metadata(directory, path, keep_times=False)
        yield journal
    except OSError as error:
        failure = edit_failed(error, directory, directory)
        _discard(journal, failure)
        raise failure from error
    except BaseException as error:
        _discard(journal, error)
        raise


def finish_journal(directory: str) -> None:
    """Move up what an edit in `directory` has committed, and remove what it had only staged.

    Raises:
        EditFailed: something there is not from an edit.
        OSError: the system refused; readers see the same artifact as before.
    """
    path = os.path.join(directory, JOURNAL_NAME)
    if not os.path.lexists(path):
        return
    committed, staged = committed_directory(directory), os.path.join(path, _STAGED_NAME)
    with undisturbed():
        _check_is_journal(path)
        if os.path.lexists(committed):
            _move_up(committed, directory)
        if os.path.lexists(staged):
            remove_tree(staged)
        os.rmdir(path)
        sync_path(directory)


def _move_up(committed: str, directory: str) -> None:
    """Move every file of `committed` to its place in `directory`, and remove `committed`."""
    # Last what other programs read first.
    for name in sorted(os.listdir(committed), key=lambda name: (name == CONFIG_NAME, name)):
        source, target = os.path.join(committed, name), os.path.join(directory, name)
        if _is_directory(source):
            if not _is_directory(target):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
            _move_up(source, target)
        else:
            os.rename(source, target)
    sync_path(committed)
    sync_path(directory)
    os.rmdir(committed)


def _check_is_journal(path: str) -> None:
    known = {_STAGED_NAME, os.path.basename(committed_directory(path))}
    # An artifact from elsewhere may hold links, which would lead to files that are not its own.
    is_ours = _is_directory(path) and all(
        name in known and _is_directory(os.path.join(path, name)) for name in os.listdir(path)
    )
    if not is_ours:
        raise EditFailed(
            f"{path!r} is in the way: edits use that name, and it holds something else; move it "
            "away",
            path=path,
        )


def _is_directory(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)


def _discard(journal: Journal, reason: BaseException) -> None:
    if journal.is_committed:
        return
    with undisturbed():
        remove_tree(journal.staged)
        try:
            os.rmdir(journal.path)
        except FileNotFoundError:
            return
        except OSError:
            reason.add_note(
                f"{journal.path} could not be removed; the next command that edits this artifact "
                "tries again"
            )
