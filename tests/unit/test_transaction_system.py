"""What edits need of the system."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest

from reblock.artifact.transaction import system
from reblock.artifact.transaction.system import (
    check_replaceable,
    exchange,
    holds_mounts,
    is_mount_point,
    keep_metadata,
    remove_tree,
)

if TYPE_CHECKING:
    from pathlib import Path

MOUNTS = rb"""22 1 254:0 / / rw,relatime - ext4 /dev/root rw
23 22 0:21 / /a\040b/c rw - tmpfs tmpfs rw
24 22 0:22 / /models rw - tmpfs tmpfs rw
"""


def test_exchange_swaps_two_directories(tmp_path: Path) -> None:
    (tmp_path / "a" / "was_a").mkdir(parents=True)
    (tmp_path / "b" / "was_b").mkdir(parents=True)
    try:
        exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    except OSError:
        pytest.skip("the file system of the temporary directory cannot exchange")
    assert os.listdir(tmp_path / "a") == ["was_b"]


def test_exchange_that_the_system_refuses_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange(str(tmp_path / "absent"), str(tmp_path))


def test_mount_points_are_found_with_spaces_in_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "mountinfo"
    listing.write_bytes(MOUNTS)
    monkeypatch.setattr(system, "open", lambda path, mode: listing.open(mode), raising=False)
    assert is_mount_point("/a b/c")
    assert holds_mounts("/a b")
    assert holds_mounts("/models")
    assert not holds_mounts("/models/x")
    assert not holds_mounts("/model")
    assert not is_mount_point("/a b")


def test_nothing_is_removed_where_something_is_mounted_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stage" / "mounted").mkdir(parents=True)
    (tmp_path / "stage" / "mounted" / "file").write_text("mine")
    mounted = os.fsencode(tmp_path / "stage" / "mounted")
    monkeypatch.setattr(system, "_mount_points", lambda: {mounted})
    assert not remove_tree(str(tmp_path / "stage"))
    assert (tmp_path / "stage" / "mounted" / "file").exists()


def test_removing_changes_nothing_that_links_lead_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o500)
    stage = tmp_path / "stage"
    (stage / "closed").mkdir(parents=True)
    (stage / "closed" / "file").touch()
    (stage / "link").symlink_to(victim)
    (stage / "closed" / "link").symlink_to(victim)
    (stage / "closed").chmod(0o100)
    assert remove_tree(str(stage))
    assert stat.S_IMODE(victim.stat().st_mode) == 0o500
    link = tmp_path / "link"
    link.symlink_to(victim)
    assert not remove_tree(str(link))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL])
def test_the_group_is_kept_where_the_owner_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    asked: list[tuple[int, int]] = []

    def chown(path: str, user: int, group: int) -> None:
        asked.append((user, group))
        if user != -1:
            raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "chown", chown)
    keep_metadata(str(tmp_path / "a"), str(tmp_path / "b"), keep_times=False)
    status = (tmp_path / "a").stat()
    assert asked == [(status.st_uid, status.st_gid), (-1, status.st_gid)]


def test_an_owner_that_the_disk_fails_to_note_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()

    def chown(path: str, user: int, group: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "chown", chown)
    with pytest.raises(OSError, match="Input/output"):
        keep_metadata(str(tmp_path / "a"), str(tmp_path / "a"), keep_times=False)


def test_attributes_that_the_original_has_not_are_removed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    try:
        os.setxattr(tmp_path / "a", "user.kept", b"1")
        os.setxattr(tmp_path / "b", "user.added", b"2")
    except OSError:
        pytest.skip("the file system of the temporary directory has no user attributes")
    keep_metadata(str(tmp_path / "a"), str(tmp_path / "b"), keep_times=False)
    assert os.listxattr(tmp_path / "b") == ["user.kept"]


def test_what_a_rename_could_not_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    check_replaceable(str(tmp_path), "file")
    check_replaceable(str(tmp_path), "absent")
    with pytest.raises(IsADirectoryError):
        check_replaceable(str(tmp_path), "directory")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    check_replaceable(str(tmp_path), "file")
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        check_replaceable(str(tmp_path), "file")


def test_a_file_that_is_marked_as_not_to_be_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    flags = (0x10).to_bytes(8, "little")
    monkeypatch.setattr(system.fcntl, "ioctl", lambda descriptor, request, argument: flags)
    monkeypatch.setattr(system.sys, "byteorder", "little")
    with pytest.raises(PermissionError, match="lsattr"):
        check_replaceable(str(tmp_path), "file")
