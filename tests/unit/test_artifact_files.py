"""Files of an artifact, whatever lies where they should be."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from reblock.artifact import files
from reblock.artifact.files import open_regular, read_file
from reblock.errors import CorruptArtifact

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert read_file(str(tmp_path / "a"), 7) == b"content"


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    assert read_file(str(tmp_path / "b")) == b"content"


def test_a_file_above_the_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with pytest.raises(CorruptArtifact, match="a: is larger than 6 bytes"):
        read_file(str(tmp_path / "a"), 6)


def test_a_file_of_a_terabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"{")
    os.truncate(tmp_path / "a", 2**40)
    with pytest.raises(CorruptArtifact, match="is larger than 4,194,304 bytes"):
        read_file(str(tmp_path / "a"))


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
        (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "is missing"),
        (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: "),
        (loop, "cannot be read: Too many levels of symbolic links"),
    ],
    ids=["pipe", "directory", "socket", "device", "nowhere", "memory", "loop"],
)
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], fault: str
) -> None:
    make(tmp_path / "a")
    with pytest.raises(CorruptArtifact, match=f"a: {fault}"):
        read_file(str(tmp_path / "a"))


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match="cannot be read: File name too long"):
        open_regular(str(tmp_path / ("n" * 300)))


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"content")
    status = os.stat(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(files.os, "stat", lambda _path: status)
    with pytest.raises(CorruptArtifact, match="pipe: is not a regular file"):
        open_regular(str(tmp_path / "pipe"))


def test_a_file_that_has_nothing_to_say_yet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with open(reader, "rb") as file, open(writer, "wb"):
        monkeypatch.setattr(files, "open_regular", lambda _path: file)
        with pytest.raises(CorruptArtifact, match="cannot be read at once"):
            read_file(str(tmp_path / "a"))
