"""A memory budget bounds the block count, and the process that serves stays within it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from installed import inspect, optimum, reblock, refused, snapshot

from process_memory import generate_watched
from reblock.artifact.reader import open_artifact
from reblock.budget import parse_budget
from reblock.sizing import estimate, fits, smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

    from installed import Compiled

    from reblock.memory import MemoryPlan

pytestmark = pytest.mark.full

MIB = 2**20
NUM_MIN_BLOCKS, NUM_FULL_BLOCKS = 17, 64
# Together they fill the cache of 40 blocks: 4 prompts of about 1,200 bytes, and their answers.
LONG_PROMPTS = [f"{number}: " + "The cache holds the keys. " * 45 for number in range(4)]


def plan_of(directory: Path) -> MemoryPlan:
    return open_artifact(str(directory)).memory_plan()


def blocks_within(directory: Path, budget: str) -> int:
    """Return how many blocks `reblock set --memory-budget` would choose."""
    result = reblock("set", directory, "--memory-budget", budget, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    outcome: dict[str, Any] = json.loads(result.stdout)
    assert not outcome["is_written"]
    return int(outcome["kvcache_num_blocks"])


def test_a_larger_budget_never_gives_fewer_blocks(compiled: Compiled) -> None:
    plan = plan_of(compiled.artifact)
    smallest, full = smallest_budget(plan, NUM_MIN_BLOCKS), smallest_budget(plan, NUM_FULL_BLOCKS)
    budgets = [smallest + (full - smallest) * step // 8 for step in range(9)] + [full + 64 * MIB]
    counts = [blocks_within(compiled.artifact, str(budget)) for budget in budgets]
    assert counts == sorted(counts)
    assert counts[-2:] == [NUM_FULL_BLOCKS, NUM_FULL_BLOCKS]
    assert len(set(counts)) >= 5
    for budget, count in zip(budgets, counts, strict=True):
        assert fits(plan, count, budget)
        assert count == NUM_FULL_BLOCKS or not fits(plan, count + 1, budget)


def test_the_same_budget_gives_the_same_count_after_a_resize(artifact: Path) -> None:
    budget = str(smallest_budget(plan_of(artifact), 40))
    counts = [blocks_within(artifact, budget)]
    for number in (17, 50):
        assert reblock("set", artifact, number).returncode == 0
        counts.append(blocks_within(artifact, budget))
    assert counts == [40, 40, 40]


def test_the_whole_device_in_any_words_is_what_no_budget_gives(compiled: Compiled) -> None:
    artifact = open_artifact(str(compiled.artifact))
    device = artifact.device()
    not_given = estimate(artifact.memory_plan(), artifact.bounds, device=device)
    for budget in ("100%", "1.0", str(device.available_bytes)):
        given = estimate(
            artifact.memory_plan(), artifact.bounds, device=device, budget=parse_budget(budget)
        )
        assert given == not_given
        assert blocks_within(compiled.artifact, budget) == not_given.num_blocks


def test_a_budget_above_the_device_is_refused_with_both_numbers(artifact: Path) -> None:
    available = open_artifact(str(artifact)).device().available_bytes
    before = snapshot(artifact)
    result = optimum("--set-memory-budget", available + 1, "--model-id", artifact)
    refused(result, 3, f"{available:,} bytes", f"{available + 1:,} bytes")
    assert snapshot(artifact) == before


@pytest.mark.parametrize("budget", ["1", "1MB", "0.001%"])
def test_a_budget_too_small_names_the_smallest_and_that_one_works(
    budget: str, artifact: Path, tmp_path: Path
) -> None:
    before, destination = snapshot(artifact), tmp_path / "smallest"
    message = refused(optimum("--set-memory-budget", budget, "--model-id", artifact), 3)
    assert snapshot(artifact) == before
    match = re.search(r"raise memory_budget to (\d+)", message)
    assert match is not None, message
    named = int(match[1])
    assert ("write 1.0 or 100%" in message) == (budget == "1")
    result = optimum(
        "--set-memory-budget", named, "--model-id", artifact, "--output-dir", destination
    )
    assert result.returncode == 0, result.stderr
    assert inspect(destination)["kvcache_num_blocks"] >= NUM_MIN_BLOCKS
    refused(optimum("--set-memory-budget", named - 1, "--model-id", artifact), 3, f"{named:,}")


def test_the_percentage_that_it_names_works_as_well(artifact: Path) -> None:
    message = refused(optimum("--set-memory-budget", "1MB", "--model-id", artifact), 3)
    match = re.search(r"([\d.]+%) of the", message)
    assert match is not None, message
    result = optimum("--set-memory-budget", match[1], "--model-id", artifact)
    assert result.returncode == 0, result.stderr


def test_the_serving_process_stays_within_its_budget(artifact: Path) -> None:
    plan = plan_of(artifact)
    budget = smallest_budget(plan, 40)
    result = optimum("--set-memory-budget", budget, "--model-id", artifact)
    assert result.returncode == 0, result.stderr
    served = generate_watched(artifact, LONG_PROMPTS, "--raw", "--max-new-tokens", "40")
    report = served.report
    assert report["kvcache_num_blocks"] == 40
    assert report["most_running"] == len(LONG_PROMPTS)
    assert all(len(one["token_ids"]) == 40 for one in report["results"])
    print(
        f"planned {plan.total_at(40)[0][0]:,}, budget {budget:,}, "
        f"peak RSS {served.peak_rss_bytes:,}, peak PSS {served.peak_pss_bytes:,}"
    )
    assert served.peak_pss_bytes <= served.peak_rss_bytes
    assert served.peak_rss_bytes <= budget
    # Nor is it far below: a plan that counts too much would waste what was given.
    assert served.peak_rss_bytes >= budget * 7 // 10
    # That all of it is there, and no more, test_resized_buffers.py looks at.
    assert report["kv_bytes"] == plan.kv_unaligned_bytes_at(40)[0][0]
