"""Every command that the documentation of `optimum-rbln-cli` shows, on a real artifact.

The values are changed to fit; the options are written as they are there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from installed import inspect, optimum, reblock, refused, snapshot

from reblock.artifact.reader import open_artifact
from reblock.sizing import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

    from installed import Compiled

pytestmark = pytest.mark.full

NUM_MIN_BLOCKS, NUM_FULL_BLOCKS = 17, 64


def count(directory: Path) -> int:
    result = optimum("--get-kvcache-num-blocks", "--model-id", directory)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_compile_with_a_memory_budget_writes_an_artifact_within_it(compiled: Compiled) -> None:
    report = inspect(compiled.artifact)
    assert f"written to          {compiled.artifact}" in compiled.stdout
    assert report["programs"] == ["prefill", "decoder_batch_4", "decoder_batch_1"]
    assert (report["num_min_blocks"], report["num_full_blocks"]) == (
        NUM_MIN_BLOCKS,
        NUM_FULL_BLOCKS,
    )
    plan = open_artifact(str(compiled.artifact)).memory_plan()
    num_blocks = report["kvcache_num_blocks"]
    assert smallest_budget(plan, num_blocks) <= report["available_bytes"] * 8 // 10
    assert num_blocks == NUM_FULL_BLOCKS or (
        smallest_budget(plan, num_blocks + 1) > report["available_bytes"] * 8 // 10
    )


def test_compile_does_not_write_the_memory_budget_into_the_artifact(compiled: Compiled) -> None:
    text = (compiled.artifact / "rbln_config.json").read_text(encoding="utf-8")
    assert "memory_budget" not in text


def test_compile_logs_every_stage_and_its_time_as_plain_lines(compiled: Compiled) -> None:
    for stage in ("examining", "compiling", "reading and writing the weights", "running"):
        assert any(
            line.startswith(stage) and "done in" in line for line in compiled.stderr.splitlines()
        )


# A compilation that is refused for another option, named after it, has understood the budget.
@pytest.mark.parametrize("budget", ["0.8", "80%", "100GB"])
@pytest.mark.parametrize("form", ["--memory-budget {}", "--memory-budget={}", "--memory_budget={}"])
def test_compile_takes_the_budget_in_every_form(budget: str, form: str, compiled: Compiled) -> None:
    options = form.format(budget).split()
    refused(
        optimum("--model-id", compiled.model, *options, "--kvcache-num-blocks", "20"),
        2,
        f"memory_budget={budget!r}",
        "kvcache_num_blocks=20",
        "exclude each other",
    )


def test_compile_refuses_a_budget_above_the_device(compiled: Compiled, tmp_path: Path) -> None:
    destination = tmp_path / "never"
    refused(
        optimum(
            "--model-id",
            compiled.model,
            "--output-dir",
            destination,
            "--memory-budget",
            "1000TB",
        ),
        3,
        "1000TB",
        f"{inspect(compiled.artifact)['available_bytes']:,} bytes",
    )
    assert not destination.exists()


def test_compile_refuses_a_budget_that_the_weights_exceed(
    compiled: Compiled, tmp_path: Path
) -> None:
    destination = tmp_path / "never"
    refused(
        optimum(
            "--model-id", compiled.model, f"--output-dir={destination}", "--memory-budget", "1MB"
        ),
        3,
        "memory_budget='1MB'",
        "weights",
    )
    assert not destination.exists()


def test_get_prints_the_number_alone(compiled: Compiled) -> None:
    result = optimum("--get-kvcache-num-blocks", "--model-id", compiled.artifact)
    assert result.returncode == 0
    assert result.stdout == f"{NUM_FULL_BLOCKS}\n"
    assert result.stderr == ""


@pytest.mark.parametrize("equals", [False, True])
def test_set_edits_in_place(artifact: Path, equals: bool) -> None:
    options = (
        [f"--set-kvcache-num-blocks={20}", f"--model-id={artifact}"]
        if equals
        else ["--set-kvcache-num-blocks", "20", "--model-id", artifact]
    )
    before = snapshot(artifact)
    result = optimum(*options)
    assert result.returncode == 0, result.stderr
    assert count(artifact) == 20
    after = snapshot(artifact)
    assert before.keys() <= after.keys()
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {
        ".reblock.json",  # which count there was before
        "rbln_config.json",
        "prefill.rbln",
        "decoder_batch_4.rbln",
        "decoder_batch_1.rbln",
    }


def test_set_with_output_dir_leaves_the_source_byte_for_byte(
    artifact: Path, tmp_path: Path
) -> None:
    before, destination = snapshot(artifact), tmp_path / "artifact_20"
    result = optimum(
        "--set-kvcache-num-blocks", "20", "--model-id", artifact, "--output-dir", destination
    )
    assert result.returncode == 0, result.stderr
    assert snapshot(artifact) == before
    assert (count(artifact), count(destination)) == (NUM_FULL_BLOCKS, 20)
    assert snapshot(destination).keys() == {*before, ".reblock.json"}
    # A later edit of the copy reaches no file that the two might share.
    assert optimum("--set-kvcache-num-blocks", "30", "--model-id", destination).returncode == 0
    assert snapshot(artifact) == before


def test_set_there_and_back_restores_what_the_artifact_says(artifact: Path) -> None:
    before = inspect(artifact)
    for number in (19, NUM_FULL_BLOCKS):
        assert optimum("--set-kvcache-num-blocks", number, "--model-id", artifact).returncode == 0
    assert inspect(artifact) == {**before, "previous_kvcache_num_blocks": 19}


# All but 2 MiB of what 40 blocks take, in the three ways to say it.
@pytest.mark.parametrize("kind", ["fraction", "percent", "bytes"])
def test_set_memory_budget_takes_as_many_blocks_as_fit(
    kind: str, artifact: Path, tmp_path: Path
) -> None:
    opened = open_artifact(str(artifact))
    plan, available = opened.memory_plan(), opened.device().available_bytes
    wanted = smallest_budget(plan, 40)
    # Rounded up to seven digits, which is less than what one more step of 8 blocks takes.
    millionths = -(-wanted * 10**7 // available)
    budget = {
        "fraction": f"{millionths / 10**7:.7f}",
        "percent": f"{millionths / 10**5:.5f}%",
        "bytes": f"{wanted}",
    }[kind]
    before, destination = snapshot(artifact), tmp_path / "within"
    result = optimum(
        "--set-memory-budget", budget, "--model-id", artifact, "--output-dir", destination
    )
    assert result.returncode == 0, result.stderr
    assert "limited by          the memory budget" in result.stdout
    assert count(destination) == 40
    assert snapshot(artifact) == before


@pytest.mark.parametrize("budget", ["0.8", "80%", "10GB"])
def test_set_memory_budget_works_as_the_examples_write_it(budget: str, artifact: Path) -> None:
    available = open_artifact(str(artifact)).device().available_bytes
    if available < 12 * 2**30:
        pytest.skip("this machine has less than the 10 GB of the example")
    assert optimum("--set-kvcache-num-blocks", 20, "--model-id", artifact).returncode == 0
    result = optimum("--set-memory-budget", budget, "--model-id", artifact)
    assert result.returncode == 0, result.stderr
    assert count(artifact) == NUM_FULL_BLOCKS


@pytest.mark.parametrize(
    "options",
    [
        ("--set-kvcache-num-blocks", "20", "--set-memory-budget", "0.8"),
        ("--get-kvcache-num-blocks", "--set-kvcache-num-blocks", "20"),
        ("--get-kvcache-num-blocks", "--set-memory-budget=80%"),
    ],
)
def test_get_and_both_sets_exclude_each_other(options: tuple[str, ...], artifact: Path) -> None:
    before = snapshot(artifact)
    refused(optimum(*options, "--model-id", artifact), 2, "not allowed with argument")
    assert snapshot(artifact) == before


def test_set_below_the_minimum_is_refused_and_writes_nothing(artifact: Path) -> None:
    before = snapshot(artifact)
    result = optimum("--set-kvcache-num-blocks", NUM_MIN_BLOCKS - 1, "--model-id", artifact)
    refused(result, 3, f"kvcache_num_blocks={NUM_MIN_BLOCKS - 1}", f"{NUM_MIN_BLOCKS} blocks")
    assert snapshot(artifact) == before


def test_set_above_the_full_batch_warns_and_proceeds(artifact: Path) -> None:
    result = optimum("--set-kvcache-num-blocks", NUM_FULL_BLOCKS + 6, "--model-id", artifact)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("warning: 70 blocks are more than the 64")
    assert count(artifact) == NUM_FULL_BLOCKS + 6


def test_both_commands_do_the_same(artifact: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert (
        optimum(
            "--set-kvcache-num-blocks", 33, "--model-id", artifact, "--output-dir", one
        ).returncode
        == 0
    )
    result = reblock("set", artifact, 33, "--output-dir", other, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["kvcache_num_blocks"] == 33
    assert snapshot(one) == snapshot(other)
