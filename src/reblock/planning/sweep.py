"""How many blocks and requests every budget of one device gives, for a picture of it.

The answers rise in steps. Up to 64 of them are all computed; of more, an even selection is, and
every point of it is a true step: the smallest budget for its answer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reblock.artifact.reader import Artifact
from reblock.memory import CacheTensor, MemoryPlan
from reblock.planning.artifact_facts import artifact_target
from reblock.planning.candidate import (
    MAX_BATCH_SIZE,
    ModelSubject,
    artifact_candidate,
)
from reblock.planning.target import parse_target
from reblock.sizing import capacity, tightest

if TYPE_CHECKING:
    from collections.abc import Callable

    from reblock.memory import Grid
    from reblock.planning.candidate import Candidate
    from reblock.planning.settings import PlanSettings
    from reblock.planning.sources import ModelSource
    from reblock.planning.target import Target

__all__ = ["Sweep", "SweepPoint", "sweep_budgets"]

_MOST_STEPS = 64
_NUM_SAMPLES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What a budget of one device gives; `num_requests` of the full length run side by side."""

    budget_bytes: int
    num_blocks: int
    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The answers from the smallest budget that works to all that is available, both included.

    Points are in the order of their budgets, and none gives less than the one before. Between two
    the answer is that of the first or more. There are none where no budget works.
    """

    name: str
    available_bytes: int
    points: tuple[SweepPoint, ...]


def sweep_budgets(
    subject: ModelSource | Artifact, settings: PlanSettings, target: Target | None
) -> Sweep:
    """Return the answers for all budgets that work; the arguments are those of `make_plan`.

    Where `num_blocks` is given, the programs are those for that count, and the sweep shows the
    largest one that every budget has room for.

    Raises:
        ReblockError: As `make_plan`.
    """
    if isinstance(subject, Artifact):
        device = artifact_target(subject, target)[0].device
        points = _count_points(artifact_candidate(subject), device.available_bytes)
        return _sweep(subject.directory, device.available_bytes, points)
    model = ModelSubject.make(subject, settings, target or parse_target("cpu"))
    available = model.target.device.available_bytes
    batch_size = _batch_size(model)
    if batch_size is None:
        points = _request_points(model, available)
    else:
        points = _count_points(model.at(batch_size), available)
    return _sweep(subject.name, available, points)


def _batch_size(model: ModelSubject) -> int | None:
    """Return the requests of the programs, None where there are as many as fit."""
    settings = model.settings
    if settings.batch_size is not None or settings.num_blocks is None:
        return settings.batch_size
    # As the plan has it: as many requests as the blocks hold.
    per_request = model.at(1).blocks_per_request
    return min(max(1, settings.num_blocks // per_request), MAX_BATCH_SIZE)


def _sweep(name: str, available_bytes: int, points: list[SweepPoint]) -> Sweep:
    if points and points[-1].budget_bytes < available_bytes:
        points = [*points, replace(points[-1], budget_bytes=available_bytes)]
    return Sweep(name=name, available_bytes=available_bytes, points=tuple(points))


def _count_points(candidate: Candidate, available_bytes: int) -> list[SweepPoint]:
    """Return what budgets give where the programs are settled."""
    memory = _one_of_alike(candidate.memory)

    def needed(count: int) -> int:
        return tightest(memory, count)[0] * candidate.memory.num_chiplets

    first, last = candidate.bounds.minimum, candidate.bounds.full
    if needed(first) > available_bytes:
        return []
    steps = _steps(needed, first, _last_within(needed, first, last, available_bytes))
    return [_point(candidate, count, budget_bytes) for budget_bytes, count in steps]


def _request_points(model: ModelSubject, available_bytes: int) -> list[SweepPoint]:
    """Return what budgets give where programs are made for as many requests as fit."""
    at = functools.cache(model.at)

    @functools.cache
    def needed(batch_size: int) -> int:
        candidate = at(batch_size)
        memory = _one_of_alike(candidate.memory)
        return tightest(memory, candidate.bounds.full)[0] * candidate.memory.num_chiplets

    if needed(1) > available_bytes:
        return _count_points(at(1), available_bytes)
    steps = _steps(needed, 1, _last_within(needed, 1, MAX_BATCH_SIZE, available_bytes))
    # Less than one request of the full length is an answer too.
    below = [p for p in _count_points(at(1), available_bytes) if p.budget_bytes < steps[0][0]]
    full = [_point(at(size), at(size).bounds.full, budget_bytes) for budget_bytes, size in steps]
    return [*below, *full]


def _one_of_alike(memory: MemoryPlan) -> MemoryPlan:
    """Return the plan with those chiplets once that hold the same, as if they were nodes.

    As a rule all do, and adding them up again for every budget takes most of the time.
    """
    grids = [*memory.static.values(), *(cache.bytes_grid for cache in memory.caches)]
    kept = {tuple(grid[node] for grid in grids): node for node in range(memory.num_nodes)}
    places = {
        tuple(grid[node][chiplet] for grid in grids): (node, chiplet)
        for node in kept.values()
        for chiplet in range(memory.num_chiplets)
    }

    def shortened(grid: Grid) -> Grid:
        return tuple((grid[node][chiplet],) for node, chiplet in places.values())

    caches = (
        CacheTensor(name=c.name, is_resizable=c.is_resizable, bytes_grid=shortened(c.bytes_grid))
        for c in memory.caches
    )
    return MemoryPlan(
        static={term: shortened(grid) for term, grid in memory.static.items()},
        caches=tuple(caches),
        current_blocks=memory.current_blocks,
    )


def _steps(needed: Callable[[int], int], first: int, last: int) -> list[tuple[int, int]]:
    """Return budgets, rising, and the largest count up to `last` that each of them gives."""
    needed = functools.cache(needed)
    steps: list[tuple[int, int]] = []
    # From the end, so that what a larger count takes no more than is left out.
    for count in reversed(_samples(first, last)):
        budget_bytes = needed(count)
        if not steps or budget_bytes < steps[-1][0]:
            steps.append((budget_bytes, _last_within(needed, count, last, budget_bytes)))
    return steps[::-1]


def _samples(first: int, last: int) -> list[int]:
    span = last - first
    if span < _MOST_STEPS:
        return list(range(first, last + 1))
    return [first + span * index // _NUM_SAMPLES for index in range(_NUM_SAMPLES + 1)]


def _last_within(needed: Callable[[int], int], count: int, last: int, budget_bytes: int) -> int:
    """Return the largest count up to `last` that fits, where `count` does.

    It is close, as counts share a budget only by alignment, so the stride starts at 1.
    """
    fitting, stride = count, 1
    while fitting + stride <= last and needed(fitting + stride) <= budget_bytes:
        fitting, stride = fitting + stride, stride * 2
    while stride > 1:
        stride //= 2
        if fitting + stride <= last and needed(fitting + stride) <= budget_bytes:
            fitting += stride
    return fitting


def _point(candidate: Candidate, num_blocks: int, budget_bytes: int) -> SweepPoint:
    held = capacity(
        num_blocks,
        block_size=candidate.kvcache_block_size,
        max_seq_len=candidate.max_seq_len,
        batch_size=candidate.batch_size,
    )
    is_paged = candidate.memory.has_resizable_cache
    return SweepPoint(
        budget_bytes=budget_bytes,
        num_blocks=num_blocks,
        num_requests=held.num_full_sequences if is_paged else candidate.batch_size,
        num_tokens=held.num_tokens,
    )
