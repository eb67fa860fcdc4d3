"""Writes zip archives with any value in any field of any record.

What is written is consistent but for what is given: sizes, checksums and offsets are filled in
before the fields that are to be other ones are replaced.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO

# Fields of each record, with the sizes of them; the last ones of two say how long what follows is.
LOCAL = {"signature": 4, "version": 2, "flags": 2, "method": 2, "time": 2, "date": 2}
LOCAL |= {"crc": 4, "packed": 4, "size": 4, "name_length": 2, "extra_length": 2}
CENTRAL = {"signature": 4, "made_by": 2, "version": 2, "flags": 2, "method": 2, "time": 2}
CENTRAL |= {"date": 2, "crc": 4, "packed": 4, "size": 4, "name_length": 2, "extra_length": 2}
CENTRAL |= {"comment_length": 2, "disk": 2, "internal": 2, "external": 4, "offset": 4}
END = {"signature": 4, "disk": 2, "directory_disk": 2, "here": 2, "count": 2, "length": 4}
END |= {"offset": 4, "comment_length": 2}
END_64 = {"signature": 4, "record_length": 8, "made_by": 2, "version": 2, "disk": 4}
END_64 |= {"directory_disk": 4, "here": 8, "count": 8, "length": 8, "offset": 8}
LOCATOR = {"signature": 4, "disk": 4, "place": 8, "num_disks": 4}
_FORMATS = {2: "H", 4: "L", 8: "Q"}


@dataclass
class Entry:
    """One entry; the values in `local` and `central` replace those that would be right."""

    name: bytes
    data: bytes
    flags: int = 0
    method: int = 0
    external: int = 0o100600 << 16
    crc: int | None = None
    size: int | None = None
    extra: bytes = b""
    central_extra: bytes = b""
    local: dict[str, int] = field(default_factory=dict)
    central: dict[str, int] = field(default_factory=dict)
    central_name: bytes | None = None
    before: bytes = b""
    is_listed: bool = True


@dataclass
class Archive:
    """An archive to be written; `records` has what replaces fields of the end records."""

    entries: list[Entry]
    end: dict[str, int] = field(default_factory=dict)
    end_64: dict[str, int] = field(default_factory=dict)
    locator: dict[str, int] = field(default_factory=dict)
    has_zip64: bool = False
    head: bytes = b""
    before_directory: bytes = b""
    before_end: bytes = b""
    tail: bytes = b""


def read(data: bytes) -> Archive:
    return Archive([Entry(name, content) for name, content in _contents(data)])


@cache
def _contents(data: bytes) -> list[tuple[bytes, bytes]]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return [(info.filename.encode(), archive.read(info)) for info in archive.infolist()]


def _record(layout: dict[str, int], values: dict[str, int], changes: dict[str, int]) -> bytes:
    merged = dict.fromkeys(layout, 0) | values | changes
    return struct.pack(
        "<" + "".join(_FORMATS[size] for size in layout.values()),
        *(merged[name] % (1 << 8 * size) for name, size in layout.items()),
    )


def write(archive: Archive) -> bytes:
    out = bytearray(archive.head)
    directory = bytearray()
    count = 0
    for entry in archive.entries:
        out += entry.before
        offset = len(out)
        size = len(entry.data) if entry.size is None else entry.size
        common = {
            "version": 20,
            "flags": entry.flags,
            "method": entry.method,
            "date": 33,
            "crc": zlib.crc32(entry.data) if entry.crc is None else entry.crc,
            "packed": len(entry.data),
            "size": size,
        }
        local = common | {"signature": 0x04034B50, "name_length": len(entry.name)}
        local["extra_length"] = len(entry.extra)
        out += _record(LOCAL, local, entry.local) + entry.name + entry.extra + entry.data
        name = entry.name if entry.central_name is None else entry.central_name
        central = common | {"signature": 0x02014B50, "name_length": len(name), "made_by": 0x314}
        central |= {"extra_length": len(entry.central_extra), "external": entry.external}
        central |= {"offset": offset}
        if entry.is_listed:
            directory += _record(CENTRAL, central, entry.central) + name + entry.central_extra
            count += 1
    out += archive.before_directory
    place = {"here": count, "count": count, "length": len(directory), "offset": len(out)}
    out += directory + archive.before_end
    if archive.has_zip64:
        at = len(out)
        values = place | {"signature": 0x06064B50, "record_length": 44, "version": 45}
        out += _record(END_64, values, archive.end_64)
        values = {"signature": 0x07064B50, "place": at, "num_disks": 1}
        out += _record(LOCATOR, values, archive.locator)
    out += _record(END, place | {"signature": 0x06054B50}, archive.end)
    return bytes(out + archive.tail)


def read_entry(data: bytes, suffix: str) -> bytes:
    """Return the content of the entry whose name ends like that."""
    return next(entry.data for entry in read(data).entries if entry.name.endswith(suffix.encode()))


def replace_entry(data: bytes, suffix: str, content: bytes) -> bytes:
    """Return the archive with other content in the entry whose name ends like that."""
    archive = read(data)
    for entry in archive.entries:
        if entry.name.endswith(suffix.encode()):
            entry.data = content
    return write(archive)
