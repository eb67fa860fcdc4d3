"""What a killed edit left is removed by whoever may; what looks like it and is not, stays."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from bench import VERIFY, places
from tracing import CommandServer, need_strace
from trees import NEW, OLD, clear, copy_tree, differences, listing, make_small_artifact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench import Way
    from tracing import Call

_SOMEBODY_ELSE = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return make_small_artifact(tmp_path / "parent" / "artifact")


def test_what_only_looks_like_a_left_over_stays(artifact: Path, tmp_path: Path) -> None:
    parent, precious = artifact.parent, tmp_path / "precious"
    for directory in (
        precious,
        parent / ".artifact.reblock-00000001",  # without a marker
        parent / ".artifact.reblock-00000002",
        parent / ".artifact.reblock-00000003",
        parent / ".artifact.reblock-12345",
    ):
        directory.mkdir()
        (directory / "data").write_text("precious")
    (parent / ".artifact.reblock-00000002.lock").write_text("a marker is empty")
    (parent / ".artifact.reblock-00000003.lock").symlink_to(precious / "data")
    (parent / ".artifact.reblock-00000004.lock").mkdir()
    (parent / ".artifact.reblock-00000005.lock").touch()
    (parent / ".artifact.reblock-00000005").symlink_to(precious)
    (parent / ".artifact.reblock-12345.lock").touch()
    (parent / "artifact.reblock-00000006.lock").touch()
    os.mkfifo(parent / ".artifact.reblock-00000007.lock")
    before = listing(parent)
    with CommandServer(tmp_path) as server:
        for command in (("get",), VERIFY, ("set", "--json")):
            argv = (command[0], artifact, *command[1:])
            result = server.run(*argv, *([str(NEW)] if command[0] == "set" else []))
            assert result.code == 0, result.stderr
    assert (precious / "data").read_text() == "precious"
    after = {path: entry for path, entry in listing(parent).items() if "artifact/" not in path}
    expected = {path: entry for path, entry in before.items() if "artifact/" not in path}
    gone = [line for line in differences(after, expected) if "00000005" not in line]
    assert gone == []


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_something_else_of_the_name_of_a_journal_stays_and_is_read_past(
    artifact: Path, tmp_path: Path, kind: str
) -> None:
    journal = artifact / ".reblock-edit"
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    if kind == "file":
        journal.write_text("mine")
    elif kind == "link":
        journal.symlink_to(tmp_path / "elsewhere")
    else:
        (journal / "mine").mkdir(parents=True)
    before = listing(tmp_path)
    with CommandServer(tmp_path / "elsewhere") as server:
        for command in (("get",), VERIFY, ("inspect",)):
            result = server.run(*command, artifact)
            assert result.code == 0, (command, result.stderr)
        result = server.run("set", artifact, str(NEW))
    assert (result.code, result.stdout) == (1, "")
    assert f"{str(journal)!r} is in the way" in result.stderr
    assert differences(listing(tmp_path), before) == []


@pytest.mark.parametrize("way", ["exchange", "output-dir"])
def test_an_edit_that_is_under_way_is_left_alone(tmp_path: Path, way: Way) -> None:
    with places(tmp_path, way) as (place, other), ThreadPoolExecutor(1) as pool:
        commit = next(call for call in place.calls if call.name.startswith("rename"))
        place.reset()
        edit = pool.submit(place.server.delay_at, commit, 2.0, *place.edit)
        while not edit.done():
            result = other.server.run("get", place.artifact)
            assert (result.code, result.stdout) in [(0, f"{OLD}\n"), (0, f"{NEW}\n")]
        assert edit.result().code == 0, edit.result().stderr
        assert place.get() == NEW
        place.expect_end(NEW, "after an edit with readers beside it")


@pytest.fixture
def open_base() -> Iterator[Path]:
    """A directory with an artifact that everybody may change, which `tmp_path` cannot hold."""
    need_strace()
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with TemporaryDirectory(prefix="reblock-tests-") as name:
        base = Path(name)
        base.chmod(0o777)
        (base / "parent").mkdir()
        make_small_artifact(base / "template")
        yield base


@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("who_is_killed", ["root", "another"])
def test_what_is_left_of_the_edit_of_another_user_is_read_past(
    open_base: Path, who_is_killed: str, mode: int
) -> None:
    artifact = open_base / "parent" / "artifact"
    with CommandServer(open_base) as root, CommandServer(open_base, prefix=_SOMEBODY_ELSE) as other:
        killer, reader = (root, other) if who_is_killed == "root" else (other, root)
        for call in _some_calls_of_an_edit(killer, open_base, mode):
            _put_back(open_base, mode)
            killer.kill_at(call, "set", artifact, str(NEW))
            for server in (reader, killer):
                result = server.run("get", artifact)
                assert (result.code, result.stderr) == (0, ""), str(call)
                assert result.stdout in (f"{OLD}\n", f"{NEW}\n")
            assert os.listdir(open_base / "parent") == ["artifact"], str(call)
            result = reader.run("set", artifact, str(NEW))
            assert result.code == 0, result.stderr


def _put_back(base: Path, mode: int) -> None:
    clear(base / "parent")
    copy_tree(base / "template", base / "parent" / "artifact")
    for path in [base / "parent", *(base / "parent").rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o777)
    (base / "parent").chmod(mode)


def _some_calls_of_an_edit(server: CommandServer, base: Path, mode: int) -> list[Call]:
    """Return some calls of an edit: not all, as another test kills it at each."""
    _put_back(base, mode)
    calls, outcome = server.record("set", base / "parent" / "artifact", str(NEW))
    assert outcome.code == 0, outcome.stderr
    return calls[:: max(1, len(calls) // 8)]
