"""Progress on the terminal: what is being done, and how long each stage took.

All of it goes to stderr. On a terminal a stage has a clock that runs; elsewhere, such as in the
log of a build, every stage is one line when it begins and one when it has ended.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["TerminalProgress"]


class TerminalProgress:
    """A `reblock.progress.Progress` that people watch."""

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Return a context that shows `text` while it lasts, and then the time it took."""
        return _live_stage(text) if sys.stderr.isatty() else _plain_stage(text)

    def note(self, text: str) -> None:
        """Print one line."""
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _plain_stage(text: str) -> Iterator[None]:
    print(f"{text} ...", file=sys.stderr, flush=True)
    with _timed(text):
        yield


@contextmanager
def _live_stage(text: str) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with (
        # The line stands where the spinner was, so it is printed after that has gone.
        _timed(text),
        Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as progress,
    ):
        progress.add_task(text, total=None)
        yield


@contextmanager
def _timed(text: str) -> Iterator[None]:
    start = time.perf_counter()
    outcome = "stopped after"
    try:
        yield
        outcome = "done in"
    finally:
        seconds = time.perf_counter() - start
        print(f"{text}: {outcome} {seconds:.1f} s", file=sys.stderr, flush=True)
