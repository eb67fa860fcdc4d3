"""`reblock get` and `optimum-rbln-cli --get-kvcache-num-blocks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commands import assert_refused, optimum, optimum_here, reblock, reblock_here

import reblock as reblock_package
from artifacts import make_artifact

if TYPE_CHECKING:
    from pathlib import Path

OPTIMUM_RBLN = os.path.join(os.path.dirname(__file__), "..", "data", "optimum_rbln_0_12")


def test_get_prints_the_number_alone(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=21)
    for result in (
        reblock("get", directory),
        optimum("--get-kvcache-num-blocks", "--model-id", directory),
        optimum(f"--model-id={directory}", "--get-kvcache-num-blocks"),
    ):
        assert (result.returncode, result.stdout, result.stderr) == (0, "21\n", "")


def test_get_reads_what_optimum_rbln_wrote() -> None:
    result = reblock("get", os.path.join(OPTIMUM_RBLN, "qwen3_8b_cr13"))
    assert (result.returncode, result.stdout) == (0, "107\n")


def test_get_json_prints_one_object(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=21)
    result = reblock("get", directory, "--json")
    assert json.loads(result.stdout) == {
        "directory": str(directory),
        "module": None,
        "kvcache_num_blocks": 21,
    }


def test_get_in_this_process_prints_the_same(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a", num_blocks=21)
    assert reblock_here("get", directory).stdout == "21\n"
    assert (
        reblock_here("get", directory, "--json").stdout
        == reblock("get", directory, "--json").stdout
    )
    assert optimum_here("--get-kvcache-num-blocks", "--model-id", directory).stdout == "21\n"


def test_get_of_no_artifact_exits_with_4(tmp_path: Path) -> None:
    assert_refused(reblock("get", tmp_path / "absent"), 4, "does not exist")
    assert_refused(optimum("--get-kvcache-num-blocks", "--model-id", tmp_path), 4, "holds no")


def test_get_with_an_output_directory_is_refused(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    result = optimum("--get-kvcache-num-blocks", "--model-id", directory, "--output-dir", "b")
    assert_refused(result, 2, "--output-dir goes with")


@pytest.mark.parametrize(
    "arguments",
    [
        ["reblock.cli.main", "get", "{}"],
        ["reblock.cli.main", "set", "{}", "20"],
        ["reblock.cli.main", "set", "{}", "--memory-budget", "50%"],
        ["reblock.cli.optimum_rbln", "--get-kvcache-num-blocks", "--model-id", "{}"],
        ["reblock.cli.optimum_rbln", "--set-kvcache-num-blocks", "20", "--model-id", "{}"],
        ["reblock.cli.optimum_rbln", "--set-memory-budget", "50%", "--model-id", "{}"],
    ],
)
def test_get_and_set_import_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    directory = make_artifact(tmp_path / "a")
    module, *argv = [text.format(directory) for text in arguments]
    loaded = modules_after(module, argv)
    assert loaded.isdisjoint({"torch", "transformers", "rich", "numpy", "huggingface_hub"})
    # Not the other commands either.
    assert "reblock.cli.inspect" not in loaded
    assert "reblock.cli.generate" not in loaded
    assert "reblock.cli.compile" not in loaded


@pytest.mark.parametrize(
    "arguments",
    [
        ["reblock.cli.main", "get", "{}"],
        ["reblock.cli.optimum_rbln", "--get-kvcache-num-blocks", "--model-id", "{}"],
    ],
)
def test_get_does_without_the_slower_parts_of_the_standard_library(
    tmp_path: Path, arguments: list[str]
) -> None:
    directory = make_artifact(tmp_path / "a")
    module, *argv = [text.format(directory) for text in arguments]
    loaded = modules_after(module, argv)
    slow = {"dataclasses", "typing", "inspect", "pathlib", "shutil", "zipfile", "fractions"}
    assert loaded.isdisjoint(slow)


def modules_after(module: str, argv: list[str]) -> set[str]:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        f"from {module} import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print('\\n'.join(set(sys.modules) - before))\n"
    )
    # -S: what the site packages of a developer's environment import is not ours.
    source = os.path.dirname(os.path.dirname(reblock_package.__file__))
    result = subprocess.run(
        [sys.executable, "-S", "-c", code, *argv],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
        timeout=60,
        check=True,
    )
    return set(result.stdout.splitlines())
