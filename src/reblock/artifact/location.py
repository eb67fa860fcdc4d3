"""Where the files of an artifact are, also while an edit of it is being finished.

Where a directory cannot be exchanged as a whole, an edit puts its files into
`.reblock-edit/committed` in one step and then moves them up one by one. Until that is done, what
lies there is the artifact's; a reader that may not write sees the same as one that may.

Imports next to nothing, because `reblock get` has to start about as fast as Python does.
"""

import os
import stat

from reblock.errors import NotAnArtifact

CONFIG_NAME = "rbln_config.json"
JOURNAL_NAME = ".reblock-edit"
COMMITTED_NAME = "committed"


def locate(directory: str, name: str, changed_in: str | None = None) -> str:
    """Return the path of the file `name` of the artifact in `directory`; it need not exist.

    Args:
        directory: Where the artifact is.
        name: The path of a file within it.
        changed_in: A directory whose files stand in for those of the artifact; by default that
            of an edit that was committed and is not finished.

    Raises:
        PermissionError: the system does not let one see whether there is such an edit.
    """
    if changed_in is None and _has_committed(directory):
        changed_in = committed_directory(directory)
    path = None if changed_in is None else os.path.join(changed_in, name)
    return path if path is not None and _exists(path) else os.path.join(directory, name)


def _has_committed(directory: str) -> bool:
    # A link there would lead to files that are not the artifact's.
    committed = committed_directory(directory)
    return all(_exists(path, stat.S_IFDIR) for path in (os.path.dirname(committed), committed))


def _exists(path: str, kind: int | None = None) -> bool:
    """Return whether something is there; that one may not look is not the same as no."""
    try:
        mode = os.lstat(path).st_mode
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False
    return kind is None or stat.S_IFMT(mode) == kind


def committed_directory(directory: str) -> str:
    """Return where the files of an edit lie that was committed and is not finished."""
    return os.path.join(directory, JOURNAL_NAME, COMMITTED_NAME)


def config_path(directory: str, changed_in: str | None = None, module: str | None = None) -> str:
    """Return the path of the `rbln_config.json` of the artifact in `directory`, or of a module.

    Raises:
        NotAnArtifact: no directory is there, or it has no such file.
        PermissionError: the system does not let one see which.
    """
    if not os.path.isdir(directory):
        _check_access(directory)
        reason = "is not a directory" if os.path.lexists(directory) else "does not exist"
        raise NotAnArtifact(f"{reason}; give the directory of a compiled artifact", path=directory)
    name = os.path.join(module or "", CONFIG_NAME)
    # Each is asked for once: what an edit has committed may be moved up after any look at it.
    plain = os.path.join(directory, name)
    for path in (locate(directory, name, changed_in), plain):
        if os.path.exists(path):
            return path
    _check_access(plain)
    raise NotAnArtifact(f"holds no {CONFIG_NAME}, so it is not an artifact", path=directory)


def _check_access(path: str) -> None:
    try:
        os.stat(path)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return


def has_left_overs(directory: str) -> bool:
    """Return whether an edit of the artifact, or of one beside it, is under way or was cut off.

    The answer is quick and may be wrong with True; `transaction.clean_up` looks closer.
    """
    try:
        real = os.path.realpath(directory)
        if os.path.lexists(os.path.join(real, JOURNAL_NAME)):
            return True
        names = os.listdir(os.path.dirname(real))
    except (OSError, ValueError):
        return False
    return any(".reblock-" in name and name.endswith(".lock") for name in names)
