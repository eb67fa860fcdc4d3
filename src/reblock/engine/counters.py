"""What an engine has done so far, and what it has left."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EngineCounters", "Stopwatch"]

Part = Literal["scheduler", "programs", "sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """A look at an engine between two steps. What is counted is counted since it was made."""

    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    """Blocks that requests hold; one that several share counts once."""
    num_cached_blocks: int
    """Blocks that no request holds, whose content is known; used again, or taken when needed."""
    most_used_blocks: int
    """Blocks that requests held in one step, at most."""
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prefilled_tokens: int
    """Tokens that the prefill program read, after a preemption once more."""
    num_reused_tokens: int
    """Tokens that needed no reading, as they were in shared or cached blocks."""
    num_decoded_tokens: int
    """Tokens that decoders read: one for each running request and step."""
    scheduler_ns: int
    programs_ns: int
    sampler_ns: int


class Stopwatch:
    """Adds up the time that goes into each part of the engine."""

    def __init__(self) -> None:
        self._spent_ns: dict[Part, int] = {"scheduler": 0, "programs": 0, "sampler": 0}

    def spent_ns(self, part: Part) -> int:
        """How long a part has taken so far."""
        return self._spent_ns[part]

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Add the time until the block is left, by an error too."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spent_ns[part] += time.perf_counter_ns() - start_ns
