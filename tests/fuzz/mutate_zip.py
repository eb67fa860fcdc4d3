"""Mutations of a zip archive: it is taken apart, changed in any of its records, and written."""

from __future__ import annotations

import struct
import zipfile
import zlib
from io import BytesIO
from typing import TYPE_CHECKING

from zip_archives import CENTRAL, END, END_64, LOCAL, LOCATOR, Archive, Entry, read, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

HOSTILE_NAMES = (
    b"",
    b"/",
    b"..",
    b"../x",
    b"a/../../x",
    b"./a",
    b"a//b",
    b"/etc/passwd",
    b"..\\x",
    b"C:/x",
    b"C:\\x",
    b"a\0b",
    b"a\nb",
    b"\x1b[31m",
    b"a/",
    b"\xff\xfe",
    "\u202e".encode(),
    b"n" * 300,
    b"n" * 60_000,
    b"extra/reblock.json",
    b"x/extra/reblock.json",
    b"reblock.json",
)


def _hostile_number(rng: Random, width: int) -> int:
    highest = (1 << 8 * width) - 1
    return rng.choice(
        (0, 1, 2, 8, 20, 99, 1 << (8 * width - 1), highest, highest - 1, rng.randrange(highest))
    )


def edit_header(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    for _ in range(rng.choice((1, 1, 2))):
        layout, changes = rng.choice(((LOCAL, entry.local), (CENTRAL, entry.central)))
        name = rng.choice(list(layout))
        changes[name] = _hostile_number(rng, layout[name])


def edit_end(rng: Random, archive: Archive) -> None:
    archive.has_zip64 = rng.random() < 0.6
    records = [(END, archive.end)]
    if archive.has_zip64:
        records += [(END_64, archive.end_64), (LOCATOR, archive.locator)]
        if rng.random() < 0.5:
            archive.end |= {"here": 0xFFFF, "count": 0xFFFF}
            archive.end |= {"length": 0xFFFFFFFF, "offset": 0xFFFFFFFF}
    for _ in range(rng.choice((0, 1, 1, 2))):
        layout, changes = rng.choice(records)
        name = rng.choice(list(layout))
        changes[name] = _hostile_number(rng, layout[name])


def shift_sizes(rng: Random, archive: Archive) -> None:
    """Move the right offsets and sizes by a little, which only an exact check finds."""
    entry, by = rng.choice(archive.entries), rng.choice((-1, 1, 2, 30, 100, 5000))
    for changes in rng.choice(((entry.local, entry.central), (entry.local,), (entry.central,))):
        for name in rng.choice((("packed", "size"), ("size",), ("packed",))):
            changes[name] = len(entry.data) + by


def lie_consistently(rng: Random, archive: Archive) -> None:
    """Let an entry claim what lies behind it as well, in both headers."""
    entry = rng.choice(archive.entries)
    size = len(entry.data) + rng.choice((1, 30, 500, 10**6, 2**31, 2**32 - 1))
    for changes in (entry.local, entry.central):
        changes |= {"packed": size, "size": size}


def hostile_name(rng: Random, archive: Archive) -> None:
    entry, name = rng.choice(archive.entries), rng.choice(HOSTILE_NAMES)
    where = rng.randrange(3)
    if where == 0:
        entry.name = name
    elif where == 1:
        entry.central_name = name
    else:
        entry.name, entry.central_name = name, entry.name
    if rng.random() < 0.3:
        entry.flags |= 0x800


def duplicate_entry(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    for _ in range(rng.choice((1, 1, 200))):
        archive.entries.append(Entry(entry.name, rng.choice((entry.data, b"", b"{}"))))


def drop_entry(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    if rng.random() < 0.5:
        entry.is_listed = False
    else:
        archive.entries.remove(entry)


def overlap(rng: Random, archive: Archive) -> None:
    offsets, position = [], len(archive.head)
    for entry in archive.entries:
        offsets.append(position)
        position += 30 + len(entry.name) + len(entry.data)
    entry, at = rng.choice(archive.entries), rng.choice(offsets)
    entry.central["offset"] = at + rng.choice((0, 0, 1, -1, 30))


def overlap_many(rng: Random, archive: Archive) -> None:
    """The classic bomb: many names for one content."""
    large = Entry(b"large", bytes(200_000))
    offset = sum(30 + len(entry.name) + len(entry.data) for entry in archive.entries)
    archive.entries.append(large)
    for index in range(rng.choice((10, 3000))):
        archive.entries.append(
            Entry(b"e%d" % index, b"", central={"offset": offset, "size": 200_000})
        )


def many_entries(rng: Random, archive: Archive) -> None:
    number = rng.choice((500, 990, 1_000, 20_000, 65_534))
    archive.entries += [Entry(b"x/%d" % index, b"") for index in range(number)]
    archive.has_zip64 = rng.random() < 0.5


def compress(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    data = rng.choice((entry.data, bytes(20_000_000)))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    entry.size, entry.crc = len(data), zlib.crc32(data)
    entry.data = packer.compress(data) + packer.flush()
    entry.method = rng.choice((8, 8, 0, 9, 12, 14, 93, 99))


def nest_bomb(rng: Random, archive: Archive) -> None:
    inner = BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("bomb", bytes(20_000_000))
    rng.choice(archive.entries).data = inner.getvalue()


def set_flags(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    entry.flags = rng.choice((1, 0x8, 0x20, 0x40, 0x800, 0x808, 0x2000, 0xFFFF, 1 << 15))
    if rng.random() < 0.5:
        changes = rng.choice((entry.local, entry.central))
        changes["flags"] = rng.choice((0, 1, 8, 0x800))
    if entry.flags & 8:
        entry.local |= {"crc": 0, "packed": 0, "size": 0}


def set_mode(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    kind = rng.choice((0o120777, 0o040755, 0o010644, 0o020644, 0o060644, 0o140644, 0o170000))
    entry.external = kind << 16
    if rng.random() < 0.3:
        entry.data = b"/etc/passwd"


def add_extra(rng: Random, archive: Archive) -> None:
    entry = rng.choice(archive.entries)
    unicode_path = struct.pack("<BL", 1, zlib.crc32(entry.name)) + b"x/extra/reblock.json"
    fields = (
        struct.pack("<HH", 0x7075, len(unicode_path)) + unicode_path,
        struct.pack("<HHQQQ", 1, 24, len(entry.data), len(entry.data), 2**62),
        struct.pack("<HHQQ", 1, 16, 2**63, 2**63),
        struct.pack("<HH", 1, 0),
        struct.pack("<HH", 1, 60_000),
        b"\1",
        bytes(60_000),
        rng.randbytes(20),
    )
    extra = rng.choice(fields)
    for name in rng.choice((("extra",), ("central_extra",), ("extra", "central_extra"))):
        setattr(entry, name, extra)
    if rng.random() < 0.6:
        chosen = rng.choice((("size",), ("size", "packed"), ("size", "packed", "offset")))
        entry.central |= dict.fromkeys(chosen, 0xFFFFFFFF)


def add_junk(rng: Random, archive: Archive) -> None:
    junk = rng.choice((b"\0", rng.randbytes(50), b"PK\5\6" + bytes(18), b"PK\1\2", bytes(70_000)))
    where = rng.choice(("head", "before_directory", "before_end", "tail", "entry"))
    if where == "entry":
        rng.choice(archive.entries).before = junk
    else:
        setattr(archive, where, junk)
    if where == "tail" and rng.random() < 0.5:
        archive.end["comment_length"] = len(junk)


def corrupt_content(rng: Random, archive: Archive) -> None:
    rng.choice(archive.entries).crc = rng.choice((0, 1, rng.randrange(2**32)))


MUTATORS: tuple[Callable[[Random, Archive], None], ...] = (
    edit_header,
    edit_header,
    edit_header,
    edit_end,
    edit_end,
    edit_end,
    shift_sizes,
    lie_consistently,
    hostile_name,
    duplicate_entry,
    drop_entry,
    overlap,
    compress,
    set_flags,
    set_mode,
    add_extra,
    add_extra,
    add_junk,
    corrupt_content,
)
RARE_MUTATORS = (overlap_many, many_entries, nest_bomb)


def cut(rng: Random, data: bytes) -> bytes:
    """Cut off the end or the beginning, often right at a record or a byte beside it."""
    borders = [at for at in range(len(data)) if data[at : at + 2] == b"PK"] or [0]
    at = rng.choice(borders) + rng.choice((0, 0, 1, -1, 4, 22, 30, 46))
    at = max(0, min(at, len(data))) if rng.random() < 0.7 else rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.8 else data[at:]


def flip_bytes(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    borders = [at for at in range(len(data)) if data[at : at + 2] == b"PK"]
    for _ in range(rng.choice((1, 1, 2, 6))):
        near = rng.choice(borders) + rng.randrange(60)
        at = near if rng.random() < 0.7 and near < len(data) else rng.randrange(len(data))
        changed[at] = rng.choice((0, 0xFF, changed[at] ^ (1 << rng.randrange(8))))
    return bytes(changed)


def mutate(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Return the name of what was done first, and the changed archive."""
    if rng.random() < 0.2:
        mutator = rng.choice((cut, flip_bytes))
        return mutator.__name__, mutator(rng, data)
    archive = read(data)
    chosen = [rng.choice(MUTATORS) for _ in range(rng.choice((1, 1, 1, 2)))]
    if rng.random() < 0.02:
        chosen[0] = rng.choice(RARE_MUTATORS)
    for change in chosen:
        if archive.entries:
            change(rng, archive)
    return chosen[0].__name__, write(archive)
