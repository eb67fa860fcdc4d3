"""What limits a plan, in a sentence, and where it does not fit, what would make it fit.

Nothing is advised that was not tried: every piece of advice comes from sizing the changed model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from reblock.budget import MemoryBudget
from reblock.config import DTYPE_BYTES
from reblock.devices import get_device
from reblock.errors import BudgetAboveDevice, InvalidOption, UnsupportedModel
from reblock.planning.candidate import MAX_BATCH_SIZE, ModelSubject, check_count
from reblock.planning.target import parse_target
from reblock.sizing import last_true
from reblock.units import GIB, format_bytes, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.planning.answer import Answer
    from reblock.planning.candidate import Candidate
    from reblock.planning.result import NextStep

__all__ = ["advise_model", "advise_shared", "explain"]

_MOST_DEVICES = 64
_LARGEST_DEVICES = ("RBLN-CR13",)
_SHORTEST = 64


def explain(candidate: Candidate, found: Answer, step: NextStep | None, *, is_chosen: bool) -> str:
    """Return in one sentence what decided the answer."""
    if found.num_blocks is None:
        return _too_large(candidate, found)
    if is_chosen and step is not None and found.limited_by == "budget":
        return (
            "the memory budget: one more request of the full length would not fit, it needs "
            f"{format_bytes(step.budget_bytes)}"
        )
    match found.limited_by:
        case "fixed":
            return "the cache of a request has a fixed size, so there is no count to choose"
        case "given":
            return f"the count was given; it needs {format_bytes(found.needed_bytes)}"
        case "full_batch" if is_chosen:
            return f"nothing here: a plan goes no further than {MAX_BATCH_SIZE:,} requests"
        case "full_batch":
            return f"the full batch: {_blocks(found.num_blocks)} can ever be used, and no more"
    more = "" if step is None else f", it needs {format_bytes(step.budget_bytes)}"
    return f"the memory budget: one more block would not fit{more}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"


def _too_large(candidate: Candidate, found: Answer) -> str:
    text = _where_too_large(candidate, found)
    smallest, available = found.budgets.smallest_bytes, found.budgets.available_bytes
    if smallest > available:
        text += (
            f". No budget works: {format_bytes(smallest)} is needed, and a device has "
            f"{format_bytes(available)} available"
        )
    return text


def _where_too_large(candidate: Candidate, found: Answer) -> str:
    node, chiplet = found.tightest
    use = next(use for use in found.chiplets if (use.node, use.chiplet) == found.tightest)
    count, static = found.waterfall.num_blocks, sum(use.static_bytes.values())
    where = f"node {node}, chiplet {chiplet}"
    if static > use.budget_bytes:
        return (
            f"does not fit: what is not KV cache takes {format_bytes(static)} of {where} alone, "
            f"and its share of the budget is {format_bytes(use.budget_bytes)}"
        )
    few = "" if count != candidate.bounds.minimum else ", the fewest that work,"
    return (
        f"does not fit: with {_blocks(count)}{few} {where} needs {format_bytes(use.used_bytes)}, "
        f"of which {format_bytes(static)} is not KV cache, and its share of the budget is "
        f"{format_bytes(use.budget_bytes)}"
    )


def advise_shared(found: Answer, budget: MemoryBudget, fewer: int | None) -> tuple[str, ...]:
    """Return what helps models and artifacts alike: another budget, or another count.

    `fewer` is the most blocks that fit, where a count was asked for and any do.
    """
    if found.num_blocks is not None:
        return ()
    lines = []
    smallest, available = found.budgets.smallest_bytes, found.budgets.available_bytes
    if smallest <= available:
        # Rounded up, because the figure must work when it is written back.
        hundredths = -(-smallest * 10_000 // available)
        lines.append(
            f"raise memory_budget to {smallest} ({format_gib(smallest)}, "
            f"{hundredths // 100}.{hundredths % 100:02}%), the smallest that works"
        )
    if (meant := budget.meant) is not None:
        lines.append(f"write {meant}: a bare {budget.text} is {format_gib(found.budget_bytes)}")
    if fewer is not None:
        lines.append(f"lower num_blocks to {fewer}, the most that fit")
    return tuple(lines)


def advise_model(subject: ModelSubject, candidate: Candidate, budget: MemoryBudget) -> list[str]:
    """Return the settings that would make the model fit into the same budget, each on its own."""
    trials = (
        _fewer_requests,
        _shorter_requests,
        _smaller_type,
        _more_devices,
        _other_devices,
        _larger_cpu,
    )
    found = [text for trial in trials for text in trial(subject, candidate, budget)]
    return found or list(_more_devices_for_fewer(subject, candidate, budget))


def _fits(subject: ModelSubject, batch_size: int, budget: MemoryBudget) -> bool:
    try:
        available = subject.target.device.available_bytes
        count = subject.settings.num_blocks
        candidate = subject.at(batch_size)
        if count is not None:
            check_count(candidate, count)
        return candidate.smallest_budget(count) <= budget.resolve(available)
    except (InvalidOption, BudgetAboveDevice):
        return False


def _most_fitting(subject: ModelSubject, refused: int, budget: MemoryBudget) -> int:
    """Return the most requests below `refused` that the programs run with, 0 for none."""
    return last_true(lambda batch_size: _fits(subject, batch_size, budget), 1, refused) or 0


def _fewer_requests(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    if fewer := _most_fitting(subject, candidate.batch_size, budget):
        yield f"lower batch_size to {fewer}"


def _shorter_requests(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    if subject.settings.num_blocks is not None:
        return
    # The largest power of two below.
    length = 1 << max(0, (candidate.max_seq_len - 1).bit_length() - 1)
    while length >= _SHORTEST:
        if _fits(subject.changed(max_seq_len=length), candidate.batch_size, budget):
            yield f"lower max_seq_len to {length}"
            return
        length //= 2


def _smaller_type(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    smaller = []
    if DTYPE_BYTES[subject.model.dtype] > DTYPE_BYTES["bfloat16"]:
        smaller.append(("dtype", "bfloat16"))
    if subject.target.is_cpu and subject.settings.weight_dtype != "int8":
        smaller.append(("weight_dtype", "int8"))
    for option, name in smaller:
        try:
            changed = subject.changed(**{option: name})
        except (InvalidOption, UnsupportedModel):
            # It does not go with the other types, or how much it would save is not known.
            continue
        if _fits(changed, candidate.batch_size, budget):
            yield f"choose {option}={name}"


def _larger_cpu(subject: ModelSubject, candidate: Candidate, budget: MemoryBudget) -> Iterator[str]:
    device = subject.target.device
    needed = candidate.smallest_budget(subject.settings.num_blocks)
    if not subject.target.is_cpu or needed <= device.available_bytes:
        return
    is_share = isinstance(budget.amount, Fraction)
    share = budget.amount if isinstance(budget.amount, Fraction) else Fraction(1)
    gib = math.ceil((needed / share + device.reserve_bytes_per_chiplet) / GIB)
    # A budget in bytes stays what it is on any machine.
    raised = budget if is_share else MemoryBudget(amount=needed, text=str(needed))
    moved = ModelSubject.make(subject.source, subject.settings, parse_target(f"cpu:{gib}GB"))
    if _fits(moved, candidate.batch_size, raised):
        also = "" if is_share else f", and raise memory_budget to {needed}"
        yield f"take a machine with {gib:,} GiB: npu cpu:{gib}GB{also}"


def _more_devices(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    for spread in _spread(subject):
        if _fits(spread, candidate.batch_size, budget):
            target = spread.target
            yield f"compile for {target.num_devices} devices: npu {target.text}"
            return


def _more_devices_for_fewer(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    """Where nothing helps on its own: the first number of devices that any requests fit."""
    for spread in _spread(subject):
        fewer = _most_fitting(spread, candidate.batch_size, budget)
        if fewer:
            yield f"compile for npu {spread.target.text}, and lower batch_size to {fewer}"
            return


def _spread(subject: ModelSubject) -> Iterator[ModelSubject]:
    """Yield the model on twice, four times, ... as many devices."""
    if subject.target.is_cpu:
        return
    count = subject.target.num_devices
    while (count := count * 2) <= _MOST_DEVICES:
        name = subject.target.device.name
        target = replace(subject.target, num_devices=count, text=f"{name}x{count}")
        yield ModelSubject.make(subject.source, subject.settings, target)


def _other_devices(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    """Devices with more memory each, as many as there are or fewer."""
    own = subject.target
    larger = [name for name in _LARGEST_DEVICES if own.device.dram_bytes < _dram_bytes(name)]
    if own.is_cpu or not larger:
        return
    for count in sorted({1, own.num_devices}):
        text = larger[0] if count == 1 else f"{larger[0]}x{count}"
        moved = ModelSubject.make(subject.source, subject.settings, parse_target(text))
        if _fits(moved, candidate.batch_size, budget):
            yield f"take larger devices: npu {text}"
            return


def _dram_bytes(name: str) -> int:
    return get_device(name).dram_bytes
