"""Reading the files of an artifact: regular files only, and no more than was expected."""

from __future__ import annotations

import os
import stat

from reblock.artifact.location import CONFIG_NAME, config_path
from reblock.errors import CorruptArtifact
from reblock.json_fields import MAX_JSON_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def open_regular(path: str) -> BinaryIO:
    """Return the regular file at `path`, open for reading.

    Raises:
        CorruptArtifact: it is missing, something else, or cannot be opened.
    """
    try:
        # Asked before opening, because a device may do something when it is opened.
        if stat.S_ISREG(os.stat(path).st_mode):
            file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  the caller closes it
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except FileNotFoundError as error:
        raise CorruptArtifact("is missing", path=path) from error
    except OSError as error:
        raise CorruptArtifact(f"cannot be read: {error.strerror}", path=path) from error
    raise CorruptArtifact("is not a regular file", path=path)


def _open_at_once(path: str, flags: int) -> int:
    # By now the file may be a pipe, and opening one waits for somebody to write to it.
    return os.open(path, flags | os.O_NONBLOCK)


def read_file(path: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the whole content of a regular file of at most `max_bytes`.

    Raises:
        CorruptArtifact: it is missing, no regular file, too large or cannot be read.
    """
    with open_regular(path) as file:
        try:
            # What the system says of the size is not believed: files in /proc are of no size.
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise CorruptArtifact(f"cannot be read: {error.strerror}", path=path) from error
    if data is None:  # as of a file in /proc that has something to say only later
        raise CorruptArtifact("cannot be read at once", path=path)
    if len(data) > max_bytes:
        raise CorruptArtifact(f"is larger than {max_bytes:,} bytes", path=path)
    return data


def read_config_file(directory: str, module: str | None = None) -> tuple[str, bytes]:
    """Return the path and the content of the `rbln_config.json` of an artifact, or of a module.

    Raises:
        NotAnArtifact, PermissionError: as `location.config_path`.
        CorruptArtifact: as `read_file`.
    """
    path = config_path(directory, module=module)
    try:
        return path, read_file(path)
    except CorruptArtifact:
        # An edit may have moved it up in between, to where there always is one.
        path = os.path.join(directory, module or "", CONFIG_NAME)
        return path, read_file(path)
