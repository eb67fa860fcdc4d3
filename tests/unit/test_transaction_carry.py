"""Bringing the files that an edit does not change into its stage."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import fingerprint
from reblock.artifact.transaction import carry as carry_module
from reblock.artifact.transaction.carry import (
    ExchangeImpossible,
    Sharing,
    Watch,
    carry_over,
)
from reblock.errors import EditFailed
from reblock.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

LARGE = 16 * 2**20 + 1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "sub" / "empty").mkdir(parents=True)
    (directory / "file").write_text("file")
    (directory / "sub" / "inner").write_text("inner")
    (directory / "script").write_text("#!")
    (directory / "script").chmod(0o451)
    (tmp_path / "outside").write_text("outside")
    (directory / "link").symlink_to("sub/inner")
    (directory / "out").symlink_to("../outside")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "up").symlink_to("..")
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, ns=(10**18, 10**18 + 123), follow_symlinks=False)
    return directory


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    directory = tmp_path / "destination"
    directory.mkdir()
    return directory


def carry(source: Path, destination: Path, sharing: Sharing, *leave_out: str) -> None:
    carry_over(
        str(source),
        str(destination),
        leave_out=leave_out,
        sharing=sharing,
        progress=SilentProgress(),
    )


def make_large(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(LARGE)


def refuse(code: int) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code), *arguments[:1])

    return call


def times(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.lstat().st_mtime_ns for path in directory.rglob("*")
    }


def test_replace_links_files_and_keeps_links_modes_and_times(
    source: Path, destination: Path
) -> None:
    before, before_times = fingerprint(source), times(source)
    carry(source, destination, Sharing.REPLACE, "file")
    assert os.path.samefile(source / "script", destination / "script")
    assert os.path.samefile(source / "sub" / "inner", destination / "sub" / "inner")
    del before["file"], before_times["file"]
    assert fingerprint(destination) == before
    assert times(destination) == before_times


@pytest.mark.parametrize("sharing", [Sharing.SHARE, Sharing.COPY])
def test_a_copy_shares_no_small_file_with_the_source(
    source: Path, destination: Path, sharing: Sharing
) -> None:
    carry(source, destination, sharing)
    assert not os.path.samefile(source / "script", destination / "script")
    assert fingerprint(destination)["script"] == fingerprint(source)["script"]
    assert os.readlink(destination / "link") == "sub/inner"
    assert not (destination / "out").is_symlink()
    assert (destination / "out").read_text() == "outside"
    assert os.readlink(destination / "dangling") == "nowhere"
    assert os.readlink(destination / "up") == str(source.parent)
    after = times(destination)
    del after["out"]  # that of the file it stands for
    assert set(after.values()) == {10**18 + 123}


def test_a_copy_shares_large_files_unless_told_not_to(source: Path, tmp_path: Path) -> None:
    make_large(source / "weights")
    for sharing, is_same in ((Sharing.SHARE, True), (Sharing.COPY, False)):
        copy = tmp_path / sharing.value
        copy.mkdir()
        carry(source, copy, sharing)
        assert os.path.samefile(source / "weights", copy / "weights") is is_same
        assert (copy / "weights").read_bytes() == bytes(LARGE)


def test_a_copy_takes_clones_where_the_file_system_has_them(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(source / "weights")

    def clone(first: int, second: int) -> bool:
        os.truncate(second, os.fstat(first).st_size)
        return True

    monkeypatch.setattr(carry_module, "clone", clone)
    monkeypatch.setattr(os, "link", refuse(errno.EIO))
    (source / "weights").chmod(0o640)
    carry(source, destination, Sharing.SHARE)
    assert (destination / "weights").stat().st_size == LARGE
    assert (destination / "weights").stat().st_mode & 0o777 == 0o640


def test_a_copy_across_file_systems_copies_large_files_with_progress(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(source / "weights")
    monkeypatch.setattr(os, "link", refuse(errno.EXDEV))
    told: list[object] = []

    class Watching(SilentProgress):
        def bytes_stage(
            self, text: str, total_bytes: int
        ) -> AbstractContextManager[Callable[[int], None]]:
            told.extend([text, total_bytes])
            return advancing()

    from contextlib import contextmanager

    @contextmanager
    def advancing() -> Iterator[Callable[[int], None]]:
        yield told.append

    carry_over(
        str(source), str(destination), leave_out=[], sharing=Sharing.SHARE, progress=Watching()
    )
    assert told[:2] == ["copying weights", LARGE]
    assert sum(count for count in told[2:] if isinstance(count, int)) == LARGE
    assert fingerprint(destination)["weights"] == fingerprint(source)["weights"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_replace_copies_where_links_are_refused(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    make_large(source / "weights")
    before = fingerprint(source)
    monkeypatch.setattr(os, "link", refuse(code))
    carry(source, destination, Sharing.REPLACE)
    assert fingerprint(destination) == before


def test_replace_copies_nothing_large_that_could_not_be_exchanged_then(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(source / "weights")
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(carry_module, "exchange", refuse(errno.EINVAL))
    with pytest.raises(ExchangeImpossible):
        carry(source, destination, Sharing.REPLACE)
    assert not (destination / "weights").exists()
    assert not [name for name in os.listdir(destination) if "probe" in name]


def test_replace_across_mounts_is_impossible(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EXDEV))
    with pytest.raises(ExchangeImpossible):
        carry(source, destination, Sharing.REPLACE)


def test_a_link_that_fails_for_another_reason_is_an_error(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        carry(source, destination, Sharing.REPLACE)


def test_a_large_copy_without_room_is_refused_before_it_is_begun(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(source / "weights", "wb") as file:
        file.truncate(2**43)  # sparse: larger than any disk here
    with pytest.raises(OSError, match="no room for another 8,796,093,022,208 bytes"):
        carry(source, destination, Sharing.COPY)
    assert not (destination / "weights").exists()


def test_a_pipe_is_refused(source: Path, destination: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(OSError, match="neither a file"):
        carry(source, destination, Sharing.REPLACE)


def test_extended_attributes_are_carried_over(source: Path, destination: Path) -> None:
    try:
        for path in (source / "file", source / "sub"):
            os.setxattr(path, "user.reblock", b"kept")
    except OSError:
        pytest.skip("the file system of the temporary directory has no user attributes")
    carry(source, destination, Sharing.COPY)
    for path in (destination / "file", destination / "sub"):
        assert os.getxattr(path, "user.reblock") == b"kept"


def test_what_an_unfinished_edit_keeps_is_not_carried_over(source: Path, destination: Path) -> None:
    (source / ".reblock-edit" / "committed").mkdir(parents=True)
    carry(source, destination, Sharing.COPY)
    assert not (destination / ".reblock-edit").exists()


def test_a_watch_tells_of_changes_and_not_of_links(source: Path, destination: Path) -> None:
    watch = Watch(str(source))
    carry(source, destination, Sharing.REPLACE)
    watch.check(str(source))
    moved = source.rename(source.with_name("moved"))
    watch.check(str(moved))
    with pytest.raises(EditFailed, match="was changed by another program"):
        watch.check(str(destination))  # the same content is not the same directory
    (moved / "sub" / "inner").write_text("other")
    with pytest.raises(EditFailed, match="inner' was changed"):
        watch.check(str(moved))
    watch = Watch(str(moved))
    (moved / "sub" / "empty" / "new").touch()
    with pytest.raises(EditFailed, match="new' was changed"):
        watch.check(str(moved))


def test_what_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    inner = tmp_path / "a"
    for _ in range(70):
        inner = inner / "a"
    inner.mkdir(parents=True)
    with pytest.raises(OSError, match="nested deeper than 64"):
        Watch(str(tmp_path))


def test_a_file_of_the_system_without_an_end_is_copied_to_no_more_than_its_size(
    source: Path, destination: Path
) -> None:
    (source / "endless").symlink_to("/proc/self/pagemap")
    carry(source, destination, Sharing.COPY)
    assert (destination / "endless").read_bytes() == b""
