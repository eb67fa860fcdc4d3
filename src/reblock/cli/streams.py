"""Standard output and standard error, made fit for whatever names and places they meet."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


def prepare_streams() -> None:
    """Let no closed stream and no character outside of an encoding end a command.

    A stream that was closed from the start is None in Python, and what is printed to a stderr of
    None lands on stdout. Names of files need not be text in any encoding.
    """
    # Opened in the order of their numbers, so that each takes the number that is free.
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")


def drop(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: at exit Python would try to write it again."""
    with suppress(OSError):  # there is nothing left to try
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def tell(text: str) -> None:
    """Print a line to stderr; where that cannot be written, nobody can be told."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)
