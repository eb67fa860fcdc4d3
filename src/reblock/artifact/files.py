"""Reading the files of an artifact: regular files only, and no more than was expected."""

from __future__ import annotations

import os
import stat

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
        # Asked before opening, because opening a pipe would wait for somebody to write to it.
        if stat.S_ISREG(os.stat(path).st_mode):
            return open(path, "rb")
    except FileNotFoundError as error:
        raise CorruptArtifact("is missing", path=path) from error
    except OSError as error:
        raise CorruptArtifact(f"cannot be read: {error.strerror}", path=path) from error
    raise CorruptArtifact("is not a regular file", path=path)


def read_file(path: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the whole content of a regular file of at most `max_bytes`.

    Raises:
        CorruptArtifact: it is missing, no regular file, too large or cannot be read.
    """
    with open_regular(path) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise CorruptArtifact(f"cannot be read: {error.strerror}", path=path) from error
    if len(data) > max_bytes:
        raise CorruptArtifact(f"is larger than {max_bytes:,} bytes", path=path)
    return data
