"""What limits a plan, in a sentence, and where it does not fit, what would make it fit.

Nothing is advised that was not tried: every piece of advice comes from sizing the changed model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from reblock.config import DTYPE_BYTES
from reblock.errors import BudgetAboveDevice, InvalidOption
from reblock.planning.candidate import ModelSubject
from reblock.units import GIB, format_bytes, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.budget import MemoryBudget
    from reblock.planning.answer import Answer
    from reblock.planning.candidate import Candidate
    from reblock.planning.result import NextStep

__all__ = ["advise_model", "advise_shared", "explain"]

_MOST_DEVICES = 64
_SHORTEST = 64


def explain(candidate: Candidate, found: Answer, step: NextStep | None, *, is_chosen: bool) -> str:
    """Return in one sentence what decided the answer."""
    if found.num_blocks is None:
        return _too_large(candidate, found)
    if is_chosen and step is not None:
        return (
            "the memory budget: one more request of the full length would not fit, it needs "
            f"{format_bytes(step.budget_bytes)}"
        )
    match found.limited_by:
        case "fixed":
            return "no layer keeps tokens for ever, so there is one window or state for a request"
        case "given":
            return f"the count was given; it needs {format_bytes(found.needed_bytes)}"
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


def advise_shared(
    found: Answer, budget: MemoryBudget, *, num_blocks: int | None
) -> tuple[str, ...]:
    """Return what helps models and artifacts alike: another budget, or another count."""
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
    if budget.text == "1":
        lines.append("write 1.0 or 100% for the whole device: a bare 1 is one byte")
    if num_blocks is not None and found.largest_num_blocks is not None:
        lines.append(f"lower num_blocks to {found.largest_num_blocks}, the most the device holds")
    return tuple(lines)


def advise_model(subject: ModelSubject, candidate: Candidate, budget: MemoryBudget) -> list[str]:
    """Return the settings that would make the model fit into the same budget, each on its own."""
    trials = (_fewer_requests, _shorter_requests, _smaller_type, _more_devices, _larger_cpu)
    return [text for trial in trials for text in trial(subject, candidate, budget)]


def _fits(subject: ModelSubject, batch_size: int, budget: MemoryBudget) -> bool:
    try:
        available = subject.target.device.available_bytes
        count = subject.settings.num_blocks
        candidate = subject.at(batch_size)
        return candidate.smallest_budget(count) <= budget.resolve(available)
    except (InvalidOption, BudgetAboveDevice):
        return False


def _fewer_requests(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    fitting, refused = 0, candidate.batch_size
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        if _fits(subject, middle, budget):
            fitting = middle
        else:
            refused = middle
    if fitting:
        yield f"lower batch_size to {fitting}"


def _shorter_requests(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    if subject.settings.num_blocks is not None:
        return
    length = 1 << (candidate.max_seq_len - 1).bit_length() - 1
    while length >= _SHORTEST:
        if _fits(subject.changed(max_seq_len=length), candidate.batch_size, budget):
            yield f"lower max_seq_len to {length}"
            return
        length //= 2


def _smaller_type(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    if DTYPE_BYTES[subject.model.dtype] <= DTYPE_BYTES["bfloat16"]:
        return
    if _fits(subject.changed(dtype="bfloat16"), candidate.batch_size, budget):
        yield "choose dtype=bfloat16"


def _larger_cpu(subject: ModelSubject, candidate: Candidate, budget: MemoryBudget) -> Iterator[str]:
    device = subject.target.device
    needed = candidate.smallest_budget(subject.settings.num_blocks)
    if not subject.target.is_cpu or needed <= device.available_bytes:
        return
    share = budget.amount if isinstance(budget.amount, Fraction) else Fraction(1)
    gib = math.ceil((needed / share + device.reserve_bytes_per_chiplet) / GIB)
    yield f"take a machine with {gib:,} GiB: npu cpu:{gib}GB"


def _more_devices(
    subject: ModelSubject, candidate: Candidate, budget: MemoryBudget
) -> Iterator[str]:
    if subject.target.is_cpu:
        return
    count = subject.target.num_devices
    while (count := count * 2) <= _MOST_DEVICES:
        name = subject.target.device.name
        target = replace(subject.target, num_devices=count, text=f"{name}x{count}")
        spread = ModelSubject.make(subject.source, subject.settings, target)
        if _fits(spread, candidate.batch_size, budget):
            yield f"compile for {count} devices: npu {target.text}"
            return
