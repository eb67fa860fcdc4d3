"""What came of a replay: times of every request, and what they come to together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from reblock.bench.trace import TraceRequest
    from reblock.engine.counters import EngineCounters
    from reblock.engine.limits import EngineLimits

__all__ = ["BenchReport", "Percentiles", "RequestTimes"]

_NS_PER_S = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """How long something took, in nanoseconds.

    By nearest rank: the smallest of the measured values that at least p % of them do not exceed.
    So each of them was measured, and of few values the high ones are the largest.
    """

    p50_ns: int
    p90_ns: int
    p99_ns: int
    max_ns: int

    @classmethod
    def of(cls, values: Collection[int]) -> Percentiles | None:
        """Return the percentiles of what was measured; None where that is nothing."""
        if not values:
            return None
        ordered = sorted(values)

        def rank(percent: int) -> int:
            return ordered[-(-percent * len(ordered) // 100) - 1]

        return cls(p50_ns=rank(50), p90_ns=rank(90), p99_ns=rank(99), max_ns=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """When the tokens of one request came, counted from its arrival, in nanoseconds.

    A request begins to wait when it arrives, also while the engine is within a step.
    """

    request: TraceRequest
    token_ns: tuple[int, ...]
    """Empty where the request was refused, because it could never fit."""

    @property
    def is_refused(self) -> bool:
        """Whether it was refused."""
        return not self.token_ns

    @property
    def gaps_ns(self) -> list[int]:
        """The time between every token and the one before."""
        return [later - earlier for earlier, later in pairwise(self.token_ns)]

    @property
    def ns_per_token(self) -> int | None:
        """The time per token after the first, on average; None where there is no second one."""
        if len(self.token_ns) < 2:
            return None
        return (self.token_ns[-1] - self.token_ns[0]) // (len(self.token_ns) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All that one replay has measured."""

    limits: EngineLimits
    kv_bytes: int
    seed: int
    """Of the token ids of the prompts."""
    requests: tuple[RequestTimes, ...]
    """In the order in which they arrived."""
    duration_ns: int
    """From the start of the trace until the last request was served or refused."""
    idle_ns: int
    """How much of that the engine had no request."""
    most_running: int
    counters: EngineCounters
    """Those of the engine, at the end."""
    peak_bytes: int | None
    """The most memory that the process has had; None where the system does not tell."""

    @property
    def completed(self) -> list[RequestTimes]:
        """The requests that were served: all that were not refused."""
        return [request for request in self.requests if not request.is_refused]

    @property
    def refused(self) -> list[TraceRequest]:
        """The requests that could never fit."""
        return [request.request for request in self.requests if request.is_refused]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that were served."""
        return sum(times.request.num_prompt_tokens for times in self.completed)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the answers."""
        return sum(len(times.token_ns) for times in self.requests)

    @property
    def first_token(self) -> Percentiles | None:
        """From the arrival of a request to its first token."""
        return Percentiles.of([times.token_ns[0] for times in self.completed])

    @property
    def per_token(self) -> Percentiles | None:
        """The time per token after the first, of every request on average."""
        averages = [times.ns_per_token for times in self.requests]
        return Percentiles.of([average for average in averages if average is not None])

    @property
    def between_tokens(self) -> Percentiles | None:
        """Between any two tokens of a request, one after the other; the largest is a stall."""
        return Percentiles.of([gap for times in self.requests for gap in times.gaps_ns])

    @property
    def completion(self) -> Percentiles | None:
        """From the arrival of a request to its last token."""
        return Percentiles.of([times.token_ns[-1] for times in self.completed])

    @property
    def busy_ns(self) -> int:
        """How long the engine had requests."""
        return self.duration_ns - self.idle_ns

    def per_second(self, number: int) -> float:
        """Return how much that is in a second of the replay, the idle time included."""
        return number * _NS_PER_S / self.duration_ns if self.duration_ns else 0.0

    def share_of_busy(self, spent_ns: int) -> float:
        """Return which part of the time with requests that is, from 0 to 1."""
        return spent_ns / self.busy_ns if self.busy_ns else 0.0
