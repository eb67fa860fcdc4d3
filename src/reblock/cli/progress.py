"""Progress on the terminal: what is being done, and how long each stage took.

All of it goes to stderr. On a terminal a stage has a clock that runs, and a bar where it is known
how much there is to do; elsewhere, such as in the log of a build, every stage is one line when it
begins and one when it has ended.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rich.progress import Progress, ProgressColumn

__all__ = ["TerminalProgress"]


class TerminalProgress:
    """A `reblock.progress.Progress` that people watch."""

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Return a context that shows `text` while it lasts, and then the time it took."""
        return _live_stage(text) if sys.stderr.isatty() else _plain_stage(text)

    def bytes_stage(
        self, text: str, total_bytes: int
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context that shows `text` and how many of the bytes are done."""
        if sys.stderr.isatty():
            return _live_bytes_stage(text, total_bytes)
        return _plain_bytes_stage(text)

    def note(self, text: str) -> None:
        """Print one line."""
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _plain_stage(text: str) -> Iterator[None]:
    print(f"{text} ...", file=sys.stderr, flush=True)
    with _timed(text):
        yield


@contextmanager
def _plain_bytes_stage(text: str) -> Iterator[Callable[[int], None]]:
    with _plain_stage(text):
        yield lambda _num_bytes: None


@contextmanager
def _live_stage(text: str) -> Iterator[None]:
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    # The line stands where the spinner was, so it is printed after that has gone.
    with _timed(text), _display(*columns) as display:
        display.add_task(text, total=None)
        yield


@contextmanager
def _live_bytes_stage(text: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with _timed(text), _display(*columns) as display:
        task = display.add_task(text, total=total_bytes)
        yield lambda num_bytes: display.advance(task, num_bytes)


def _display(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)


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
