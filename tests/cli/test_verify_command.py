"""`reblock verify`: what it prints, its exit code, and what it needs none of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commands import HELPERS, assert_refused, reblock, reblock_here

from artifacts import make_artifact

if TYPE_CHECKING:
    from pathlib import Path

OPTIMUM_RBLN = os.path.join(HELPERS, "data", "optimum_rbln_0_12", "llama2_7b_flash_ca22")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "a", num_blocks=16)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_prints_one_line_for_every_check(directory: Path) -> None:
    result = reblock("verify", directory, "--quick")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "ok       configuration      16 blocks of 256 tokens",
        "ok       programs           prefill, decoder_batch_4, decoder_batch_1",
        "ok       memory plan        65.10 MiB on each device",
        "ok       program checksums  3 files",
        "ok       weights size       16.00 KiB",
        "skipped  weights checksum   a quick check leaves it out",
        "ok       previous count     none, as the count was never changed",
        "skipped  memory             a quick check leaves it out",
        f"verified, with 2 checks skipped: {directory}",
    ]
    assert result.stderr == ""


def test_a_failed_check_is_told_with_the_file_and_exit_code_4(directory: Path) -> None:
    flip_last_byte(directory / "weights.safetensors")
    (directory / ".reblock.json").write_text("{")
    result = reblock("verify", directory)
    assert result.returncode == 4
    lines = result.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAILED ")]
    assert [line.split("  ")[1].strip() for line in failed] == [
        "weights checksum",
        "previous count",
    ]
    assert f"{directory}/weights.safetensors: its content is not what was compiled" in failed[0]
    assert lines[-1] == f"2 checks failed: {directory}"
    assert "Traceback" not in result.stderr
    assert "error" not in result.stderr


def test_a_quick_check_passes_over_weights_of_the_right_size(directory: Path) -> None:
    flip_last_byte(directory / "weights.safetensors")
    assert reblock_here("verify", "--quick", directory).returncode == 0
    assert reblock_here("verify", directory).returncode == 4


@pytest.mark.parametrize("is_damaged", [False, True])
def test_json_is_one_object_with_every_check(directory: Path, is_damaged: bool) -> None:
    if is_damaged:
        os.truncate(directory / "prefill.rbln", 1_000)
    result = reblock_here("verify", "--quick", "--json", directory)
    assert result.returncode == (4 if is_damaged else 0)
    report = json.loads(result.stdout)
    checks = report.pop("checks")
    assert report == {
        "directory": str(directory),
        "is_quick": True,
        "is_ok": not is_damaged,
        "kvcache_num_blocks": 16,
    }
    assert [list(check) for check in checks] == [["name", "outcome", "detail"]] * 8
    assert all(isinstance(text, str) and text for check in checks for text in check.values())
    failed = [check["name"] for check in checks if check["outcome"] == "failed"]
    assert failed == (["programs", "program checksums"] if is_damaged else [])


def test_json_of_a_configuration_that_cannot_be_read_has_no_count(directory: Path) -> None:
    (directory / "rbln_config.json").write_text("{}")
    result = reblock_here("verify", "--json", directory)
    assert result.returncode == 4
    assert json.loads(result.stdout)["kvcache_num_blocks"] is None


def test_an_artifact_of_optimum_rbln_is_checked_as_far_as_it_goes() -> None:
    result = reblock("verify", OPTIMUM_RBLN)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok       configuration ")
    assert lines[-1] == f"verified, with 6 checks skipped: {OPTIMUM_RBLN}"


def test_what_is_no_artifact_is_an_error(tmp_path: Path) -> None:
    assert_refused(reblock_here("verify", tmp_path), 4, "holds no rbln_config.json")
    assert_refused(reblock_here("verify", tmp_path / "absent"), 4, "does not exist")


def test_a_resized_copy_is_as_right_as_its_original(directory: Path, tmp_path: Path) -> None:
    assert reblock_here("set", directory, "24", "--output-dir", tmp_path / "b").returncode == 0
    for path, num_blocks in ((directory, 16), (tmp_path / "b", 24)):
        report = json.loads(reblock_here("verify", "--quick", "--json", path).stdout)
        assert (report["is_ok"], report["kvcache_num_blocks"]) == (True, num_blocks)


def test_verify_changes_nothing_and_needs_no_right_to_write(directory: Path) -> None:
    before = {entry.name: entry.stat().st_mtime_ns for entry in directory.iterdir()}
    directory.chmod(0o555)
    assert reblock("verify", "--quick", directory).returncode == 0
    assert {entry.name: entry.stat().st_mtime_ns for entry in directory.iterdir()} == before
    directory.chmod(0o755)


def test_verify_itself_never_loads_torch(directory: Path) -> None:
    code = (
        "import sys; from reblock.cli.main import main\n"
        "assert main(['verify', '--quick', sys.argv[1]]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    result = run_python(code, directory)
    assert result.returncode == 0, result.stderr


def run_python(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
