"""Directories that are built beside their target and put in place in one step."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest

from artifacts import fingerprint
from reblock.artifact.transaction import check_destination
from reblock.artifact.transaction import stage as stage_module
from reblock.artifact.transaction.stage import remove_dead_stages, stage_beside
from reblock.errors import DestinationExists, EditFailed, InvalidDestination, ReblockError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "sub").mkdir(parents=True)
    (directory / "file").write_text("file")
    (directory / "sub" / "inner").write_text("inner")
    (directory / "script").write_text("#!")
    (directory / "script").chmod(0o751)
    (tmp_path / "outside").write_text("outside")
    (directory / "link").symlink_to("sub/inner")
    (directory / "out").symlink_to("../outside")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "up").symlink_to("..")
    return directory


def unchecked(place: str) -> None:
    """Take the place of a check of what is replaced."""


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_commit_replace_puts_the_stage_in_place_and_removes_the_old(
    source: Path, tmp_path: Path
) -> None:
    before = names(tmp_path)
    with stage_beside(str(source)) as stage:
        assert os.path.dirname(stage.path) == str(tmp_path)
        assert os.path.basename(stage.path).startswith(".source.reblock-")
        with open(os.path.join(stage.path, "new"), "w") as file:
            file.write("new")
        stage.commit_replace(unchecked)
    assert names(source) == ["new"]
    assert names(tmp_path) == before


def test_a_stage_that_is_not_committed_leaves_nothing(source: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    with stage_beside(str(source)) as stage:
        (tmp_path / os.path.basename(stage.path) / "new").touch()
    assert names(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stage_is_removed_after_any_exception(
    source: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    before = names(tmp_path)
    with pytest.raises(error), stage_beside(str(source / "a" / "b" / "new")):
        raise error
    assert names(tmp_path) == before
    assert "a" not in names(source)


def test_an_os_error_in_a_stage_becomes_an_edit_failed_that_says_where(
    source: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(EditFailed, match="nothing was changed: /full: No space left") as caught,
        stage_beside(str(source)),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/full")
    assert caught.value.path == "/full"


def test_an_os_error_after_the_commit_does_not_claim_that_nothing_changed(source: Path) -> None:
    def commit_and_fail() -> None:
        with stage_beside(str(source)) as stage:
            stage.commit_replace(unchecked)
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ReblockError, match="was written") as caught:
        commit_and_fail()
    assert not isinstance(caught.value, EditFailed)


def test_a_stage_takes_the_mode_of_the_directory_it_replaces(source: Path) -> None:
    source.chmod(0o2750)
    with stage_beside(str(source)) as stage:
        stage.commit_replace(unchecked)
    assert stat.S_IMODE(source.stat().st_mode) == 0o2750


def test_commit_new_makes_the_directories_above_it(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "new"
    with stage_beside(str(target)) as stage:
        stage.commit_new()
    assert names(target) == []


def test_commit_new_replaces_an_empty_directory_only(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with stage_beside(str(empty)) as stage:
        (tmp_path / os.path.basename(stage.path) / "new").touch()
        stage.commit_new()
    assert names(empty) == ["new"]
    with pytest.raises(DestinationExists), stage_beside(str(empty)) as stage:
        stage.commit_new()
    assert names(empty) == ["new"]
    assert names(tmp_path) == ["empty"]


def test_commit_new_over_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DestinationExists), stage_beside(str(tmp_path / "file")) as stage:
        stage.commit_new()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_symbolic_link_as_target_stays_and_what_it_leads_to_is_replaced(
    source: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(source)
    with stage_beside(str(elsewhere / "link")) as stage:
        assert os.path.dirname(stage.path) == str(tmp_path)
        stage.commit_replace(unchecked)
    assert (elsewhere / "link").is_symlink()
    assert names(source) == []


@pytest.mark.parametrize("destination", ["source", "source/", "source/new", "source/sub", "link"])
def test_check_destination_refuses_the_source_and_what_lies_inside(
    source: Path, tmp_path: Path, destination: str
) -> None:
    (tmp_path / "link").symlink_to("source")
    with pytest.raises(InvalidDestination):
        check_destination(f"{tmp_path}/{destination}", source=str(source))


@pytest.mark.parametrize("destination", ["file", "full", "link"])
def test_check_destination_refuses_what_is_there_already(
    source: Path, tmp_path: Path, destination: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("full")
    with pytest.raises(DestinationExists, match=destination):
        check_destination(str(tmp_path / destination), source=str(source))


@pytest.mark.parametrize("destination", ["new", "empty", "source2", "dangling"])
def test_check_destination_allows_a_new_or_empty_directory_beside_the_source(
    source: Path, tmp_path: Path, destination: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("later")
    check_destination(str(tmp_path / destination), source=str(source))


def test_check_destination_refuses_an_empty_text() -> None:
    with pytest.raises(InvalidDestination, match="empty"):
        check_destination("", source=None)


def test_a_stage_has_a_marker_that_is_removed_last(source: Path, tmp_path: Path) -> None:
    with stage_beside(str(source)) as stage:
        marker = tmp_path / f"{os.path.basename(stage.path)}.lock"
        assert marker.stat().st_size == 0
        stage.commit_replace(unchecked)
        assert marker.exists()
    assert not marker.exists()


def test_a_stage_whose_maker_is_at_work_is_not_removed(source: Path, tmp_path: Path) -> None:
    with stage_beside(str(source)) as stage:
        assert remove_dead_stages(str(tmp_path)) == []
        assert os.path.isdir(stage.path)


@pytest.mark.parametrize("content", [None, (), ("file", "sub/file")])
def test_a_stage_whose_maker_is_gone_is_removed(
    source: Path, tmp_path: Path, content: tuple[str, ...] | None
) -> None:
    before = fingerprint(tmp_path)
    (tmp_path / ".other.reblock-0123abcd.lock").touch()
    if content is not None:
        (tmp_path / ".other.reblock-0123abcd" / "sub").mkdir(parents=True)
        for name in content:
            (tmp_path / ".other.reblock-0123abcd" / name).touch(mode=0o400)
        (tmp_path / ".other.reblock-0123abcd" / "sub").chmod(0o500)
    assert remove_dead_stages(str(tmp_path)) == []
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        ".source.reblock-0123abcd",  # without a marker
        ".source.reblock-0123abcd.lock/inner",  # a directory
        "source.reblock-0123abcd.lock",
        ".source.reblock-0123ABCD.lock",
        ".source.reblock-0123abcd.locked",
        ".source.reblock-0123abc.lock",
    ],
)
def test_what_is_no_marker_of_a_stage_is_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    (tmp_path / ".source.reblock-0123ABCD").mkdir(exist_ok=True)
    before = fingerprint(tmp_path)
    assert remove_dead_stages(str(tmp_path)) == []
    assert fingerprint(tmp_path) == before


def test_a_marker_with_content_or_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".a.reblock-00000000.lock").write_text("mine")
    (tmp_path / "empty").touch()
    (tmp_path / ".b.reblock-00000000.lock").symlink_to("empty")
    os.mkfifo(tmp_path / ".c.reblock-00000000.lock")
    for name in "abc":
        (tmp_path / f".{name}.reblock-00000000").mkdir()
    before = sorted(os.listdir(tmp_path))
    remove_dead_stages(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == before


def test_a_stage_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / ".a.reblock-00000000.lock").touch()
    (tmp_path / ".a.reblock-00000000").symlink_to("mine")
    assert remove_dead_stages(str(tmp_path)) == [str(tmp_path / ".a.reblock-00000000")]
    assert (tmp_path / "mine" / "file").exists()


def test_stages_of_a_directory_that_cannot_be_listed_are_none(tmp_path: Path) -> None:
    assert remove_dead_stages(str(tmp_path / "absent")) == []


def test_a_commit_that_does_not_reach_the_disk_is_undone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(tmp_path)

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(stage_module, "sync_path", fail)
    with pytest.raises(EditFailed, match="nothing was changed"), stage_beside(str(source)) as stage:
        stage.commit_replace(unchecked)
    assert fingerprint(tmp_path) == before
    new = str(tmp_path / "new")
    with pytest.raises(EditFailed, match="nothing was changed"), stage_beside(new) as stage:
        stage.commit_new()
    assert fingerprint(tmp_path) == before


def test_a_commit_that_cannot_be_undone_is_called_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = stage_module.exchange
    calls: list[str] = []

    def once(first: str, second: str) -> None:
        if calls:
            raise OSError(errno.EIO, "Input/output error", second)
        calls.append(first)
        exchange(first, second)

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(stage_module, "exchange", once)
    monkeypatch.setattr(stage_module, "sync_path", fail)
    with (
        pytest.raises(ReblockError, match="was written") as caught,
        stage_beside(str(source)) as stage,
    ):
        stage.commit_replace(unchecked)
    assert not isinstance(caught.value, EditFailed)
    assert names(source) == []


def test_what_others_did_in_the_last_moment_undoes_the_exchange(
    source: Path, tmp_path: Path
) -> None:
    before = fingerprint(tmp_path)
    places: list[str] = []

    def find_a_change_afterwards(place: str) -> None:
        places.append(place)
        if place != str(source):
            raise EditFailed("was changed", path=place)

    with pytest.raises(EditFailed, match="was changed"), stage_beside(str(source)) as stage:
        stage.commit_replace(find_a_change_afterwards)
    assert places == [str(source), stage.path]
    assert fingerprint(tmp_path) == before


def test_others_may_lock_the_marker_whatever_the_umask_is(source: Path, tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        with stage_beside(str(source)) as stage:
            marker = tmp_path / f"{os.path.basename(stage.path)}.lock"
            assert stat.S_IMODE(marker.stat().st_mode) == 0o644
    finally:
        os.umask(umask)


def test_a_regular_file_in_the_place_of_a_stage_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / ".a.reblock-00000000.lock").touch()
    path = tmp_path / ".a.reblock-00000000"
    path.write_text("mine")
    path.chmod(0o640)
    assert remove_dead_stages(str(tmp_path)) == [str(path)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_stage_that_is_nested_without_end_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / ".a.reblock-00000000.lock").touch()
    inner = str(tmp_path / ".a.reblock-00000000")
    os.mkdir(inner)
    before = os.getcwd()
    try:
        os.chdir(inner)
        for _ in range(1500):
            os.mkdir("a")
            os.chdir("a")
    finally:
        os.chdir(before)
    remove_dead_stages(str(tmp_path))  # whether it can be removed depends on the interpreter
    remove_with_system(tmp_path)


def remove_with_system(directory: Path) -> None:
    import subprocess

    subprocess.run(["rm", "-rf", str(directory)], check=True)
