"""Several plans side by side: of one model on devices and budgets, or of many on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.cli.plan_tables import advice_text, commands_text, describe, devices, kept, notes_text
from reblock.cli.tables import labelled, make_table, paragraph, render
from reblock.planning.document import Refused
from reblock.planning.result import Plan
from reblock.units import format_gib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from reblock.planning.result import SharedPlan

__all__ = ["comparison", "shared_report"]

_COUNTS = ("blocks", "requests", "tokens", "limited by")
_LIMITS = {
    "budget": "memory budget",
    "full_batch": "full batch",
    "fixed": "fixed size",
    "given": "count given",
}


def comparison(outcomes: Sequence[Plan | Refused]) -> str:
    """Return a table of plans of one model or artifact, and why those that fail do."""
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    table = make_table(None, "device", "budget", "bytes", *_COUNTS, gap=1)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    about = [*describe(plans[0]), ("batch", _batch(plans[0])), *_costs(plans)]
    sections = [
        labelled(about, whole=("model", "artifact", "module")),
        render(table),
        *(_failure(outcome) for outcome in outcomes),
        notes_text(_once(note for plan in plans for note in plan.notes)),
    ]
    return "\n\n".join(section for section in sections if section)


def _batch(plan: Plan) -> str:
    requests = f"requests of up to {plan.max_seq_len:,} tokens"
    return (
        f"as many {requests} as fit" if plan.is_batch_chosen else f"{plan.batch_size:,} {requests}"
    )


def _costs(plans: Sequence[Plan]) -> list[tuple[str, str]]:
    """Return what a token costs, with the devices it holds for where they differ in that."""
    found: dict[str, list[str]] = {}
    for plan in plans:
        found.setdefault(kept(plan), []).append(plan.target.text)
    if len(found) == 1:
        return [("KV cache", text) for text in found]
    return [
        ("KV cache", f"{text}, on {', '.join(_once(targets))}") for text, targets in found.items()
    ]


def _row(outcome: Plan | Refused) -> tuple[str, ...]:
    if isinstance(outcome, Refused):
        return (outcome.npu, outcome.memory_budget, "", "", "", "", "not possible")
    size = format_gib(outcome.budget_bytes)
    return (outcome.target.text, outcome.budget.text, size, *_counts(outcome))


def _counts(plan: Plan) -> tuple[str, str, str, str]:
    held = plan.capacity
    if plan.num_blocks is None or held is None:
        return ("", "", "", "does not fit")
    return (
        f"{plan.num_blocks:,}",
        f"{held.num_full_sequences:,}",
        f"{held.num_tokens:,}",
        _LIMITS[plan.limited_by],
    )


def _failure(outcome: Plan | Refused) -> str:
    if isinstance(outcome, Refused):
        return paragraph(f"{outcome.npu}, {outcome.memory_budget}: {outcome.reason}")
    if outcome.fits:
        return ""
    where = f"{outcome.target.text}, {outcome.budget.text}"
    return paragraph(f"{where}: {outcome.explanation}") + advice_text(outcome.advice)


def shared_report(shared: SharedPlan) -> str:
    """Return what each of several models or artifacts gets of a device that they share."""
    numbered = [(str(number), plan) for number, plan in enumerate(shared.plans, start=1)]
    names = [(number, plan.name) for number, plan in numbered]
    about = [("devices", devices(shared.plans[0])), ("budget", _budget(shared))]
    sections = [
        labelled([*names, *about], whole=[number for number, _ in names]),
        render(_shared_table(shared)),
        paragraph(f"{shared.explanation[:1].upper()}{shared.explanation[1:]}."),
    ]
    for number, plan in numbered:
        if not plan.fits:
            sections.append(paragraph(f"{number}: {plan.explanation}") + advice_text(plan.advice))
    # Where they do not fit together, running the commands would not help.
    if shared.fits:
        sections += [
            commands_text(plan.commands, prefix=f"{number}: ") for number, plan in numbered
        ]
    sections.append(notes_text(_once(note for plan in shared.plans for note in plan.notes)))
    return "\n\n".join(section for section in sections if section)


def _budget(shared: SharedPlan) -> str:
    how = "one for all of them, split here" if shared.is_split else "one for each of them"
    return (
        f"{format_gib(shared.budget_bytes)} of the {format_gib(shared.available_bytes)} available "
        f"on a device, {how}"
    )


def _shared_table(shared: SharedPlan) -> Table:
    table = make_table(None, "", "budget", "needed", *_COUNTS, gap=1)
    for number, plan in enumerate(shared.plans, start=1):
        sizes = (format_gib(plan.budget_bytes), format_gib(plan.needed_bytes))
        table.add_row(str(number), *sizes, *_counts(plan))
    sizes = (format_gib(shared.budget_bytes), format_gib(shared.needed_bytes))
    table.add_row("together", *sizes, "", "", "", "" if shared.fits else "does not fit")
    return table


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
