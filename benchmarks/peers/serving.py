"""Requests, and when their tokens came: the one thing that every engine is asked for."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_BATCH", "MAX_RUNNING", "Engine", "Request", "Served", "Stepper", "serve_steps"]

MAX_BATCH = 8  # rows where a fixed number of rows is measured
MAX_RUNNING = 32  # requests side by side in a trace; more than the ample pool holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, how many tokens it is answered with, and when it arrives."""

    prompt_ids: list[int]
    num_new_tokens: int
    arrival_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """For each request, its tokens and when each came, in seconds from the start."""

    token_s: list[list[float]]
    token_ids: list[list[int]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def decode_rate(self) -> float:
        """Tokens per second while all requests were being answered side by side."""
        begin = max(times[0] for times in self.token_s)
        end = min(times[-1] for times in self.token_s)
        count = sum(begin < moment <= end for times in self.token_s for moment in times)
        return count / (end - begin)


class Engine(Protocol):
    """What runs in a worker."""

    def load(self, **options: Any) -> Any:
        """Be ready to serve, with these options in place of earlier ones."""
        ...

    def serve(self, requests: Sequence[Request]) -> Served:
        """Answer all requests, greedily; no token ends an answer early."""
        ...


class Stepper(Protocol):
    """An engine that is called again and again, by one thread."""

    @property
    def has_work(self) -> bool: ...

    def add(self, index: int, request: Request) -> None: ...

    def step(self) -> list[tuple[int, int]]:
        """Work a little; return the tokens that came of it, each with its request's index."""
        ...


def serve_steps(stepper: Stepper, requests: Sequence[Request]) -> Served:
    """Give each request to the engine when it has arrived, and note when its tokens come."""
    token_s: list[list[float]] = [[] for _ in requests]
    token_ids: list[list[int]] = [[] for _ in requests]
    coming = list(enumerate(requests))[::-1]
    start = time.perf_counter()
    while coming or stepper.has_work:
        now = time.perf_counter() - start
        while coming and coming[-1][1].arrival_s <= now:
            stepper.add(*coming.pop())
        if not stepper.has_work:
            time.sleep(max(0.0, coming[-1][1].arrival_s - now))
            continue
        outputs = stepper.step()
        now = time.perf_counter() - start
        for index, token_id in outputs:
            token_s[index].append(now)
            token_ids[index].append(token_id)
    return Served(token_s=token_s, token_ids=token_ids)
