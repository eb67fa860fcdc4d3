"""Runs a trace: requests are added when they arrive, and it is noted when their tokens came."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from reblock.bench.report import BenchReport, RequestTimes
from reblock.engine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from reblock.bench.clock import Clock
    from reblock.bench.trace import Trace, TraceRequest
    from reblock.engine.engine import Engine

__all__ = ["peak_bytes", "replay"]


def replay(
    engine: Engine,
    trace: Trace,
    *,
    clock: Clock,
    seed: int,
    on_step: Callable[[int], None] = lambda _num_ended: None,
) -> BenchReport:
    """Serve a trace and return what was measured.

    Prompts are random tokens, the same for the same seed whatever else the engine serves, and no
    token ends an answer. So what is measured depends on lengths and times alone, and no two
    prompts begin alike but by chance. A request that could never fit is left out and reported.

    Args:
        engine: a new one: its counters become those of the report.
        trace: the requests.
        clock: what is measured with; it passes the time while the engine has no request.
        seed: of the prompts.
        on_step: called after every step with the number of requests that have ended so far.

    Raises:
        RuntimeError: the engine has requests already.
    """
    if engine.has_work:
        raise RuntimeError("a replay needs an engine without requests")
    run = _Replay(engine, trace, clock, seed)
    try:
        run.serve(on_step)
    finally:
        run.abort()
    return run.report()


class _Replay:
    """One replay while it runs. Times are counted from its start."""

    def __init__(self, engine: Engine, trace: Trace, clock: Clock, seed: int) -> None:
        self._engine = engine
        self._clock = clock
        self._seed = seed
        self._requests = trace.requests
        self._coming = deque(enumerate(trace.requests))
        self._token_ns: list[list[int]] = [[] for _ in trace.requests]
        self._indices: dict[int, int] = {}  # of the requests that the engine has, by their ids
        self._num_ended = self._idle_ns = self._end_ns = 0
        self._most_running = 0

    def serve(self, on_step: Callable[[int], None]) -> None:
        """Run the trace to its end."""
        start_ns = self._clock.now_ns()
        while self._coming or self._engine.has_work:
            now_ns = self._clock.now_ns() - start_ns
            if (
                not self._engine.has_work
                and (wait_ns := self._coming[0][1].arrival_ns - now_ns) > 0
            ):
                self._clock.pass_ns(wait_ns)
                self._idle_ns += self._clock.now_ns() - start_ns - now_ns
                now_ns = self._clock.now_ns() - start_ns
            while self._coming and self._coming[0][1].arrival_ns <= now_ns:
                self._add(*self._coming.popleft())
            self._step(start_ns)
            on_step(self._num_ended)

    def abort(self) -> None:
        """End what has not ended, as after Ctrl-C."""
        for request_id in self._indices:
            self._engine.abort(request_id)

    def report(self) -> BenchReport:
        """Return what was measured."""
        pairs = zip(self._requests, self._token_ns, strict=True)
        return BenchReport(
            limits=self._engine.limits,
            kv_bytes=self._engine.kv_bytes,
            seed=self._seed,
            requests=tuple(
                RequestTimes(request=request, token_ns=tuple(token_ns))
                for request, token_ns in pairs
            ),
            duration_ns=self._end_ns,
            idle_ns=self._idle_ns,
            most_running=self._most_running,
            counters=self._engine.counters(),
            peak_bytes=peak_bytes(),
        )

    def _add(self, index: int, request: TraceRequest) -> None:
        num_tokens = request.num_prompt_tokens + request.num_new_tokens
        if num_tokens > self._engine.limits.max_request_tokens:
            # Before there is a prompt, which may be larger than the memory.
            self._num_ended += 1
            return
        source = random.Random(f"{self._seed} {index}")  # noqa: S311  it has to be repeatable
        vocabulary = range(self._engine.limits.vocab_size)
        prompt_ids = source.choices(vocabulary, k=request.num_prompt_tokens)
        params = SamplingParams(max_new_tokens=request.num_new_tokens, ignore_eos=True)
        self._indices[self._engine.add(prompt_ids, params)] = index

    def _step(self, start_ns: int) -> None:
        engine = self._engine
        outputs = engine.step()  # none where all that had arrived were refused
        now_ns = self._end_ns = self._clock.now_ns() - start_ns
        num_ended = 0
        for output in outputs:
            index = self._indices[output.request_id]
            self._token_ns[index].append(now_ns - self._requests[index].arrival_ns)
            if output.finished:
                del self._indices[output.request_id]
                num_ended += 1
        self._num_ended += num_ended
        # A request that ended in this step ran until just now.
        self._most_running = max(self._most_running, engine.num_running + num_ended)


def peak_bytes() -> int | None:
    """Return the most memory that this process has had; None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
