"""The time of a replay, which leaves out what an idle engine would only wait for."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SkippingClock"]


class Clock(Protocol):
    """Tells the time, and passes it while there is nothing to do."""

    def now_ns(self) -> int:
        """Return the nanoseconds since some moment; never fewer than before."""
        ...

    def pass_ns(self, duration_ns: int) -> None:
        """Return when `now_ns` is at least so much later, by sleeping or by being put forward."""
        ...


class SkippingClock:
    """The system's clock, put forward where others would sleep.

    An engine without requests does nothing, so to wait for the next one changes no measurement.
    """

    def __init__(self) -> None:
        self._skipped_ns = 0

    def now_ns(self) -> int:
        """Return the time that has passed, what was skipped included."""
        return time.perf_counter_ns() + self._skipped_ns

    def pass_ns(self, duration_ns: int) -> None:
        """Put the clock forward."""
        self._skipped_ns += duration_ns
