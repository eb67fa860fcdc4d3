"""Sweeps over budgets: every point is what a plan answers, and the smallest budget that it does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import NUM_FULL_BLOCKS, NUM_MIN_BLOCKS, make_artifact
from rbln_artifacts import QWEN3_CA25, QWEN3_CR13, STANDIN, add_alloc, copy_artifact
from reblock.artifact.reader import Artifact, open_artifact
from reblock.budget import MemoryBudget
from reblock.model_spec import parse_model_config
from reblock.planning import Plan, PlanSettings, make_plan, open_subject, parse_target
from reblock.planning.sources import ModelSource
from reblock.planning.sweep import Sweep, _steps, sweep_budgets
from reblock.units import MIB

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
# However many answers there are: 64 of requests, as many of less than one, and all of the device.
MOST_POINTS = 129


def answers(
    subject: ModelSource | Artifact, settings: PlanSettings, npu: str | None, budget_bytes: int
) -> Plan:
    target = None if npu is None else parse_target(npu)
    budget = MemoryBudget(amount=budget_bytes, text=str(budget_bytes))
    return make_plan(subject, settings, target, budget)


def check_against_plans(
    subject: ModelSource | Artifact, settings: PlanSettings, npu: str | None, sweep: Sweep
) -> None:
    """Compare every point with the plan for its budget, and for one byte less."""
    previous = 0
    for point in sweep.points:
        found = answers(subject, settings, npu, point.budget_bytes)
        assert found.capacity is not None
        assert found.num_blocks == point.num_blocks
        assert found.capacity.num_full_sequences == point.num_requests
        assert found.capacity.num_tokens == point.num_tokens
        if point.num_blocks != previous:
            less = answers(subject, settings, npu, point.budget_bytes - 1)
            assert (less.num_blocks or 0) < point.num_blocks
        previous = point.num_blocks


MODELS = [
    ("Llama-3.1-8B", "RBLN-CA25x4", {}),
    ("Llama-3.1-8B", "RBLN-CA25x4", {"batch_size": 1}),
    ("Llama-3.1-70B", "RBLN-CR13x4", {"batch_size": 3}),
    ("Qwen3-0.6B", "RBLN-CA22", {"max_seq_len": 1024}),
    ("Qwen3-0.6B", "cpu:8GB", {"max_seq_len": 2048}),
    ("Qwen3-0.6B", "cpu:8GB", {"max_seq_len": 2048, "batch_size": 16}),
    ("Mistral-7B-v0.1", "cpu:64GB", {"max_seq_len": 8192, "batch_size": 4}),
]


@pytest.mark.parametrize(("name", "npu", "values"), MODELS)
def test_sweep_of_a_model_has_the_answers_of_its_plans(
    name: str, npu: str, values: dict[str, Any]
) -> None:
    subject = open_subject(str(CONFIGS / name))
    settings = PlanSettings(**values)
    sweep = sweep_budgets(subject, settings, parse_target(npu))
    assert sweep.name == str(CONFIGS / name)
    assert 1 <= len(sweep.points) <= MOST_POINTS
    check_against_plans(subject, settings, npu, sweep)


def test_sweep_for_a_count_is_of_the_programs_for_it() -> None:
    subject, npu = open_subject(str(CONFIGS / "Qwen3-0.6B")), "RBLN-CA22"
    asked = PlanSettings(max_seq_len=2048, num_blocks=7)
    available = parse_target(npu).device.available_bytes
    batch_size = answers(subject, asked, npu, available).batch_size
    sweep = sweep_budgets(subject, asked, parse_target(npu))
    settings = PlanSettings(max_seq_len=2048, batch_size=batch_size)
    assert sweep == sweep_budgets(subject, settings, parse_target(npu))
    assert sweep.points[-1].num_blocks == 7


@pytest.mark.parametrize(("name", "npu", "values"), MODELS)
def test_sweep_never_falls_and_covers_all_budgets_that_work(
    name: str, npu: str, values: dict[str, Any]
) -> None:
    subject, settings = open_subject(str(CONFIGS / name)), PlanSettings(**values)
    points = sweep_budgets(subject, settings, parse_target(npu)).points
    available = parse_target(npu).device.available_bytes
    assert points[-1].budget_bytes == available
    for before, after in pairwise(points):
        assert before.budget_bytes < after.budget_bytes
        assert before.num_blocks <= after.num_blocks
        assert before.num_requests <= after.num_requests
        assert before.num_tokens <= after.num_tokens


def test_sweep_with_few_counts_has_all_of_them(tmp_path: Path) -> None:
    artifact = open_artifact(str(make_artifact(tmp_path / "artifact")))
    sweep = sweep_budgets(artifact, PlanSettings(), parse_target("cpu:1GB"))
    # Two blocks of 1 MiB share one step of the alignment, and the larger one is the answer.
    expected = [*range(NUM_MIN_BLOCKS + 1, NUM_FULL_BLOCKS + 1, 2), NUM_FULL_BLOCKS]
    assert [point.num_blocks for point in sweep.points] == expected
    check_against_plans(artifact, PlanSettings(), "cpu:1GB", sweep)


def test_sweep_of_an_artifact_without_a_choice_has_its_one_count(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "artifact", attn_impl="eager", num_blocks=4)
    sweep = sweep_budgets(open_artifact(str(directory)), PlanSettings(), parse_target("cpu:1GB"))
    assert {(point.num_blocks, point.num_requests) for point in sweep.points} == {(4, 4)}
    assert len(sweep.points) == 2


@pytest.mark.parametrize("name", [QWEN3_CA25, QWEN3_CR13])
def test_sweep_of_an_artifact_counts_the_fullest_chiplet(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    directory = copy_artifact(name, tmp_path / "artifact")
    alike = sweep_budgets(open_artifact(str(directory)), PlanSettings(), None)
    node, chiplet = (3, 0) if name == QWEN3_CA25 else (0, 2)
    add_alloc(directory, "Workspace", node, chiplet, 700 * MIB)
    artifact = open_artifact(str(directory))
    heavier = sweep_budgets(artifact, PlanSettings(), None)
    num_chiplets = artifact.device().num_chiplets
    added = heavier.points[0].budget_bytes - alike.points[0].budget_bytes
    assert added == 700 * MIB * num_chiplets
    check_against_plans(artifact, PlanSettings(), None, heavier)


def test_sweep_where_no_budget_works_has_no_points() -> None:
    subject = open_subject(str(CONFIGS / "Llama-3.1-70B"))
    sweep = sweep_budgets(subject, PlanSettings(), parse_target("RBLN-CA25"))
    assert sweep.points == ()
    assert sweep.available_bytes == parse_target("RBLN-CA25").device.available_bytes


def test_sweep_of_a_model_without_blocks_rises_by_requests() -> None:
    content = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 65_536,
        "sliding_window": 4096,
        "dtype": "bfloat16",
    }
    spec = parse_model_config(json.dumps(content), path="config.json")
    subject = ModelSource(name="windows", kind="directory", spec=spec, stored=None, notes=())
    settings = PlanSettings(max_seq_len=65_536)
    sweep = sweep_budgets(subject, settings, parse_target("RBLN-CA22"))
    assert all(point.num_requests == point.num_blocks for point in sweep.points)
    assert sweep.points[-1].num_requests > sweep.points[0].num_requests
    check_against_plans(subject, settings, "RBLN-CA22", sweep)


@given(
    costs=st.lists(st.integers(0, 5), min_size=1, max_size=300),
    first=st.integers(1, 3),
)
def test_steps_are_the_smallest_budgets_of_the_largest_counts(costs: list[int], first: int) -> None:
    needed = dict(enumerate([sum(costs[: end + 1]) for end in range(len(costs))], start=first))
    last = max(needed)
    steps = _steps(needed.__getitem__, first, last)
    assert steps[-1] == (needed[last], last)
    for budget_bytes, count in steps:
        assert count == max(c for c, b in needed.items() if b <= budget_bytes)
        assert needed[count] == budget_bytes
    assert steps == sorted(set(steps))
    if last - first < 64:
        assert {budget for budget, _ in steps} == set(needed.values())


def test_steps_leave_out_what_takes_more_than_a_larger_count() -> None:
    needed = {1: 10, 2: 30, 3: 20, 4: 40}
    assert _steps(needed.__getitem__, 1, 4) == [(10, 1), (20, 3), (40, 4)]
