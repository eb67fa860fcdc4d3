"""A directory that is built beside its target and put in its place in one step.

The stage lies in the directory that holds the target, so that a rename can move it there. Until
it is committed the target is not touched; after an error the stage is removed and the target is
as it was. Files that do not change go into the stage as hard links, so that a stage of an
artifact with 100 GB of weights costs no more than one of 1 GB, and are never opened for writing.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reblock.artifact.undisturbed import undisturbed
from reblock.errors import DestinationExists, EditFailed, InvalidDestination, ReblockError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Stage", "check_destination", "keep_mode", "stage_beside"]

# Where hard links are refused for a reason that a copy does not share: another owner's file under
# fs.protected_hardlinks, too many links, a file system without links.
_LINK_REFUSED = {errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
# What renameat2 answers where the kernel or the file system cannot exchange.
_EXCHANGE_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
# Smaller files are those that people edit; a copy of an artifact must not share them.
_ALWAYS_COPIED_BYTES = 16 * 2**20
# Of the 255 that a name may have: the rest is for what makes the name of a stage.
_MAX_NAME_BYTES = 200
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


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
        if _is_inside(real, real_source):
            raise InvalidDestination(
                f"the output directory {destination!r} lies inside the source {source!r}; give "
                "one outside of it",
                path=destination,
            )
    if os.path.lexists(real) and not (os.path.isdir(real) and not os.listdir(real)):
        raise _destination_exists(destination)


def _destination_exists(destination: str) -> DestinationExists:
    return DestinationExists(
        f"{destination!r} exists and is not an empty directory; give another output directory",
        path=destination,
    )


class Stage:
    """A directory being built at `path`, to be put at `target`; made by `stage_beside`."""

    def __init__(self, path: str, target: str) -> None:
        self.path = path
        self.target = target
        self.is_committed = False

    def carry_over(self, source: str, *, leave_out: Collection[str], in_place: bool) -> None:
        """Bring the content of the directory `source` into the stage, as it is.

        Args:
            source: The artifact; its files are linked or read, never written.
            leave_out: Names at the top of `source` that the caller writes itself.
            in_place: Whether the stage will replace `source`. Then everything is linked and
                symbolic links stay what they are. Else the stage is to stand on its own: files
                that a person may edit are copied, and links that lead out of the source are
                replaced by the file they lead to.

        Raises:
            OSError: a file cannot be linked or copied.
        """
        _Carrier(os.path.realpath(source), in_place=in_place).carry(
            source, self.path, leave_out=frozenset(leave_out)
        )

    def sync(self) -> None:
        """Force every written file and every directory of the stage to the disk."""
        for directory, _, names in os.walk(self.path, topdown=False):
            for name in names:
                path = os.path.join(directory, name)
                status = os.lstat(path)
                # A file with other links was not written here.
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    _fsync(path)
            _fsync(directory)

    def commit_new(self) -> None:
        """Put the stage at the target, where nothing or an empty directory is.

        Raises:
            DestinationExists: something has appeared there in the meantime.
            OSError: the system refused; nothing has changed.
        """
        self.sync()
        with undisturbed():
            try:
                os.rename(self.path, self.target)  # replaces an empty directory, nothing else
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise _destination_exists(self.target) from error
                raise
            self.is_committed = True
            _fsync(os.path.dirname(self.target))

    def commit_replace(self) -> str | None:
        """Put the stage at the target and remove what was there.

        Returns:
            Where the old directory is now, if the system did not let it be removed: the edit is
            done, and that does not undo it.

        Raises:
            OSError: the system refused; nothing has changed.
        """
        self.sync()
        with undisturbed():
            old = self.path if _exchange(self.path, self.target) else self._replace_in_two_steps()
            self.is_committed = True
            try:
                _fsync(os.path.dirname(self.target))
            finally:
                is_removed = _remove_tree(old)
        return None if is_removed else old

    def _replace_in_two_steps(self) -> str:
        old = self.path + "-old"
        os.rename(self.target, old)
        try:
            os.rename(self.path, self.target)
        except BaseException:
            os.rename(old, self.target)
            raise
        return old


@contextmanager
def stage_beside(target: str) -> Iterator[Stage]:
    """Yield an empty `Stage` in the directory that holds `target`, making that where needed.

    A symbolic link at `target` is followed: what it leads to is what a commit replaces. The
    stage gets the mode and, where the system allows, the owner of a directory at the target.
    Whatever was not committed is removed at the end, directories made on the way included. What
    the system does not let be removed is named in a note of the exception.

    Raises:
        EditFailed: the system refused a write before the commit; the target is unchanged.
    """
    real = os.path.realpath(target)
    parent, name = os.path.split(real)
    stage = Stage(os.path.join(parent, _stage_name(name)), real)
    made: list[str] = []
    try:
        _make_directories(parent, made)
        os.mkdir(stage.path)
        if os.path.isdir(real):
            keep_mode(real, stage.path)
        yield stage
    except OSError as error:
        if stage.is_committed:
            raise ReblockError(
                f"{target!r} was written, but the system did not confirm that it reached the "
                f"disk: {error}"
            ) from error
        failure = _edit_failed(error, target, parent)
        _discard(stage, made, failure)
        raise failure from error
    except BaseException as error:
        _discard(stage, made, error)
        raise
    else:
        _discard(stage, made)


def _stage_name(name: str) -> str:
    while len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = name[:-1]
    return f".{name}.reblock-{os.urandom(4).hex()}"


def _discard(stage: Stage, made: list[str], reason: BaseException | None = None) -> None:
    """Remove what was not committed; `reason` is told of what could not be removed."""
    if stage.is_committed:
        return
    with undisturbed():
        if not _remove_tree(stage.path) and reason is not None:
            reason.add_note(f"{stage.path} could not be removed; remove it")
        for directory in reversed(made):
            with suppress(OSError):  # somebody else has put something there
                os.rmdir(directory)


def _remove_tree(directory: str) -> bool:
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


def keep_mode(original: str, written: str) -> None:
    """Give the file or directory `written` the mode and, where allowed, the owner of another."""
    status = os.stat(original)
    with suppress(PermissionError):
        os.chown(written, status.st_uid, status.st_gid)
    os.chmod(written, stat.S_IMODE(status.st_mode))


def _edit_failed(error: OSError, target: str, parent: str) -> EditFailed:
    where = error.filename or parent
    hint = ""
    if error.errno in {errno.EXDEV, errno.EBUSY}:
        hint = (
            "; a directory on which something is mounted cannot be replaced: write to another "
            "one with --output-dir"
        )
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        hint = "; write to a directory that you may change, with --output-dir"
    return EditFailed(
        f"cannot write {target!r}, nothing was changed: {where}: {error.strerror or error}{hint}",
        path=os.fspath(where),
    )


def _make_directories(path: str, made: list[str]) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        os.mkdir(directory)
        made.append(directory)


class _Carrier:
    """Bring files from a source into a stage; `root` is the real path of the source."""

    def __init__(self, root: str, *, in_place: bool) -> None:
        self._root = root
        self._in_place = in_place

    def carry(self, source: str, destination: str, leave_out: frozenset[str] = frozenset()) -> None:
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
                self.carry(entry.path, target)
                keep_mode(entry.path, target)
            else:
                self._carry_file(entry.path, target)

    def _carry_link(self, path: str, target: str) -> None:
        text, real = os.readlink(path), os.path.realpath(path)
        stays_inside = not os.path.isabs(text) and _is_inside(real, self._root)
        if self._in_place or stays_inside or not os.path.exists(real):
            os.symlink(text, target)
        elif os.path.isdir(real):
            # Not copied: it could be anything, an ancestor of the artifact included.
            os.symlink(real, target)
        else:
            self._carry_file(real, target)

    def _carry_file(self, path: str, target: str) -> None:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is neither a file, a directory nor a link", path)
        if self._in_place or status.st_size > _ALWAYS_COPIED_BYTES:
            try:
                os.link(path, target)
            except OSError as error:
                if error.errno not in _LINK_REFUSED and (
                    self._in_place or error.errno != errno.EXDEV
                ):
                    raise
            else:
                return
        shutil.copy2(path, target)


def _is_inside(path: str, directory: str) -> bool:
    return os.path.commonpath([directory, path]) == directory


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: str, second: str) -> bool:
    """Exchange two directories in one step; False where the system has no such step."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if not libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    ):
        return True
    code = ctypes.get_errno()
    if code in _EXCHANGE_UNKNOWN:
        return False
    raise OSError(code, os.strerror(code), second)
