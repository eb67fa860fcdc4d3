"""Whether a zip archive is what it seems, asked before any of it is read into memory.

`zipfile` believes what an archive says: it reads a directory of the size that the end record names,
and makes an object for every entry. And it leaves open what a crafted archive can make two readers
see differently. The archives of programs need nothing of that freedom, so here is none:

    entry ... entry   directory   [zip64 end record, zip64 locator]   end record

Entries are stored plainly, do not overlap, and say the same as the directory does. The directory
ends where the end record begins, and the end record is the end of the file.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from typing import TYPE_CHECKING

from reblock.errors import CorruptArtifact

if TYPE_CHECKING:
    from typing import Any, BinaryIO

__all__ = ["check_end", "check_entries"]

# A program has some five entries for each of its pieces, of which there are ten at most.
_MAX_ENTRIES = 1_000
_MAX_DIRECTORY_BYTES = 2**20
_MAX_NAME_LENGTH = 1_000

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ZIP64_SIZES = struct.Struct("<2H2Q")
_ALL_ONES_16, _ALL_ONES_32 = 2**16 - 1, 2**32 - 1

_HAS_DATA_DESCRIPTOR, _IS_UTF8 = 0x8, 0x800


def check_end(file: BinaryIO, path: str) -> None:
    """Check the end of the archive and the place and size of its directory.

    Raises:
        CorruptArtifact: It is cut off, something lies behind the archive, or its directory is too
            large or not where it must be.
        OSError: The file cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    start = size - _END.size
    signature, disk, disk_of_directory, here, count, length, offset, comment = _unpack(
        _END, file, start, path
    )
    if signature != b"PK\x05\x06" or comment:
        raise _damaged("the end record of the archive is not at its end", path)
    locator_start = start - _LOCATOR_64.size
    if locator_start >= 0 and _read(file, locator_start, 4) == b"PK\x06\x07":
        start = locator_start - _END_64.size
        wide = _read_zip64(file, start, path)
        limits = (_ALL_ONES_16, _ALL_ONES_32, _ALL_ONES_32)
        narrow = (count, length, offset)
        if any(n not in (w, limit) for n, w, limit in zip(narrow, wide, limits, strict=True)):
            raise _damaged("its two end records contradict each other", path)
        count, length, offset = wide
    elif here != count:
        raise _damaged("it is one part of several", path)
    if disk or disk_of_directory:
        raise _damaged("it is one part of several", path)
    if offset + length != start:
        raise _damaged("its directory does not end where the end record begins", path)
    if count > _MAX_ENTRIES or length > _MAX_DIRECTORY_BYTES:
        raise CorruptArtifact(
            f"has {count:,} entries in a directory of {length:,} bytes; up to {_MAX_ENTRIES:,} "
            f"and {_MAX_DIRECTORY_BYTES:,} are read",
            path=path,
        )


def _read_zip64(file: BinaryIO, start: int, path: str) -> tuple[int, int, int]:
    """Return the number of entries, and the size and the place of the directory."""
    signature, length, _, _, disk, disk_of_directory, here, count, size, offset = _unpack(
        _END_64, file, start, path
    )
    _, locator_disk, place, num_disks = _unpack(_LOCATOR_64, file, start + _END_64.size, path)
    # The length is of what follows it, without an extension.
    if signature != b"PK\x06\x06" or length != _END_64.size - 12 or place != start:
        raise _damaged("its zip64 end record is not where it must be", path)
    if disk or disk_of_directory or locator_disk or num_disks > 1 or here != count:
        raise _damaged("it is one part of several", path)
    return count, size, offset


def check_entries(archive: zipfile.ZipFile, file: BinaryIO, path: str) -> None:
    """Check that the entries are plain, disjoint, and what the directory says of them.

    Args:
        archive: The archive in `file`, whose end was checked.
        file: Where its local headers are read from.
        path: Named in errors.

    Raises:
        CorruptArtifact: An entry is not as it must be.
        OSError: The file cannot be read.
    """
    names: set[str] = set()
    extents = []
    for info in archive.infolist():
        _check_name(info, path)
        if info.filename in names:
            raise CorruptArtifact(f"has the entry {info.filename!r} twice", path=path)
        names.add(info.filename)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CorruptArtifact(f"has the compressed entry {info.filename!r}", path=path)
        if info.flag_bits & ~(_HAS_DATA_DESCRIPTOR | _IS_UTF8):
            raise CorruptArtifact(f"has the encrypted entry {info.filename!r}", path=path)
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
            raise CorruptArtifact(f"has the entry {info.filename!r}, which is no file", path=path)
        extents.append((info.header_offset, _end_of(info, file, path)))
    extents.sort()
    ends = [0, *(end for _, end in extents)]
    starts = [*(start for start, _ in extents), archive.start_dir]
    if any(end > start for end, start in zip(ends, starts, strict=True)):
        raise CorruptArtifact("has entries that overlap", path=path)


def _check_name(info: zipfile.ZipInfo, path: str) -> None:
    name = info.filename
    # zipfile cuts a name at NUL, and takes another one from an extra field.
    is_plain = (
        name == info.orig_filename
        and len(name) <= _MAX_NAME_LENGTH
        and name.isprintable()
        and "\\" not in name
        and name[1:2] != ":"
        and not {"", ".", ".."} & set(name.split("/"))
    )
    if not is_plain:
        raise CorruptArtifact(
            f"has an entry of the name {info.orig_filename[:80]!r}, which is no plain path",
            path=path,
        )


def _end_of(info: zipfile.ZipInfo, file: BinaryIO, path: str) -> int:
    """Return where the content of an entry ends, after comparing its local header."""
    start = info.header_offset
    signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = _unpack(
        _LOCAL_HEADER, file, start, path
    )
    if signature != b"PK\x03\x04":
        raise _damaged(f"the entry {info.filename!r} is not where it must be", path)
    start += _LOCAL_HEADER.size
    name = _read(file, start, name_length)
    extra = _read(file, start + name_length, extra_length)
    expected = info.filename.encode("utf-8" if flags & _IS_UTF8 else "cp437", "replace")
    sizes = {info.file_size}
    if flags & _HAS_DATA_DESCRIPTOR:
        sizes.add(0)
    wide = _ZIP64_SIZES.pack(1, 16, info.file_size, info.file_size)
    if wide in extra:
        sizes.add(_ALL_ONES_32)
    if (
        (name, flags, method) != (expected, info.flag_bits, info.compress_type)
        or not {packed, size} <= sizes
        or (crc != info.CRC and not (flags & _HAS_DATA_DESCRIPTOR and crc == 0))
    ):
        raise _damaged(f"the entry {info.filename!r} contradicts the directory", path)
    content = start + len(name) + len(extra)
    return content + info.file_size


def _unpack(layout: struct.Struct, file: BinaryIO, offset: int, path: str) -> tuple[Any, ...]:
    data = _read(file, offset, layout.size)
    if len(data) < layout.size:
        raise _damaged("a record of the archive lies outside of the file", path)
    return layout.unpack(data)


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    # An offset that no file can have is none that the system is asked about.
    return os.pread(file.fileno(), length, offset) if 0 <= offset < 2**63 - length else b""


def _damaged(fault: str, path: str) -> CorruptArtifact:
    return CorruptArtifact(f"is damaged or cut off: {fault}", path=path)
