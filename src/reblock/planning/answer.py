"""From a candidate and a budget to the numbers of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reblock.errors import BelowMinimum
from reblock.planning.candidate import check_count
from reblock.planning.result import Interval, Term, Waterfall
from reblock.sizing import capacity, chiplet_uses, resolve_budget, smallest_budget, tightest

if TYPE_CHECKING:
    from reblock.budget import MemoryBudget
    from reblock.devices import Device
    from reblock.planning.candidate import Candidate
    from reblock.sizing import Capacity, ChipletUse, Limit

__all__ = ["Answer", "answer"]

# Of the terms that a candidate cannot know, since they follow from the count.
_CACHE_SOURCES = {
    "fixed KV cache": "windows and states of every request",
    "KV cache blocks": "blocks times bytes of a block",
    "alignment": "every cache tensor is rounded up to 2 MiB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a budget gives; the fields are those of `Plan` with the same names."""

    budget_bytes: int
    num_blocks: int | None
    capacity: Capacity | None
    limited_by: Limit
    tightest: tuple[int, int]
    needed_bytes: int
    chiplets: tuple[ChipletUse, ...]
    waterfall: Waterfall
    budgets: Interval
    largest_num_blocks: int | None


def answer(
    candidate: Candidate,
    device: Device,
    budget: MemoryBudget,
    *,
    num_blocks: int | None,
) -> Answer:
    """Return the count that `budget` gives, or whether `num_blocks` fit into it.

    Raises:
        BelowMinimum: `num_blocks` is less than the programs need.
        InvalidOption: `num_blocks` is given where there is no choice.
        BudgetAboveDevice: The budget is more than the device has.
        UsageError: The programs are for devices with another number of chiplets.
    """
    memory, available = candidate.memory, device.available_bytes
    budget_bytes = resolve_budget(memory, device, budget)
    if num_blocks is not None:
        _check_asked(candidate, num_blocks)
    shown = candidate.bounds.minimum if num_blocks is None else num_blocks
    largest = candidate.largest(available)
    if num_blocks is None:
        fitting = candidate.largest(budget_bytes)
        shown = fitting or shown
    else:
        fitting = num_blocks if smallest_budget(memory, shown) <= budget_bytes else None
    # The chiplet that refuses one more block need not be the fullest one now.
    refused = fitting is not None and num_blocks is None and fitting < candidate.bounds.full
    deciding = tightest(memory, shown + 1 if refused else shown)[1]
    chiplets = chiplet_uses(memory, shown, budget_bytes)
    return Answer(
        budget_bytes=budget_bytes,
        num_blocks=fitting,
        capacity=None if fitting is None else _capacity(candidate, fitting),
        limited_by=_limit(candidate, fitting, num_blocks),
        tightest=deciding,
        needed_bytes=smallest_budget(memory, shown),
        chiplets=chiplets,
        waterfall=_waterfall(candidate, device, chiplets, deciding[0], shown, budget_bytes),
        budgets=Interval(
            smallest_bytes=candidate.smallest_budget(num_blocks), available_bytes=available
        ),
        largest_num_blocks=largest,
    )


def _check_asked(candidate: Candidate, num_blocks: int) -> None:
    check_count(candidate, num_blocks)
    minimum = candidate.bounds.minimum
    if num_blocks < minimum:
        raise BelowMinimum(
            f"num_blocks={num_blocks} is below {minimum}, the fewest for "
            f"max_seq_len={candidate.max_seq_len}, kvcache_block_size="
            f"{candidate.kvcache_block_size} and batch_size={candidate.batch_size}; raise it to "
            f"{minimum}, or lower max_seq_len or batch_size",
            num_blocks=num_blocks,
            num_min_blocks=minimum,
        )


def _capacity(candidate: Candidate, num_blocks: int) -> Capacity:
    held = capacity(
        num_blocks,
        block_size=candidate.kvcache_block_size,
        max_seq_len=candidate.max_seq_len,
        batch_size=candidate.batch_size,
    )
    if candidate.memory.has_resizable_cache:
        return held
    # There is a window or a state for every request, and their lengths are not its business.
    return replace(
        held,
        num_full_sequences=candidate.batch_size,
        longest_sequence_tokens=candidate.max_seq_len,
    )


def _limit(candidate: Candidate, fitting: int | None, asked: int | None) -> Limit:
    if not candidate.memory.has_resizable_cache:
        return "fixed"
    if asked is not None:
        return "given"
    return "full_batch" if fitting == candidate.bounds.full else "budget"


def _waterfall(
    candidate: Candidate,
    device: Device,
    chiplets: tuple[ChipletUse, ...],
    node: int,
    num_blocks: int,
    budget_bytes: int,
) -> Waterfall:
    uses = [use for use in chiplets if use.node == node]
    terms = [
        _summed(term, sum(use.static_bytes[name] for use in uses), len(uses))
        for name, term in candidate.terms.items()
    ]
    for name, num_bytes in (
        ("fixed KV cache", sum(use.fixed_cache_bytes for use in uses)),
        ("KV cache blocks", sum(use.resizable_cache_bytes for use in uses)),
        ("alignment", sum(use.alignment_bytes for use in uses)),
    ):
        source = _CACHE_SOURCES[name]
        terms.append(
            Term(name=name, num_bytes=num_bytes, basis="exact", error_bytes=0, source=source)
        )
    return Waterfall(
        node=node,
        num_blocks=num_blocks,
        dram_bytes=device.dram_bytes,
        reserve_bytes=device.dram_bytes - device.available_bytes,
        outside_budget_bytes=device.available_bytes - budget_bytes,
        budget_bytes=budget_bytes,
        terms=tuple(terms),
        bytes_per_block=sum(use.bytes_per_block for use in uses),
        unused_bytes=budget_bytes - sum(use.used_bytes for use in uses),
    )


def _summed(term: Term, num_bytes: int, num_chiplets: int) -> Term:
    """Return the term for all chiplets of a device together."""
    error = term.error_bytes
    return replace(
        term, num_bytes=num_bytes, error_bytes=None if error is None else error * num_chiplets
    )
