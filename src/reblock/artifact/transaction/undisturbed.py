"""Steps that must not stop halfway: putting an artifact in place, and cleaning up."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["undisturbed"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed(*, is_last: bool = False) -> Iterator[None]:
    """Ignore requests to stop - Ctrl-C, SIGTERM, SIGHUP - while the context lasts.

    They are dropped and not kept for later: what the context does takes a moment, and after a
    commit there is nothing left to stop. Python runs handlers in the main thread only, so any
    other thread is undisturbed already.

    Args:
        is_last: Whether they stay ignored where the context ends without an exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python, and so not its to set back
                signal.signal(number, signal.SIG_IGN)
        yield
    except BaseException:
        _restore(before)
        raise
    if not is_last:
        _restore(before)


def _restore(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)
