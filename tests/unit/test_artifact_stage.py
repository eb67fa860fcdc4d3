"""Directories that are built beside their target and put in place in one step."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import fingerprint
from reblock.artifact import stage as stage_module
from reblock.artifact.stage import check_destination, stage_beside
from reblock.errors import DestinationExists, EditFailed, InvalidDestination, ReblockError

if TYPE_CHECKING:
    from collections.abc import Callable
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
        stage.commit_replace()
    assert names(source) == ["new"]
    assert names(tmp_path) == before


def test_commit_replace_without_an_exchange_renames_in_two_steps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(tmp_path)
    monkeypatch.setattr(stage_module, "_exchange", lambda first, second: False)
    with stage_beside(str(source)) as stage:
        stage.commit_replace()
    assert names(source) == []
    assert names(tmp_path) == before


def test_commit_replace_whose_second_rename_fails_puts_the_old_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, siblings = fingerprint(source), names(tmp_path)
    monkeypatch.setattr(stage_module, "_exchange", lambda first, second: False)
    rename = os.rename

    def fail_second(first: str, second: str) -> None:
        if second == str(source) and not first.endswith("-old"):
            raise OSError(errno.EIO, "Input/output error", second)
        rename(first, second)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(EditFailed), stage_beside(str(source)) as stage:
        stage.commit_replace()
    assert fingerprint(source) == before
    assert names(tmp_path) == siblings


def test_a_stage_that_is_not_committed_leaves_nothing(source: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    with stage_beside(str(source)) as stage:
        stage.carry_over(str(source), leave_out=(), in_place=True)
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
            stage.commit_replace()
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ReblockError, match="was written") as caught:
        commit_and_fail()
    assert not isinstance(caught.value, EditFailed)


def test_a_stage_takes_the_mode_of_the_directory_it_replaces(source: Path) -> None:
    source.chmod(0o2750)
    with stage_beside(str(source)) as stage:
        stage.commit_replace()
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
        stage.commit_replace()
    assert (elsewhere / "link").is_symlink()
    assert names(source) == []


def test_carry_over_in_place_links_files_and_keeps_links_and_modes(source: Path) -> None:
    before = fingerprint(source)
    with stage_beside(str(source)) as stage:
        stage.carry_over(str(source), leave_out=["file"], in_place=True)
        staged = source.parent / os.path.basename(stage.path)
        assert os.path.samefile(source / "script", staged / "script")
        assert os.path.samefile(source / "sub" / "inner", staged / "sub" / "inner")
        del before["file"]
        assert fingerprint(staged) == before


def test_carry_over_to_a_copy_shares_no_small_file_with_the_source(
    source: Path, tmp_path: Path
) -> None:
    with stage_beside(str(tmp_path / "deep" / "copy")) as stage:
        stage.carry_over(str(source), leave_out=[], in_place=False)
        stage.commit_new()
    copy = tmp_path / "deep" / "copy"
    assert not os.path.samefile(source / "script", copy / "script")
    assert fingerprint(copy)["script"] == fingerprint(source)["script"]
    assert os.readlink(copy / "link") == "sub/inner"
    assert not (copy / "out").is_symlink()
    assert (copy / "out").read_text() == "outside"
    assert os.readlink(copy / "dangling") == "nowhere"
    assert os.readlink(copy / "up") == str(tmp_path)


def test_carry_over_to_a_copy_links_large_files(source: Path, tmp_path: Path) -> None:
    with open(source / "weights", "wb") as file:
        file.truncate(16 * 2**20 + 1)
    with stage_beside(str(tmp_path / "copy")) as stage:
        stage.carry_over(str(source), leave_out=[], in_place=False)
        stage.commit_new()
    assert os.path.samefile(source / "weights", tmp_path / "copy" / "weights")


def refuse_links(code: int) -> Callable[..., None]:
    def link(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code), *arguments[:1])

    return link


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_carry_over_copies_where_links_are_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    before = fingerprint(source)
    monkeypatch.setattr(os, "link", refuse_links(code))
    with stage_beside(str(source)) as stage:
        stage.carry_over(str(source), leave_out=[], in_place=True)
        stage.commit_replace()
    assert fingerprint(source) == before


def test_carry_over_in_place_across_file_systems_is_refused_at_once(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(source)
    monkeypatch.setattr(os, "link", refuse_links(errno.EXDEV))
    with pytest.raises(EditFailed, match="--output-dir"), stage_beside(str(source)) as stage:
        stage.carry_over(str(source), leave_out=[], in_place=True)
    assert fingerprint(source) == before


def test_carry_over_of_a_pipe_is_refused(source: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(EditFailed, match="neither a file"), stage_beside(str(source)) as stage:
        stage.carry_over(str(source), leave_out=[], in_place=True)


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


def test_exchange_swaps_two_directories(tmp_path: Path) -> None:
    (tmp_path / "a" / "was_a").mkdir(parents=True)
    (tmp_path / "b" / "was_b").mkdir(parents=True)
    if not stage_module._exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("the file system of the temporary directory cannot exchange")
    assert names(tmp_path / "a") == ["was_b"]


def test_exchange_that_the_system_refuses_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stage_module._exchange(str(tmp_path / "absent"), str(tmp_path))
