"""Several models or artifacts on the same devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import make_artifact
from rbln_artifacts import LLAMA2_FLASH, QWEN3_CA25, QWEN3_CR13, STANDIN, copy_artifact
from reblock.errors import BudgetAboveDevice, InvalidBudget, UsageError
from reblock.planning import PlanSettings, SharedPlan, plan_together
from reblock.units import MIB

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
QWEN, SMOL = str(CONFIGS / "Qwen3-0.6B"), str(CONFIGS / "SmolLM2-135M")
MACHINE = "cpu:8GB"


def share(*budgets: str, names: tuple[str, ...] = (QWEN, SMOL), **values: Any) -> SharedPlan:
    asked = PlanSettings(**{"batch_size": 4, "max_seq_len": 2048, **values})
    return plan_together(names, npu=MACHINE, memory_budgets=budgets, settings=asked)


def test_two_with_40_percent_each_fit_together_and_do_not_see_each_other() -> None:
    shared = share("40%", "40%")
    assert shared.fits
    assert not shared.is_split
    first, second = shared.plans
    assert first.budget_bytes == second.budget_bytes == shared.budget_bytes // 2
    assert shared.needed_bytes == first.needed_bytes + second.needed_bytes
    assert shared.needed_bytes <= shared.available_bytes
    assert shared.explanation.startswith("together they take")


def test_budgets_above_the_device_in_all_fit_only_where_they_are_not_used_up() -> None:
    small = share("60%", "60%")
    assert small.fits
    assert "the budgets are more than that, but not all of them are used" in small.explanation
    large = share("60%", "60%", batch_size=64)
    assert all(plan.fits for plan in large.plans)
    assert not large.fits
    assert "lower the budgets" in large.explanation


def test_one_that_does_not_fit_its_own_budget_is_named() -> None:
    shared = share("50%", "300MB")
    assert not shared.fits
    assert SMOL in shared.explanation
    assert QWEN not in shared.explanation


def test_one_budget_is_split_so_that_both_work_and_little_is_left() -> None:
    shared = share("60%", batch_size=64)
    assert shared.is_split
    assert shared.fits
    assert shared.needed_bytes == sum(plan.budget_bytes for plan in shared.plans)
    assert shared.needed_bytes <= shared.budget_bytes
    steps = [plan.next_step for plan in shared.plans]
    for plan, step in zip(shared.plans, steps, strict=True):
        assert step is not None
        cost = step.budget_bytes - plan.budget_bytes
        assert shared.needed_bytes + cost > shared.budget_bytes


def test_a_share_is_the_same_way_from_the_fewest_to_the_full_batch() -> None:
    plans = share("60%", batch_size=64).plans
    ways = [
        (plan.num_blocks - plan.bounds.minimum) / (plan.bounds.full - plan.bounds.minimum)
        for plan in plans
        if plan.num_blocks is not None
    ]
    assert len(ways) == 2
    assert abs(ways[0] - ways[1]) < 0.05


@settings(deadline=None, max_examples=40)
@given(percent=st.integers(5, 100), batch_size=st.sampled_from([1, 8, 64]))
def test_a_split_fits_exactly_where_the_fewest_of_all_do(percent: int, batch_size: int) -> None:
    shared = share(f"{percent}%", batch_size=batch_size)
    assert shared.fits == (shared.smallest_bytes <= shared.budget_bytes)
    assert shared.fits == (shared.needed_bytes <= shared.budget_bytes)
    for plan in shared.plans:
        assert plan.fits or not shared.fits


def test_artifacts_on_the_same_devices_are_split_by_their_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        str(make_artifact(tmp_path / name, num_blocks=9, weight_bytes=40 * MIB)) for name in "ab"
    )
    whole = plan_together([first, second], npu="cpu:1GB", memory_budgets=["360MB"])
    assert whole.fits
    assert [plan.kind for plan in whole.plans] == ["artifact", "artifact"]
    lines = [plan.commands[0].line for plan in whole.plans]
    assert lines[0].startswith(f"reblock set {first} ")


def test_artifacts_on_different_devices_do_not_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    atom = str(copy_artifact(QWEN3_CA25, tmp_path / "atom"))
    rebel = str(copy_artifact(QWEN3_CR13, tmp_path / "rebel"))
    with pytest.raises(UsageError, match="is for RBLN-CR13, and not for RBLN-CA25"):
        plan_together([atom, rebel])


def test_two_rbln_artifacts_too_large_together_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    qwen = str(copy_artifact(QWEN3_CA25, tmp_path / "qwen"))
    llama = str(copy_artifact(LLAMA2_FLASH, tmp_path / "llama"))
    shared = plan_together([qwen, llama], npu="RBLN-CA25x4", memory_budgets=["100%"])
    assert shared.smallest_bytes == sum(plan.budgets.smallest_bytes for plan in shared.plans)
    assert shared.fits == (shared.smallest_bytes <= shared.available_bytes)
    assert any("compiled for RBLN-CA22" in note for note in shared.plans[1].notes)


def test_a_model_with_open_requests_can_have_a_budget_of_its_own_but_no_share() -> None:
    open_batch = {"batch_size": None}
    assert share("40%", "40%", **open_batch).fits
    with pytest.raises(UsageError, match="give batch_size"):
        share("80%", **open_batch)


def test_as_many_budgets_as_names_or_one() -> None:
    with pytest.raises(UsageError, match="3 memory budgets for 2 models"):
        share("20%", "20%", "20%")
    with pytest.raises(UsageError, match="num_blocks is for one"):
        share("80%", num_blocks=40)
    with pytest.raises(BudgetAboveDevice):
        share("20GB")
    with pytest.raises(InvalidBudget):
        share("lots")
