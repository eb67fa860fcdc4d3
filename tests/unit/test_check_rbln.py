"""The script for machines with an NPU, as far as it goes with the stand-in for the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts import fingerprint
from rbln_artifacts import DATA, FLASH, LLAMA2_EAGER, QWEN3_CR13, STANDIN, make_vision_language

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_rbln.py"


def check(directory: Path, *options: str, path: str = str(STANDIN)) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=120,
        check=False,
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout.splitlines()


@pytest.mark.parametrize("name", FLASH)
def test_every_step_succeeds_on_an_artifact_that_is_in_order(name: str) -> None:
    before = fingerprint(DATA / name)
    code, lines = check(DATA / name)
    assert code == 0, lines
    outcomes = [line.split()[0] for line in lines]
    assert outcomes[:6] == ["ok"] * 6
    assert set(outcomes[6:8]) <= {"ok", "skipped"}
    assert lines[-1] == "all is as expected"
    assert fingerprint(DATA / name) == before


def test_a_module_is_checked_and_the_copy_kept(tmp_path: Path) -> None:
    directory = make_vision_language(tmp_path / "a")
    kept = tmp_path / "kept"
    kept.mkdir()
    code, lines = check(directory, "--module", "language_model", "--keep", str(kept))
    assert code == 0, lines
    assert (kept / "copy" / "vision_tower").is_dir()


def test_what_fails_is_said(tmp_path: Path) -> None:
    code, lines = check(DATA / LLAMA2_EAGER)
    assert (code, lines[-1]) == (1, "1 of 2 steps failed")
    assert lines[1].startswith("FAILED   copy")
    empty = tmp_path / "rebel"
    empty.mkdir()
    (empty / "__init__.py").write_text("raise ImportError('not for this machine')")
    code, lines = check(DATA / QWEN3_CR13, path=str(tmp_path))
    assert (code, lines[-1]) == (1, "1 of 1 steps failed")
