"""`reblock set` and `optimum-rbln-cli --set-...`: what they change and what they print."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from commands import assert_refused, optimum, optimum_here, reblock, reblock_here

from artifacts import BYTES_PER_BLOCK, fingerprint, make_artifact, record_checksums
from reblock.artifact.count import read_num_blocks
from reblock.artifact.reader import open_artifact
from reblock.artifact.transaction.system import clone
from reblock.sizing import smallest_budget

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", num_blocks=16)


@pytest.fixture
def budget(directory: Path) -> str:
    """A budget of bytes that 24 blocks fit into exactly."""
    return str(smallest_budget(open_artifact(str(directory)).memory_plan(), 24))


def assert_set(result: subprocess.CompletedProcess[str], directory: Path, num_blocks: int) -> None:
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert open_artifact(str(directory)).config.kvcache_num_blocks == num_blocks


def test_set_in_place_prints_before_and_after(directory: Path) -> None:
    result = reblock("set", directory, "20")
    assert_set(result, directory, 20)
    assert result.stdout.splitlines() == [
        "kvcache_num_blocks  16 -> 20",
        "KV cache            64.00 MiB -> 80.00 MiB per device",
        f"written in place    {directory}",
    ]


def test_set_by_the_options_of_optimum_rbln_in_both_spellings(directory: Path) -> None:
    assert_set(optimum("--set-kvcache-num-blocks", "20", "--model-id", directory), directory, 20)
    assert_set(optimum(f"--model-id={directory}", "--set-kvcache-num-blocks=22"), directory, 22)


def test_set_by_a_budget_says_what_limits_it(directory: Path, budget: str) -> None:
    result = reblock_here("set", directory, "--memory-budget", budget)
    assert_set(result, directory, 24)
    assert "limited by          the memory budget" in result.stdout
    assert f"one more block      {int(budget) + 8 * BYTES_PER_BLOCK:,} bytes" in result.stdout


def test_set_by_a_budget_that_holds_all_says_that_more_would_not_be_used(directory: Path) -> None:
    result = reblock_here("set", directory, "--memory-budget", "100%")
    assert_set(result, directory, 32)
    assert "limited by          the full batch" in result.stdout


def test_set_budget_by_the_options_of_optimum_rbln(directory: Path, budget: str) -> None:
    assert_set(optimum_here("--set-memory-budget", budget, "--model-id", directory), directory, 24)
    assert_set(optimum_here("--set-memory-budget=100%", "--model-id", directory), directory, 32)


@pytest.mark.parametrize("spelling", [["--output-dir", "{}"], ["--output-dir={}"]])
@pytest.mark.parametrize("command", ["reblock", "optimum"])
def test_set_with_an_output_directory_leaves_the_source(
    directory: Path, tmp_path: Path, spelling: list[str], command: str
) -> None:
    before, out = fingerprint(directory), tmp_path / "out"
    options = [text.format(out) for text in spelling]
    if command == "reblock":
        result = reblock("set", directory, "20", *options)
    else:
        result = optimum("--set-kvcache-num-blocks", "20", "--model-id", directory, *options)
    assert_set(result, out, 20)
    assert f"written to          {out}" in result.stdout
    assert fingerprint(directory) == before


@pytest.mark.parametrize(
    "order",
    [
        ["{dir}", "20", "--output-dir", "{out}"],
        ["{dir}", "--output-dir", "{out}", "20"],
        ["--output-dir", "{out}", "{dir}", "20"],
        ["{dir}", "--output-dir={out}", "--", "20"],
        ["--output-dir={out}", "--", "{dir}", "20"],
    ],
)
def test_set_takes_options_anywhere(directory: Path, tmp_path: Path, order: list[str]) -> None:
    out = tmp_path / "out"
    assert_set(reblock_here("set", *(t.format(dir=directory, out=out) for t in order)), out, 20)


def test_set_dry_run_writes_nothing(directory: Path, tmp_path: Path) -> None:
    before = fingerprint(tmp_path)
    result = reblock_here("set", directory, "20", "--dry-run")
    assert result.returncode == 0
    assert "16 -> 20" in result.stdout
    assert "dry run, nothing was written" in result.stdout
    assert fingerprint(tmp_path) == before
    assert reblock_here("set", directory, "8", "--dry-run").returncode == 3


def test_set_to_the_same_count_says_that_nothing_changed(directory: Path) -> None:
    result = reblock_here("set", directory, "16")
    assert result.stdout.startswith("kvcache_num_blocks  16, unchanged\n")
    assert "written" not in result.stdout


def test_set_json_prints_one_object(directory: Path, budget: str) -> None:
    result = reblock_here("set", directory, "--memory-budget", budget, "--json")
    assert json.loads(result.stdout) == {
        "directory": str(directory),
        "module": None,
        "output_dir": None,
        "is_dry_run": False,
        "is_written": True,
        "kvcache_num_blocks_before": 16,
        "kvcache_num_blocks": 24,
        "kv_bytes_before": 64 * BYTES_PER_BLOCK,
        "kv_bytes": 96 * BYTES_PER_BLOCK,
        "budget_bytes": int(budget),
        "limited_by": "budget",
        "next_block_budget_bytes": int(budget) + 8 * BYTES_PER_BLOCK,
        "warnings": [],
    }


def test_set_above_the_full_count_warns_and_proceeds(directory: Path) -> None:
    result = reblock_here("set", directory, "33")
    assert result.returncode == 0
    assert result.stderr.startswith("warning: 33 blocks are more than the 32 ")
    assert read_num_blocks(str(directory)) == 33


def test_set_from_inside_the_artifact_says_to_enter_it_again(directory: Path) -> None:
    result = reblock_here("set", ".", "20", cwd=directory)
    assert result.returncode == 0
    assert "note: this directory was replaced" in result.stderr
    assert read_num_blocks(str(directory)) == 20


@pytest.mark.parametrize(
    ("count", "code", "message"),
    [
        ("0", 2, "kvcache_num_blocks='0'"),
        ("-1", 2, "kvcache_num_blocks='-1'"),
        ("1e3", 2, "kvcache_num_blocks='1e3'"),
        ("20.0", 2, "kvcache_num_blocks='20.0'"),
        (" 20", 2, "kvcache_num_blocks=' 20'"),
        ("1_0", 2, "kvcache_num_blocks='1_0'"),
        ("١٦", 2, "kvcache_num_blocks="),
        ("2147483648", 2, "2,147,483,647"),
        ("9" * 5_000, 2, "2,147,483,647"),
        ("", 2, "kvcache_num_blocks=''"),
        ("8", 3, "below the 9 blocks"),
    ],
)
def test_set_to_a_bad_count_changes_nothing(
    directory: Path, count: str, code: int, message: str
) -> None:
    before = fingerprint(directory)
    assert_refused(reblock_here("set", directory, count), code, message)
    assert_refused(
        optimum_here(f"--set-kvcache-num-blocks={count}", "--model-id", directory), code, message
    )
    assert fingerprint(directory) == before


@pytest.mark.parametrize(
    ("budget", "code", "message"),
    [
        ("0", 2, "memory_budget"),
        ("nan", 2, "memory_budget"),
        ("1.5", 2, "memory_budget"),
        ("10G", 2, "unit"),
        ("", 2, "memory_budget"),
        ("1000TB", 3, "available"),
        ("1MB", 3, "smallest budget that works is"),
        ("1", 3, "write 1.0 or 100%"),
    ],
)
def test_set_to_a_bad_budget_changes_nothing(
    directory: Path, budget: str, code: int, message: str
) -> None:
    before = fingerprint(directory)
    assert_refused(reblock_here("set", directory, f"--memory-budget={budget}"), code, message)
    assert_refused(
        optimum_here(f"--set-memory-budget={budget}", "--model-id", directory), code, message
    )
    assert fingerprint(directory) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["20", "--memory-budget", "50%"], "not allowed with"),
        (["--memory-budget", "50%", "20"], "not allowed with"),
        ([], "required"),
        (["20", "21"], "unrecognized arguments: 21"),
        (["20", "--force"], "unrecognized arguments: --force"),
        (["20", "--output-dir"], "expected one argument"),
        (["20", "--output-dir="], "the value is empty"),
        (["20", "--output-dir", ""], "the value is empty"),
        (["20", "--output", "b"], "unrecognized arguments: --output b"),
        (["20", "--output-dir", "b", "--output-dir", "c"], "given twice"),
        (["20", "--output_dir", "b"], "unrecognized arguments"),
        (["20", "--dry"], "unrecognized arguments: --dry"),
    ],
)
def test_set_with_bad_options_changes_nothing(
    directory: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = fingerprint(tmp_path)
    assert_refused(reblock_here("set", directory, *arguments, cwd=tmp_path), 2, message)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    ("output_dir", "code", "message"),
    [
        ("artifact", 2, "is the source itself"),
        ("./artifact/", 2, "is the source itself"),
        ("link", 2, "is the source itself"),
        ("artifact/new", 2, "lies inside the source"),
        ("link/new", 2, "lies inside the source"),
        ("full", 1, "not an empty directory"),
        ("full/file", 1, "not an empty directory"),
        ("full/file/below", 1, "nothing was changed"),
    ],
)
def test_set_to_a_bad_destination_changes_nothing(
    directory: Path, tmp_path: Path, output_dir: str, code: int, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "link").symlink_to("artifact")
    before = fingerprint(tmp_path)
    result = reblock_here("set", "artifact", "20", "--output-dir", output_dir, cwd=tmp_path)
    assert_refused(result, code, message)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["-1"], 2), (["8"], 3), (["--memory-budget", "1MB"], 3), (["20", "--output-dir="], 2)],
)
def test_a_refused_set_exits_with_its_code(
    directory: Path, arguments: list[str], code: int
) -> None:
    before = fingerprint(directory)
    assert_refused(reblock("set", directory, *arguments), code)
    assert fingerprint(directory) == before


def test_set_of_an_eager_artifact_exits_with_4_and_changes_nothing(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=4, attn_impl="eager")
    before = fingerprint(directory)
    assert_refused(reblock_here("set", directory, "8"), 4, "can be resized")
    assert fingerprint(directory) == before


def test_set_previous_goes_back_and_forth(directory: Path, tmp_path: Path) -> None:
    result = reblock_here("set", directory, "--previous")
    assert_refused(result, 2, "was never changed")
    assert reblock_here("set", directory, "20").returncode == 0
    for before, after in ((20, 16), (16, 20)):
        result = reblock_here("set", directory, "--previous")
        assert result.returncode == 0
        assert f"{before} -> {after}" in result.stdout
    copy = tmp_path / "copy"
    assert reblock_here("set", directory, "--previous", "--output-dir", copy).returncode == 0
    assert reblock_here("get", copy).stdout == "16\n"
    assert reblock_here("get", directory).stdout == "20\n"
    for other in (["24"], ["--memory-budget", "80%"]):
        assert reblock_here("set", directory, "--previous", *other).returncode == 2
    report = json.loads(reblock_here("inspect", directory, "--json").stdout)
    assert report["previous_kvcache_num_blocks"] == 16
    assert "before the last change" in reblock_here("inspect", directory).stdout


def test_set_copy_shares_nothing_and_needs_an_output_directory(
    directory: Path, tmp_path: Path
) -> None:
    os.truncate(directory / "weights.safetensors", 16 * 2**20 + 1)
    record_checksums(directory)
    assert_refused(reblock_here("set", directory, "20", "--copy"), 2, "--copy needs --output-dir")
    shared, own = tmp_path / "shared", tmp_path / "own"
    assert reblock_here("set", directory, "20", "--output-dir", shared).returncode == 0
    result = reblock_here("set", directory, "20", "--output-dir", own, "--copy")
    assert result.returncode == 0
    assert "copying weights.safetensors: done in" in result.stderr
    weights = directory / "weights.safetensors"
    assert weights.stat().st_nlink == (1 if has_clones(tmp_path) else 2)
    assert (own / "weights.safetensors").stat().st_nlink == 1
    assert (own / "weights.safetensors").read_bytes() == weights.read_bytes()


def has_clones(place: Path) -> bool:
    """Whether files of this file system can share their blocks."""
    with open(place / "a", "wb") as first, open(place / "b", "wb") as second:
        first.write(b"content")
        first.flush()
        return clone(first.fileno(), second.fileno())
