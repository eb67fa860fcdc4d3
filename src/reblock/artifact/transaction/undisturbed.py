"""Steps that must not stop halfway: putting an artifact in place, and cleaning up."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["undisturbed"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Calm:
    """What `undisturbed` yields; with `is_for_good` set, the calm does not end with the context."""

    def __init__(self) -> None:
        self.is_for_good = False


@contextmanager
def undisturbed() -> Iterator[Calm]:
    """Ignore requests to stop - Ctrl-C, SIGTERM, SIGHUP - while the context lasts.

    They are dropped and not kept for later: what the context does takes a moment, and after a
    commit there is nothing left to stop. Python runs handlers in the main thread only, so any
    other thread is undisturbed already.
    """
    calm = Calm()
    if threading.current_thread() is not threading.main_thread():
        yield calm
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python, and so not its to set back
                signal.signal(number, signal.SIG_IGN)
        yield calm
    finally:
        for number, handler in before.items():
            if handler is not None and not calm.is_for_good:
                signal.signal(number, handler)
