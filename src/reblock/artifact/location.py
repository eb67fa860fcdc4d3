"""Where the files of an artifact are, also while an edit of it is being finished.

Where a directory cannot be exchanged as a whole, an edit puts its files into
`.reblock-edit/committed` in one step and then moves them up one by one. Until that is done, what
lies there is the artifact's; a reader that may not write sees the same as one that may.

Imports next to nothing, because `reblock get` has to start about as fast as Python does.
"""

import os

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
    """
    path = os.path.join(changed_in or committed_directory(directory), name)
    return path if os.path.lexists(path) else os.path.join(directory, name)


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
    path = locate(directory, name, changed_in)
    if not os.path.exists(path):
        # It may have been moved up in between.
        path = os.path.join(directory, name)
    if not os.path.exists(path):
        _check_access(path)
        raise NotAnArtifact(f"holds no {CONFIG_NAME}, so it is not an artifact", path=directory)
    return path


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
