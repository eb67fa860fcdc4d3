"""How many blocks of KV cache fit, and why not more.

Every chiplet has the same share of the budget and must hold its part of everything, so the
tightest one decides:

    static[node][chiplet] + kv_aligned[node][chiplet](n) <= budget // num_chiplets

The left side never falls when n rises, so the largest n that fits is found by bisection.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reblock.budget import WHOLE_DEVICE
from reblock.errors import BudgetTooSmall, InvalidOption, UsageError
from reblock.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reblock.budget import MemoryBudget
    from reblock.devices import Device
    from reblock.memory import MemoryPlan

__all__ = [
    "BlockBounds",
    "Capacity",
    "ChipletUse",
    "Limit",
    "Sizing",
    "block_bounds",
    "capacity",
    "chiplet_uses",
    "estimate",
    "fits",
    "largest_fitting",
    "last_true",
    "resolve_budget",
    "smallest_budget",
    "tightest",
]


Limit = Literal["budget", "full_batch", "fixed", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBounds:
    """The fewest blocks the programs can run with, and the most they can ever use."""

    minimum: int
    full: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a number of blocks holds: tokens in all, and sequences.

    `num_full_sequences` of the greatest length fit side by side, and a single sequence can have
    `longest_sequence_tokens`.
    """

    num_tokens: int
    num_full_sequences: int
    longest_sequence_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipletUse:
    """How one chiplet's share of the budget is used, term by term, in bytes.

    Everything but `free_bytes` adds up to `used_bytes`, and with it to `budget_bytes`.
    `alignment_bytes` is what rounding every cache tensor up costs. `free_bytes` is negative
    where the count does not fit.
    """

    node: int
    chiplet: int
    budget_bytes: int
    static_bytes: Mapping[str, int]
    fixed_cache_bytes: int
    resizable_cache_bytes: int
    alignment_bytes: int
    bytes_per_block: int

    @property
    def used_bytes(self) -> int:
        """What this chiplet holds."""
        return (
            sum(self.static_bytes.values())
            + self.fixed_cache_bytes
            + self.resizable_cache_bytes
            + self.alignment_bytes
        )

    @property
    def free_bytes(self) -> int:
        """What is left of its share of the budget."""
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How many blocks fit, what stopped there, and where the memory went.

    All bytes are of one device, except in `chiplets`. `limited_by` is "budget" where one more
    block would not fit, "full_batch" where one more would never be used, and "fixed" where no
    cache can be resized. `tightest` is the (node, chiplet) that decided.
    `next_block_budget_bytes` is the smallest budget for one more block, and None where there is
    no use for one; it may be above `available_bytes`.
    """

    num_blocks: int
    bounds: BlockBounds
    limited_by: Limit
    budget_bytes: int
    available_bytes: int
    tightest: tuple[int, int]
    chiplets: tuple[ChipletUse, ...]
    smallest_budget_bytes: int
    next_block_budget_bytes: int | None


def block_bounds(
    *,
    attn_impl: Literal["eager", "flash_attn"],
    max_seq_len: int,
    block_size: int,
    batch_size: int,
) -> BlockBounds:
    """Return the fewest and the most blocks that programs of these shapes can use.

    Eager attention needs one block per sequence of the batch. Flash attention needs one sequence
    of the greatest length or one block per sequence of the batch, and one block besides.

    Raises:
        InvalidOption: Not even one block fits into `max_seq_len`.

    >>> block_bounds(attn_impl="flash_attn", max_seq_len=40960, block_size=8192, batch_size=8)
    BlockBounds(minimum=9, full=40)
    """
    if block_size > max_seq_len:
        raise InvalidOption(
            f"kvcache_block_size={block_size} is more than max_seq_len={max_seq_len}; lower it to "
            "that or less",
            option="kvcache_block_size",
        )
    blocks_per_sequence = max_seq_len // block_size
    full = blocks_per_sequence * batch_size
    if attn_impl == "eager":
        return BlockBounds(minimum=batch_size, full=full)
    return BlockBounds(minimum=min(max(blocks_per_sequence, batch_size) + 1, full), full=full)


def capacity(num_blocks: int, *, block_size: int, max_seq_len: int, batch_size: int) -> Capacity:
    """Return what `num_blocks` hold; no more than `batch_size` sequences run side by side."""
    num_tokens = num_blocks * block_size
    blocks_per_sequence = -(-max_seq_len // block_size)
    return Capacity(
        num_tokens=num_tokens,
        num_full_sequences=min(num_blocks // blocks_per_sequence, batch_size),
        longest_sequence_tokens=min(num_tokens, max_seq_len),
    )


def smallest_budget(plan: MemoryPlan, num_blocks: int) -> int:
    """Return the smallest budget of one device, in bytes, that `num_blocks` fit into."""
    # Every chiplet has the same share, so all of them must have what the tightest one needs.
    return tightest(plan, num_blocks)[0] * plan.num_chiplets


def fits(plan: MemoryPlan, num_blocks: int, budget_bytes: int) -> bool:
    """Return whether `num_blocks` fit into a budget of `budget_bytes` of one device."""
    return smallest_budget(plan, num_blocks) <= budget_bytes


def tightest(plan: MemoryPlan, num_blocks: int) -> tuple[int, tuple[int, int]]:
    """Return what the fullest chiplet holds, and which (node, chiplet) that is."""
    # Of equals the first.
    needed, negative_node, negative_chiplet = max(
        (num_bytes, -node, -chiplet)
        for node, row in enumerate(plan.total_at(num_blocks))
        for chiplet, num_bytes in enumerate(row)
    )
    return needed, (-negative_node, -negative_chiplet)


def largest_fitting(plan: MemoryPlan, bounds: BlockBounds, budget_bytes: int) -> int | None:
    """Return the largest count within `bounds` that fits, None where not even the smallest does.

    `budget_bytes` are of one device.
    """
    if fits(plan, bounds.full, budget_bytes):
        return bounds.full
    return last_true(lambda count: fits(plan, count, budget_bytes), bounds.minimum, bounds.full)


def last_true(holds: Callable[[int], bool], first: int, end: int) -> int | None:
    """Return the largest number from `first` up to `end`, itself left out, for which it holds.

    Where it does not hold for a number, it must not hold for any above. None where it holds for
    none.
    """
    num_true = bisect(range(first, end), False, key=lambda number: not holds(number))
    return first + num_true - 1 if num_true else None


def resolve_budget(plan: MemoryPlan, device: Device, budget: MemoryBudget) -> int:
    """Return the budget in bytes of one `device`.

    Raises:
        BudgetAboveDevice: It is more than the device has.
        UsageError: The plan is for devices with another number of chiplets.
    """
    if plan.num_chiplets != device.num_chiplets:
        raise UsageError(
            f"the programs are compiled for devices of {plan.num_chiplets} chiplets, but "
            f"{device.name} has {device.num_chiplets}; choose the device they were compiled for"
        )
    return budget.resolve(device.available_bytes)


def chiplet_uses(plan: MemoryPlan, num_blocks: int, budget_bytes: int) -> tuple[ChipletUse, ...]:
    """Return how every chiplet's share of the budget is used at `num_blocks`, fitting or not."""
    aligned, unaligned = plan.kv_bytes_at(num_blocks), plan.kv_unaligned_bytes_at(num_blocks)
    fixed, per_block = plan.fixed_cache_bytes, plan.bytes_per_block
    return tuple(
        ChipletUse(
            node=node,
            chiplet=chiplet,
            budget_bytes=budget_bytes // plan.num_chiplets,
            static_bytes={term: grid[node][chiplet] for term, grid in plan.static.items()},
            fixed_cache_bytes=fixed[node][chiplet],
            resizable_cache_bytes=unaligned[node][chiplet] - fixed[node][chiplet],
            alignment_bytes=aligned[node][chiplet] - unaligned[node][chiplet],
            bytes_per_block=per_block[node][chiplet],
        )
        for node in range(plan.num_nodes)
        for chiplet in range(plan.num_chiplets)
    )


def estimate(
    plan: MemoryPlan,
    bounds: BlockBounds,
    *,
    device: Device,
    budget: MemoryBudget = WHOLE_DEVICE,
) -> Sizing:
    """Return the largest block count up to `bounds.full` that fits into the budget, and why.

    Where no cache can be resized, that is the count the artifact has, if it fits, and `bounds`
    are not looked at.

    Raises:
        BudgetAboveDevice: The budget is more than the device has.
        BudgetTooSmall: Not even `bounds.minimum` blocks fit.
        UsageError: The plan is for devices with another number of chiplets.
    """
    budget_bytes = resolve_budget(plan, device, budget)
    if not plan.has_resizable_cache:
        bounds = BlockBounds(minimum=plan.current_blocks, full=plan.current_blocks)
    num_blocks = largest_fitting(plan, bounds, budget_bytes)
    if num_blocks is None:
        raise _too_small(plan, bounds.minimum, budget, budget_bytes, device)
    is_full = num_blocks == bounds.full
    limited_by: Limit = "full_batch" if is_full else "budget"
    if not plan.has_resizable_cache:
        limited_by = "fixed"
    return Sizing(
        num_blocks=num_blocks,
        bounds=bounds,
        limited_by=limited_by,
        budget_bytes=budget_bytes,
        available_bytes=device.available_bytes,
        # The chiplet that refuses one more block need not be the fullest one now.
        tightest=tightest(plan, num_blocks if is_full else num_blocks + 1)[1],
        chiplets=chiplet_uses(plan, num_blocks, budget_bytes),
        smallest_budget_bytes=smallest_budget(plan, bounds.minimum),
        next_block_budget_bytes=None if is_full else smallest_budget(plan, num_blocks + 1),
    )


def _too_small(
    plan: MemoryPlan, minimum: int, budget: MemoryBudget, budget_bytes: int, device: Device
) -> BudgetTooSmall:
    needed, (node, chiplet) = tightest(plan, minimum)
    smallest, available = needed * plan.num_chiplets, device.available_bytes
    static = plan.static_bytes[node][chiplet]
    problem = (
        f"kvcache_num_blocks={minimum} is the fewest these programs run with, and it does not fit "
        f"into memory_budget={budget.text!r}: node {node}, chiplet {chiplet} needs "
        f"{format_bytes(needed)}, of which {format_bytes(static)} is not KV cache, and its share "
        f"of the budget is {format_bytes(budget_bytes // plan.num_chiplets)}"
    )
    if smallest <= available:
        advice = (
            f"The smallest budget that works is {format_bytes(smallest)}, "
            f"{_percent(smallest, available)} of the {format_bytes(available)} available: raise "
            f"memory_budget to {smallest}, or compile with a lower max_seq_len or batch_size"
        )
        if (meant := budget.meant) is not None:
            advice += f". A bare {budget.text} is {format_bytes(budget_bytes)}: write {meant}"
    else:
        advice = (
            f"No budget works: that takes {format_bytes(smallest)} of each {device.name}, which "
            f"has {format_bytes(available)} available. "
        )
        if static > device.available_bytes_per_chiplet:
            advice += "Compile for more devices (num_devices), or a smaller model"
        else:
            advice += "Compile with a lower max_seq_len or batch_size, or for more devices"
    return BudgetTooSmall(
        f"{problem}. {advice}",
        needed_bytes=needed,
        tightest=(node, chiplet),
        budget_bytes=budget_bytes,
        available_bytes=available,
        smallest_budget_bytes=smallest,
    )


def _percent(num_bytes: int, available_bytes: int) -> str:
    # Rounded up, because the figure must work when it is written back.
    hundredths = -(-num_bytes * 100 * 100 // available_bytes)
    return f"{hundredths // 100}.{hundredths % 100:02}%"
