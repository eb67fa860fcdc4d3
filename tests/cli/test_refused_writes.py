"""Edits in unusual places: full and read-only disks, mount points, foreign directories."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from commands import assert_refused, run, run_in_namespace

from artifacts import fingerprint, make_artifact

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

NOBODY = 65534

# Each script mounts something, runs a command, and prints what came of it as JSON.
PREAMBLE = """
import json, os, pathlib, subprocess, sys
from artifacts import fingerprint, make_artifact
from commands import reblock

place = pathlib.Path(sys.argv[1])

def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)

def edit(directory, *options):
    before = fingerprint(place)
    result = reblock("set", directory, "20", *options)
    same = fingerprint(place) == before
    return {"code": result.returncode, "stderr": result.stderr, "is_same": same,
            "stdout": result.stdout, "count": reblock("get", directory).stdout}
"""

FULL_DISK = """
mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", place)
artifact = make_artifact(place / "artifact", num_blocks=16)
with open(place / "filler", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
size = os.path.getsize(place / "filler")
os.truncate(place / "filler", size - int(sys.argv[2]) * 4096)
print(json.dumps([edit(artifact), edit(artifact, "--output-dir", place / "out")]))
"""

READ_ONLY = """
artifact = make_artifact(place / "artifact", num_blocks=16)
mount("--bind", place, place)
mount("-o", "remount,ro,bind", place)
print(json.dumps([edit(artifact), edit(artifact, "--output-dir", place / "out")]))
"""

MOUNT_POINT = """
artifact = place / "artifact"
make_artifact(place / "original", num_blocks=16)
artifact.mkdir()
mount("--bind", place / "original", artifact)
in_place = edit(artifact)
in_place["names"] = sorted(os.listdir(artifact))
copied = edit(artifact, "--output-dir", place / "out")
copied["count"] = reblock("get", place / "out").stdout
print(json.dumps([in_place, copied]))
"""


def outcomes(script: str, *arguments: str | Path) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(run_in_namespace(PREAMBLE + script, *arguments))
    return result


def test_a_disk_that_is_full_from_the_start_leaves_the_artifact(tmp_path: Path) -> None:
    for outcome in outcomes(FULL_DISK, tmp_path, "0"):
        assert outcome["code"] == 1
        assert outcome["is_same"]
        assert "No space left on device" in outcome["stderr"]
        assert "nothing was changed" in outcome["stderr"]
        assert outcome["count"] == "16\n"


def test_a_disk_that_fills_up_on_the_way_leaves_the_artifact(tmp_path: Path) -> None:
    for outcome in outcomes(FULL_DISK, tmp_path, "2"):
        assert outcome["code"] == 1
        assert outcome["is_same"]
        assert "No space left on device" in outcome["stderr"]
        assert outcome["count"] == "16\n"


def test_a_disk_with_just_enough_room_is_enough(tmp_path: Path) -> None:
    in_place, _ = outcomes(FULL_DISK, tmp_path, "8")
    assert in_place["code"] == 0, in_place["stderr"]
    assert in_place["count"] == "20\n"


def test_a_read_only_file_system_leaves_the_artifact_and_lets_it_be_read(tmp_path: Path) -> None:
    for outcome in outcomes(READ_ONLY, tmp_path):
        assert outcome["code"] == 1
        assert outcome["is_same"]
        assert "Read-only file system" in outcome["stderr"]
        assert outcome["count"] == "16\n"


def test_a_mount_point_is_edited_in_place_and_can_be_copied(tmp_path: Path) -> None:
    in_place, copied = outcomes(MOUNT_POINT, tmp_path)
    assert in_place["code"] == 0, in_place["stderr"]
    assert in_place["stderr"] == ""
    assert in_place["count"] == "20\n"
    assert ".reblock.json" in in_place["names"]
    assert ".reblock-edit" not in in_place["names"]
    assert copied["code"] == 0, copied["stderr"]
    assert copied["count"] == "20\n"


# Root without the right to overrule permissions, which is how anybody else meets them.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown")


@pytest.fixture
def foreign_artifact(tmp_path: Path) -> Path:
    """An artifact of another user, in a directory of that user."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to give files away, and setpriv, to do without root's rights")
    if run("reblock", "--version", prefix=UNPRIVILEGED).returncode != 0:
        pytest.skip("this system does not let root lay down its rights")
    directory = make_artifact(tmp_path / "place" / "artifact", num_blocks=16)
    for path in (directory.parent, directory, *directory.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    return directory


@pytest.mark.parametrize("mode_of_the_parent", [0o755, 0o777])
def test_an_artifact_of_somebody_else_is_left_as_it_is(
    foreign_artifact: Path, mode_of_the_parent: int
) -> None:
    foreign_artifact.parent.chmod(mode_of_the_parent)
    before = fingerprint(foreign_artifact.parent)
    assert run("reblock", "get", foreign_artifact, prefix=UNPRIVILEGED).stdout == "16\n"
    result = run("reblock", "set", foreign_artifact, "20", prefix=UNPRIVILEGED)
    assert_refused(result, 1, "Permission denied", "nothing was changed", "--output-dir")
    assert fingerprint(foreign_artifact.parent) == before


def test_an_artifact_of_somebody_else_can_be_copied(foreign_artifact: Path, tmp_path: Path) -> None:
    before, out = fingerprint(foreign_artifact), tmp_path / "out"
    options = ["20", "--output-dir", str(out)]
    result = run("reblock", "set", foreign_artifact, *options, prefix=UNPRIVILEGED)
    assert result.returncode == 0, result.stderr
    assert run("reblock", "get", out).stdout == "20\n"
    assert {path.stat().st_uid for path in (out, *out.iterdir())} == {0}
    assert fingerprint(foreign_artifact) == before


def test_an_artifact_that_everybody_may_write_is_edited_by_somebody_else(
    foreign_artifact: Path,
) -> None:
    for path in (foreign_artifact.parent, foreign_artifact, *foreign_artifact.iterdir()):
        path.chmod(0o777 if path.is_dir() else 0o644)
    result = run("reblock", "set", foreign_artifact, "20", prefix=UNPRIVILEGED)
    assert result.returncode == 0, result.stderr
    assert run("reblock", "get", foreign_artifact).stdout == "20\n"
    assert [path.name for path in foreign_artifact.parent.iterdir()] == ["artifact"]


@pytest.fixture
def own_artifact(tmp_path: Path) -> Path:
    """An artifact of one's own, in a directory of one's own."""
    if os.geteuid() == 0 and (
        shutil.which("setpriv") is None
        or run("reblock", "--version", prefix=UNPRIVILEGED).returncode != 0
    ):
        pytest.skip("this system does not let root lay down its rights")
    return make_artifact(tmp_path / "place" / "artifact", num_blocks=16)


def as_a_user(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("reblock", *arguments, prefix=UNPRIVILEGED if os.geteuid() == 0 else ())


def test_a_read_only_directory_inside_leaves_no_stage(own_artifact: Path) -> None:
    (own_artifact / "sub" / "inner").mkdir(parents=True)
    (own_artifact / "sub" / "inner" / "file").write_text("mine")
    for directory in (own_artifact / "sub" / "inner", own_artifact / "sub"):
        directory.chmod(0o555)
    result = as_a_user("set", own_artifact, "20")
    assert (result.returncode, result.stderr) == (0, "")
    assert os.listdir(own_artifact.parent) == ["artifact"]
    os.mkfifo(own_artifact / "zzz")
    assert_refused(as_a_user("set", own_artifact, "24"), 1, "neither a file")
    assert os.listdir(own_artifact.parent) == ["artifact"]
    assert run("reblock", "get", own_artifact).stdout == "20\n"


def test_a_directory_that_may_not_be_searched_is_not_called_empty(own_artifact: Path) -> None:
    for closed in (own_artifact, own_artifact.parent):
        closed.chmod(0)
        for arguments in (["get", own_artifact], ["set", own_artifact, "20"]):
            assert_refused(as_a_user(*arguments), 1, "Permission denied")
        closed.chmod(0o755)
