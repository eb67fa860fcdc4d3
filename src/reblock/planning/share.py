"""Several models or artifacts on the same devices: whether they fit together, and how to split.

A budget counts what one artifact takes, whatever runs beside it. So shares add up, and what all of
them take is what a device must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.reader import Artifact
from reblock.budget import WHOLE_DEVICE, MemoryBudget, parse_budget
from reblock.errors import UsageError
from reblock.planning.artifact_facts import artifact_target
from reblock.planning.candidate import Candidate, ModelSubject, artifact_candidate
from reblock.planning.plan import make_plan, open_subject
from reblock.planning.result import SharedPlan
from reblock.planning.settings import PlanSettings
from reblock.planning.sources import ModelSource
from reblock.planning.target import Target, parse_target
from reblock.sizing import last_true
from reblock.units import format_bytes, format_gib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from reblock.planning.result import Plan

    Subject: TypeAlias = ModelSource | Artifact

__all__ = ["plan_together", "share_device"]


def plan_together(
    names: Sequence[str],
    *,
    memory_budgets: Sequence[float | str | MemoryBudget] = (),
    npu: str | None = None,
    settings: PlanSettings | None = None,
) -> SharedPlan:
    """Return whether models or artifacts fit on the same devices, and what each of them gets.

    Args:
        names: Two or more, each as for `plan`.
        memory_budgets: One, for all of them together, which is split; or one for each.
        npu: As for `plan`; by default the device of the first artifact, else the cpu.
        settings: What else `plan` takes, for all that are not compiled yet. Where one budget is
            split, `batch_size` must be among it.

    Raises:
        UsageError: The budgets are neither one nor as many as names, or devices differ.
        ReblockError: As `plan`.
    """
    budgets = [
        budget if isinstance(budget, MemoryBudget) else parse_budget(budget)
        for budget in memory_budgets or [WHOLE_DEVICE]
    ]
    target = None if npu is None else parse_target(npu)
    subjects = [open_subject(name) for name in names]
    return share_device(subjects, settings or PlanSettings(), target, budgets)


def share_device(
    subjects: Sequence[Subject],
    settings: PlanSettings,
    target: Target | None,
    budgets: Sequence[MemoryBudget],
) -> SharedPlan:
    """Return the shared plan of subjects that are open; `plan_together` says the rest."""
    if not subjects:
        raise UsageError("no model and no artifact is named; name two or more")
    if settings.num_blocks is not None:
        raise UsageError("num_blocks is for one model or artifact; leave it out")
    if settings.given and all(isinstance(subject, Artifact) for subject in subjects):
        raise UsageError(
            f"all of these are compiled, which has settled {', '.join(settings.given)}; leave "
            "that out, or plan the models themselves"
        )
    tenants = _tenants(subjects, settings, target)
    if len(budgets) not in (1, len(subjects)):
        raise UsageError(
            f"{len(budgets)} memory budgets for {len(subjects)} models: give one, for all of them "
            "together, or one for each"
        )
    if len(budgets) == 1 and len(subjects) > 1:
        return _split(tenants, budgets[0])
    return _own_budgets(tenants, budgets)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant:
    """One of those that share a device."""

    subject: Subject
    settings: PlanSettings
    target: Target

    def candidate(self) -> Candidate:
        """Return what it takes; where its requests are left open, there is no telling."""
        if isinstance(self.subject, Artifact):
            return artifact_candidate(self.subject)
        batch_size = self.settings.batch_size
        if batch_size is None:
            raise UsageError(
                f"{self.subject.name!r}: give batch_size; without it a model takes all the memory "
                "that there is, and nothing is left to split"
            )
        return ModelSubject.make(self.subject, self.settings, self.target).at(batch_size)

    def plan(self, budget: MemoryBudget) -> Plan:
        return make_plan(self.subject, self.settings, self.target, budget)


def _tenants(
    subjects: Sequence[Subject], settings: PlanSettings, target: Target | None
) -> list[_Tenant]:
    first = next((subject for subject in subjects if isinstance(subject, Artifact)), None)
    common = target
    if common is None:
        common = parse_target("cpu") if first is None else artifact_target(first, None)[0]
    tenants = []
    for subject in subjects:
        if isinstance(subject, ModelSource):
            tenants.append(_Tenant(subject=subject, settings=settings, target=common))
            continue
        own = artifact_target(subject, target)[0]
        if own.device != common.device:
            raise UsageError(
                f"{subject.directory} is for {own.device.name}, and not for {common.device.name}; "
                "only what is on the same devices can share them"
            )
        tenants.append(_Tenant(subject=subject, settings=PlanSettings(), target=own))
    return tenants


def _own_budgets(tenants: Sequence[_Tenant], budgets: Sequence[MemoryBudget]) -> SharedPlan:
    pairs = zip(tenants, budgets, strict=True)
    plans = tuple(tenant.plan(budget) for tenant, budget in pairs)
    available = plans[0].waterfall.available_bytes
    needed = sum(plan.needed_bytes for plan in plans)
    total = sum(plan.budget_bytes for plan in plans)
    failing = [plan.name for plan in plans if not plan.fits]
    fits = not failing and needed <= available
    if failing:
        text = f"does not fit: {', '.join(failing)} within the budget given"
    elif fits:
        text = (
            f"together they take {format_bytes(needed)} of {format_bytes(available)} available, "
            f"with budgets of {format_gib(total)} in all"
        )
        if total > available:
            text += "; the budgets are more than that, but not all of them are used"
    else:
        text = (
            f"does not fit: together they take {format_bytes(needed)}, and "
            f"{format_bytes(available)} are available; lower the budgets, which are "
            f"{format_gib(total)} in all"
        )
    return SharedPlan(
        plans=plans,
        is_split=False,
        budget_bytes=total,
        available_bytes=available,
        needed_bytes=needed,
        smallest_bytes=sum(plan.budgets.smallest_bytes for plan in plans),
        fits=fits,
        explanation=text,
    )


def _split(tenants: Sequence[_Tenant], budget: MemoryBudget) -> SharedPlan:
    """Give everyone the fewest blocks that work, and of the rest the same share of the way to full.

    What that leaves goes to the first who can use it.
    """
    candidates = [tenant.candidate() for tenant in tenants]
    available = tenants[0].target.device.available_bytes
    total = budget.resolve(available)
    smallest = sum(candidate.smallest_budget() for candidate in candidates)
    fits = smallest <= total
    counts = _largest_alike(candidates, total) if fits else [c.bounds.minimum for c in candidates]
    shares = [c.smallest_budget(count) for c, count in zip(candidates, counts, strict=True)]
    plans = tuple(
        tenant.plan(MemoryBudget(amount=min(share, available), text=str(min(share, available))))
        for tenant, share in zip(tenants, shares, strict=True)
    )
    if fits:
        text = (
            f"together they take {format_bytes(sum(shares))} of the budget of {format_bytes(total)}"
        )
    else:
        text = (
            f"does not fit: with the fewest blocks that work they take {format_bytes(smallest)} "
            f"together, and the budget is {format_bytes(total)}; raise it, or move one of them to "
            "another device"
        )
    return SharedPlan(
        plans=plans,
        is_split=True,
        budget_bytes=total,
        available_bytes=available,
        needed_bytes=sum(shares),
        smallest_bytes=smallest,
        fits=fits,
        explanation=text,
    )


def _largest_alike(candidates: Sequence[Candidate], total_bytes: int) -> list[int]:
    spans = [c.bounds.full - c.bounds.minimum for c in candidates]
    steps = max(spans)

    def counts_at(step: int) -> list[int]:
        if not steps:
            return [c.bounds.minimum for c in candidates]
        pairs = zip(candidates, spans, strict=True)
        return [c.bounds.minimum + span * step // steps for c, span in pairs]

    def needed(counts: Sequence[int]) -> int:
        pairs = zip(candidates, counts, strict=True)
        return sum(c.smallest_budget(count) for c, count in pairs)

    # The fewest of all fit, so step 0 does.
    step = last_true(lambda step: needed(counts_at(step)) <= total_bytes, 0, steps + 1) or 0
    counts = counts_at(step)
    for index, candidate in enumerate(candidates):
        others = needed(counts) - candidate.smallest_budget(counts[index])
        counts[index] = candidate.largest(total_bytes - others) or counts[index]
    return counts
