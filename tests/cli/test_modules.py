"""The commands started as modules, which works whatever scripts are on the PATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from artifacts import make_artifact

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    "arguments",
    [
        ["reblock", "get", "artifact"],
        [
            "reblock.cli.optimum_rbln",
            "--get-kvcache-num-blocks",
            "--model-id",
            "artifact",
        ],
    ],
)
def test_a_module_runs_like_its_script(arguments: list[str], tmp_path: Path) -> None:
    make_artifact(tmp_path / "artifact", num_blocks=16)
    done = run_module(arguments, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "16\n", "")


@pytest.mark.parametrize("module", ["reblock", "reblock.cli.optimum_rbln"])
def test_a_module_passes_the_exit_code_on(module: str, tmp_path: Path) -> None:
    assert run_module([module, "--no-such-option"], tmp_path).returncode == 2


def test_the_command_reference_is_what_the_parsers_say() -> None:
    script = ROOT / "scripts" / "cli_reference.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def run_module(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        check=False,
    )
