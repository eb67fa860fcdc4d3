"""A new artifact at a destination where nothing is: complete, or not there at all."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reblock.artifact.transaction.carry import Watch, carry_over, is_inside
from reblock.artifact.transaction.replace import keep_file_metadata
from reblock.artifact.transaction.stage import (
    destination_exists,
    left_note,
    remove_dead_stages,
    stage_beside,
)
from reblock.artifact.transaction.system import is_mount_point, keep_metadata
from reblock.errors import InvalidDestination

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from reblock.artifact.transaction.carry import Sharing
    from reblock.artifact.transaction.lock import EditLock
    from reblock.artifact.transaction.stage import Stage
    from reblock.progress import Progress

__all__ = ["check_destination", "copy_with", "new_directory"]


def check_destination(destination: str, *, source: str | None) -> None:
    """Check that a new artifact may be written to `destination`.

    Args:
        destination: Where it is to be.
        source: The directory that it is made from, or None where there is none.

    Raises:
        InvalidDestination: The destination is empty text, the source itself or inside it.
        DestinationExists: Something is there already, other than an empty directory.
    """
    if not destination:
        raise InvalidDestination("the output directory is an empty text", path=destination)
    real = os.path.realpath(destination)
    if source is not None:
        real_source = os.path.realpath(source)
        if real == real_source:
            raise InvalidDestination(
                f"the output directory {destination!r} is the source itself; give another one",
                path=destination,
            )
        if is_inside(real, real_source):
            raise InvalidDestination(
                f"the output directory {destination!r} lies inside the source {source!r}; give "
                "one outside of it",
                path=destination,
            )
    if is_mount_point(real):
        raise InvalidDestination(
            f"the output directory {destination!r} is a mount point, which cannot be replaced; "
            "give a new directory in it",
            path=destination,
        )
    if os.path.lexists(real) and not (os.path.isdir(real) and not os.listdir(real)):
        # Perhaps of a command that was cut off just after it had written it.
        remove_dead_stages(os.path.dirname(real))
        raise destination_exists(destination)


@contextmanager
def new_directory(destination: str, *, is_last: bool = False) -> Iterator[Stage]:
    """Yield the `Stage` of an artifact that its caller writes and then commits.

    What commands left beside the destination that were cut off is removed first.

    Raises:
        EditFailed: the system refused a write; nothing is left of it.
    """
    remove_dead_stages(os.path.dirname(os.path.realpath(destination)))
    with stage_beside(destination, is_last=is_last) as stage:
        yield stage


def copy_with(
    lock: EditLock,
    destination: str,
    *,
    names: Collection[str],
    write: Callable[[str], None],
    check: Callable[[str, str | None], None],
    sharing: Sharing,
    progress: Progress,
    is_last: bool = False,
) -> list[str]:
    """Write a copy of the artifact that is locked, in which some files are others.

    Args:
        lock: The lock on the artifact, which is not changed.
        destination: Where nothing or an empty directory is.
        names: The files that are replaced, or new, by their paths within the artifact.
        write: Writes these files into the directory that it is given.
        check: Given a directory and None; raises where that is not the artifact it was to be.
        sharing: Whether the copy may share files with the source.
        progress: Is told of large files that have to be copied.
        is_last: As for `replace_files`.

    Returns:
        Notes on what the system did not let be removed.

    Raises:
        DestinationExists: Something is at the destination.
        EditFailed: The system refused a write, or the source was changed by another program.
    """
    lock.check()
    real = os.path.realpath(lock.directory)
    with new_directory(destination, is_last=is_last) as stage:
        if not os.path.isdir(stage.target):
            # What is private stays private, from the first file on.
            keep_metadata(real, stage.path, keep_times=False)
            os.chmod(stage.path, stat.S_IMODE(os.stat(real).st_mode) | stat.S_IRWXU)
        watch = Watch(real)
        carry_over(real, stage.path, leave_out=names, sharing=sharing, progress=progress)
        write(stage.path)
        keep_file_metadata(real, stage.path, names)
        check(stage.path, None)
        lock.check()
        stage.commit_new(lambda: watch.check(real))
    return [] if stage.left is None else [left_note(stage.left)]
