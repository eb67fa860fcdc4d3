"""The engines of one model side by side, and how a number is taken from each in turn."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from peers.artifacts import BLOCK_TOKENS, POOL_BLOCKS, UnavailableError
from peers.engines import BANDWIDTH, ENGINES
from peers.processes import Worker, WorkerError
from peers.serving import Request, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from peers.artifacts import Shop
    from peers.engines import EngineInfo

__all__ = ["BLOCK_TOKENS", "Lineup", "Settings", "note", "prompts"]

AGREEMENT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for on the command line."""

    directory: Path
    engines: Sequence[str]
    sections: Sequence[str]
    rounds: int
    trace_rounds: int
    threads: int
    num_requests: int
    python_of: dict[str, str] = field(default_factory=dict)


def note(text: str) -> None:
    """Tell whoever waits."""
    print(text, file=sys.stderr, flush=True)


def prompts(vocabulary: int, seed: str, num_rows: int, length: int, count: int) -> list[Request]:
    """Return requests with random prompts, other ones for every seed."""
    draw = random.Random(seed)
    return [
        Request(prompt_ids=draw.choices(range(vocabulary), k=length), num_new_tokens=count)
        for _ in range(num_rows)
    ]


class Lineup:
    """The workers of one model. One that fails is out, and `problems` says why."""

    def __init__(self, settings: Settings, shop: Shop, names: Sequence[str]) -> None:
        self._settings = settings
        self._shop = shop
        self._workers: dict[str, Worker] = {}
        self._bandwidth: Worker | None = None
        self.problems: dict[str, str] = {}
        self.agreement: dict[str, int] = {}
        self.vocabulary = int(shop.config()["vocab_size"])
        for name in names:
            self._start(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._workers.values(), self._bandwidth):
            if worker is not None:
                worker.close()

    def names(self) -> list[str]:
        """The engines that work."""
        return list(self._workers)

    def in_turn(self, number: int, names: Sequence[str] | None = None) -> Iterator[str]:
        """Yield the engines, another one first in every round; a lost one is left out."""
        order = list(names if names is not None else self._workers)
        shift = number % len(order) if order else 0
        for name in order[shift:] + order[:shift]:
            if name in self._workers:
                yield name

    def read_rates(self, times: int = 2) -> list[float]:
        """Return bytes per second that the machine read just now."""
        if self._bandwidth is None:
            self._bandwidth = self._open(BANDWIDTH, "bandwidth")
            _, read = self._shop.weights()
            self._bandwidth.ask("load", num_bytes=read * 4, threads=self._settings.threads)
            self._bandwidth.ask("read", times=3)
        rates: list[float] = self._bandwidth.ask("read", times=times)
        return rates

    def ask(self, name: str, method: str, **arguments: Any) -> Any:
        """Return what an engine answers, or None where it failed and is out."""
        return self._attempt(name, lambda worker: worker.ask(method, **arguments))

    def serve(self, name: str, requests: Sequence[Request]) -> Served | None:
        """Return what an engine served, or None where it failed and is out."""
        served: Served | None = self._attempt(name, lambda worker: worker.serve(requests))
        return served

    def load(self, name: str, num_blocks: int = POOL_BLOCKS) -> bool:
        """Have an engine begin anew with a cache of so many of reblock's blocks."""
        try:
            path = self._path(ENGINES[name], num_blocks)
        except UnavailableError as error:
            self._drop(name, f"not available: {error}")
            return False
        options = {"artifact": path, "model": path, "pool_tokens": num_blocks * BLOCK_TOKENS}
        self.ask(name, "load", threads=self._settings.threads, **options)
        return name in self._workers

    def check_agreement(self, reference: Sequence[int], request: Request) -> None:
        """Note how many tokens of each engine are those of transformers."""
        for name in self.names():
            served = self.serve(name, [request])
            if served is not None:
                self.agreement[name] = _common(served.token_ids[0], reference)

    def reference(self, request: Request) -> list[int] | None:
        """Return what `generate` of transformers answers, by a worker of its own if need be."""
        name = "transformers"
        if name not in self._workers:
            self._start(name)
            served = self.serve(name, [request])
            self._drop(name, "")
            self.problems.pop(name, None)
        else:
            served = self.serve(name, [request])
        return served.token_ids[0] if served else None

    def _start(self, name: str) -> None:
        note(f"starting {name}")
        self._workers[name] = self._open(ENGINES[name], name)
        self.load(name)

    def _open(self, info: EngineInfo, name: str) -> Worker:
        settings = self._settings
        python = settings.python_of.get(info.interpreter or name, sys.executable)
        logs = settings.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return Worker(info, python, logs / f"{name.replace(' ', '-')}.log", settings.threads)

    def _path(self, info: EngineInfo, num_blocks: int) -> str:
        kind, _, dtype = info.model.partition(":")
        if kind != "artifact":
            return str(getattr(self._shop, kind)())
        artifact = self._shop.artifact(dtype)
        if num_blocks != POOL_BLOCKS:
            artifact = self._shop.resized(artifact, num_blocks)
        return str(artifact)

    def _attempt(self, name: str, action: Callable[[Worker], Any]) -> Any:
        if name not in self._workers:
            return None
        try:
            return action(self._workers[name])
        except WorkerError as error:
            self._drop(name, str(error))
            return None

    def _drop(self, name: str, problem: str) -> None:
        if problem:
            note(f"{name} is out: {problem}")
        self.problems[name] = problem
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.close()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
