"""Finishing or removing what edits left that were cut off, by a kill or by a loss of power."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reblock.artifact.location import JOURNAL_NAME, has_left_overs
from reblock.artifact.transaction.journal import finish_journal
from reblock.artifact.transaction.lock import edit_lock
from reblock.artifact.transaction.stage import edit_failed, remove_dead_stages
from reblock.errors import ArtifactBusy, EditFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reblock.artifact.transaction.lock import EditLock

__all__ = ["begin_edit", "clean_up_for_edit", "clean_up_if_possible"]


def clean_up_if_possible(directory: str) -> None:
    """Clean up for a reader: what is still in use, or may not be changed, stays as it is."""
    if not has_left_overs(directory):
        return
    real = os.path.realpath(directory)
    remove_dead_stages(os.path.dirname(real))
    if os.path.lexists(os.path.join(real, JOURNAL_NAME)) and os.access(real, os.W_OK):
        with suppress(OSError, ArtifactBusy, EditFailed), edit_lock(real, timeout_s=0):
            finish_journal(real)


@contextmanager
def begin_edit(
    directory: str,
    *,
    timeout_s: float | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[EditLock]:
    """Keep other edits of the artifact in `directory` out, and finish one that was cut off.

    An artifact is to be opened after this, so that what it says is what is changed. The arguments
    and errors are those of `edit_lock`.
    """
    with edit_lock(directory, timeout_s=timeout_s, on_wait=on_wait) as lock:
        with suppress(OSError, EditFailed):  # a copy can be made all the same
            finish_journal(os.path.realpath(directory))
        yield lock


def clean_up_for_edit(lock: EditLock) -> list[str]:
    """Clean up for an edit of the artifact that is locked.

    Returns:
        What other edits left beside the artifact that the system did not let be removed.

    Raises:
        EditFailed: An edit was cut off after its commit, and cannot be finished.
    """
    real = os.path.realpath(lock.directory)
    try:
        finish_journal(real)
    except OSError as error:
        failure = edit_failed(error, lock.directory, real)
        failure.add_note("an earlier edit was cut off and has to be finished first")
        raise failure from error
    return remove_dead_stages(os.path.dirname(real))
