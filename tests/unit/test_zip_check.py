"""The structure of an archive, checked before anything in it is believed."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zipfile
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import zip_archives
from reblock.artifact.program import open_archive
from reblock.errors import CorruptArtifact
from zip_archives import Archive, Entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def archive_of(*entries: Entry) -> Archive:
    return Archive([*entries] or [Entry(b"a/first", b"1" * 100), Entry(b"a/second", b"2" * 50)])


def names_in(path: Path, data: bytes) -> list[str]:
    path.write_bytes(data)
    with open_archive(str(path)) as archive:
        return archive.namelist()


def assert_refused(path: Path, archive: Archive | bytes, fault: str) -> None:
    data = archive if isinstance(archive, bytes) else zip_archives.write(archive)
    with pytest.raises(CorruptArtifact, match=fault) as caught:
        names_in(path, data)
    assert caught.value.path == str(path)
    assert str(caught.value).isprintable()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.rbln"


@pytest.mark.parametrize("has_zip64", [False, True])
def test_a_plain_archive_is_opened(path: Path, has_zip64: bool) -> None:
    archive = archive_of()
    archive.has_zip64 = has_zip64
    assert names_in(path, zip_archives.write(archive)) == ["a/first", "a/second"]


def test_an_archive_whose_numbers_stand_in_the_zip64_record_alone_is_opened(path: Path) -> None:
    archive = archive_of()
    archive.has_zip64 = True
    archive.end = {"here": 0xFFFF, "count": 0xFFFF, "length": 0xFFFFFFFF, "offset": 0xFFFFFFFF}
    assert names_in(path, zip_archives.write(archive)) == ["a/first", "a/second"]


def test_an_archive_as_torch_writes_it_is_opened(path: Path) -> None:
    """Its local headers leave sizes to a record behind the content, and pad with extra fields."""
    blank = {"crc": 0, "packed": 0, "size": 0}
    padding = b"FB\x05\x00ZZZZZ"
    data = b"x" * 30
    behind = struct.pack("<4sLQQ", b"PK\7\x08", zlib.crc32(data), 30, 30)
    archive = archive_of(
        Entry(b"p/data", data, flags=0x808, external=0, extra=padding, local=blank),
        Entry(b"p/more", data, flags=0x808, external=0, before=behind, local=blank),
    )
    assert names_in(path, zip_archives.write(archive)) == ["p/data", "p/more"]


def test_an_archive_with_64_bit_sizes_in_its_entries_is_opened(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive, archive.open("a", "w", force_zip64=True) as file:
        file.write(b"content")
    with open_archive(str(path)) as read:
        assert read.read("a") == b"content"


@pytest.mark.parametrize(
    "data", [b"", b"x", b"PK\5\6", b"PK\5\6" + bytes(17), bytes(22), bytes(10_000)]
)
def test_what_is_no_archive_is_refused(path: Path, data: bytes) -> None:
    assert_refused(path, data, "is damaged or cut off")


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ({"signature": 0}, "the end record of the archive is not at its end"),
        ({"comment_length": 1}, "the end record of the archive is not at its end"),
        ({"disk": 1}, "one part of several"),
        ({"directory_disk": 1}, "one part of several"),
        ({"here": 1}, "one part of several"),
        ({"length": 2**32 - 1}, "its directory does not end where the end record begins"),
        ({"offset": 0}, "its directory does not end where the end record begins"),
        ({"count": 1_001, "here": 1_001}, r"has 1,001 entries .* up to 1,000"),
    ],
)
def test_an_end_record_that_lies_is_refused(path: Path, end: dict[str, int], fault: str) -> None:
    archive = archive_of()
    archive.end = end
    assert_refused(path, archive, fault)


@pytest.mark.parametrize(
    ("end_64", "locator", "fault"),
    [
        ({"count": 5}, {}, "one part of several"),
        ({"count": 5, "here": 5}, {}, "its two end records contradict each other"),
        ({"length": 9 * 10**9}, {}, "its two end records contradict each other"),
        ({"signature": 0}, {}, "its zip64 end record is not where it must be"),
        ({"record_length": 2**60}, {}, "its zip64 end record is not where it must be"),
        ({"disk": 1}, {}, "one part of several"),
        ({}, {"place": 0}, "its zip64 end record is not where it must be"),
        ({}, {"num_disks": 2}, "one part of several"),
    ],
)
def test_a_zip64_record_that_lies_is_refused(
    path: Path, end_64: dict[str, int], locator: dict[str, int], fault: str
) -> None:
    archive = archive_of()
    archive.has_zip64, archive.end_64, archive.locator = True, end_64, locator
    assert_refused(path, archive, fault)


def test_a_directory_of_nine_gigabytes_is_refused_without_reading_it(path: Path) -> None:
    archive = archive_of()
    archive.has_zip64 = True
    start, length = 10 * 10**9, 9 * 10**9
    archive.end = {"here": 0xFFFF, "count": 0xFFFF, "length": 0xFFFFFFFF, "offset": 0xFFFFFFFF}
    archive.end_64 = {"length": length, "offset": start - length}
    archive.locator = {"place": start}
    data = zip_archives.write(archive)
    path.write_bytes(b"")
    os.truncate(path, start)
    with path.open("ab") as file:
        file.write(data[-98:])
    tracemalloc.start()
    try:
        fault = "a directory of 9,000,000,000 bytes"
        with pytest.raises(CorruptArtifact, match=fault), open_archive(str(path)):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("place", ["before_directory", "before_end", "tail"])
def test_anything_between_the_parts_of_an_archive_or_behind_it_is_refused(
    path: Path, place: str
) -> None:
    archive = archive_of()
    setattr(archive, place, b"junk")
    if place == "before_directory":
        # Nothing is hidden there from one reader or the other.
        assert names_in(path, zip_archives.write(archive)) == ["a/first", "a/second"]
    else:
        assert_refused(path, archive, "is damaged or cut off")


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"..",
        b"../x",
        b"a/../x",
        b"./x",
        b"/x",
        b"a//x",
        b"a/",
        b"a\\x",
        b"C:x",
        b"a\0b",
        b"a\nb",
        b"\x1b[31m",
        b"n" * 1_001,
    ],
)
def test_a_name_that_is_no_plain_path_is_refused(path: Path, name: bytes) -> None:
    assert_refused(path, archive_of(Entry(name, b"x")), "which is no plain path")


def test_a_name_that_only_some_readers_see_is_refused(path: Path) -> None:
    name = b"x/extra/reblock.json"
    field = struct.pack("<BL", 1, zlib.crc32(b"a")) + name
    extra = struct.pack("<HH", 0x7075, len(field)) + field
    data = zip_archives.write(archive_of(Entry(b"a", b"x", central_extra=extra)))
    # Newer versions of Python read the field, and the name in it is refused.
    with suppress(CorruptArtifact):
        assert names_in(path, data) == ["a"]


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (Entry(b"a", b"x", method=8), "has the compressed entry 'a'"),
        (Entry(b"a", b"x", size=2), "has the compressed entry 'a'"),
        (Entry(b"a", b"x", flags=0x1), "has the encrypted entry 'a'"),
        (Entry(b"a", b"x", flags=0x40), "has the encrypted entry 'a'"),
        (Entry(b"a", b"x", flags=0x2000), "has the encrypted entry 'a'"),
        (Entry(b"a", b"x", external=0o120777 << 16), "has the entry 'a', which is no file"),
        (Entry(b"a", b"x", external=0o040755 << 16), "has the entry 'a', which is no file"),
        (Entry(b"a", b"x", external=0o010644 << 16), "has the entry 'a', which is no file"),
        (Entry(b"a", b"x", local={"signature": 0}), "the entry 'a' is not where it must be"),
        (Entry(b"a", b"x", central={"offset": 1}), "the entry 'a' is not where it must be"),
        (Entry(b"a", b"x", central={"offset": 2**31}), "lies outside of the file"),
        (Entry(b"a", b"x", central_name=b"b"), "the entry 'b' contradicts the directory"),
        (Entry(b"a", b"x", local={"method": 8}), "the entry 'a' contradicts the directory"),
        (Entry(b"a", b"x", local={"flags": 1}), "the entry 'a' contradicts the directory"),
        (Entry(b"a", b"x", local={"size": 2}), "the entry 'a' contradicts the directory"),
        (Entry(b"a", b"x", local={"packed": 0}), "the entry 'a' contradicts the directory"),
        (Entry(b"a", b"x", local={"crc": 5}), "the entry 'a' contradicts the directory"),
        (Entry(b"a", b"x", local={"size": 2**32 - 1}), "the entry 'a' contradicts"),
    ],
)
def test_an_entry_that_is_not_plain_or_contradicts_itself_is_refused(
    path: Path, entry: Entry, fault: str
) -> None:
    assert_refused(path, archive_of(entry, Entry(b"z", b"z" * 100)), fault)


def test_a_name_that_stands_twice_is_refused(path: Path) -> None:
    assert_refused(path, archive_of(Entry(b"a", b"1"), Entry(b"a", b"2")), "the entry 'a' twice")


def claim_what_follows(archive: Archive) -> None:
    size = {"size": 120, "packed": 120}
    archive.entries[0].local, archive.entries[0].central = size, size


def share_one_place(archive: Archive) -> None:
    inner = zip_archives.write(Archive([Entry(b"a/second", b"2" * 50)]))
    archive.entries[0].data = inner[: 30 + 8 + 50]
    archive.entries[1].central = {"offset": 30 + 7}


def claim_the_directory(archive: Archive) -> None:
    size = {"size": 60, "packed": 60}
    archive.entries[1].local, archive.entries[1].central = size, size


@pytest.mark.parametrize("change", [claim_what_follows, share_one_place, claim_the_directory])
def test_entries_that_overlap_each_other_or_the_directory_are_refused(
    path: Path, change: Callable[[Archive], None]
) -> None:
    archive = archive_of()
    change(archive)
    assert_refused(path, archive, "has entries that overlap")


def test_the_most_entries_that_are_read_take_little_memory(path: Path) -> None:
    entries = [Entry(b"n" * 900 + b"%d" % index, b"") for index in range(1_000)]
    data = zip_archives.write(archive_of(*entries))
    tracemalloc.start()
    try:
        assert len(names_in(path, data)) == 1_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
