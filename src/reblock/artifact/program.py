"""The `.rbln` file of the torch backend: a PT2 package with its memory plan inside.

A PT2 package is a zip archive whose entries are all stored as they are, without compression. One
entry, `reblock.json` or `<archive>/extra/reblock.json`, holds what reblock has to know:

    {
      "format_version": 1,
      "name": "prefill",
      "kvcache_num_blocks": 40,
      "alloc": {"Weight": [[4096]], ...},               bytes, [node][chiplet], all but the caches
      "dram": {"past_key_values_0": [[81920]], ...},    unaligned bytes of each cache, likewise
      "graph": {...}                                    the backend's own, kept as it is
    }

The caches are no part of the archive: they are allocated at load, with `dram` bytes. So another
block count is another JSON entry, and every other entry is copied without being understood.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.files import open_regular
from reblock.artifact.zip_check import check_end, check_entries
from reblock.errors import CorruptArtifact
from reblock.json_fields import MAX_JSON_BYTES, JsonFields, check_format_version, parse_json_object
from reblock.memory import ProgramMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reblock.memory import Grid

__all__ = [
    "ENTRY_NAME",
    "ProgramFile",
    "damage_reported",
    "is_description",
    "open_archive",
    "read_description",
    "read_program",
    "write_resized",
]

ENTRY_NAME = "reblock.json"
_KEYS = ("format_version", "name", "kvcache_num_blocks", "alloc", "dram", "graph")
# 8 EiB: no memory plan is near, and sums of many such numbers are still quick to compute.
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFile:
    """What the file of one compiled program says about itself, but for its graph.

    The graph can be large and only the backend reads it, so it is not kept.
    """

    name: str
    path: str
    kvcache_num_blocks: int
    memory: ProgramMemory

    @property
    def num_sizes(self) -> int:
        """How many sizes it reports, of caches and of all else, on all chiplets."""
        grids = (*self.memory.alloc.values(), *self.memory.caches.values())
        return sum(len(node) for grid in grids for node in grid)


def read_program(path: str) -> ProgramFile:
    """Return what the `.rbln` file at `path` says about itself.

    Raises:
        CorruptArtifact: it is missing, cut off, no zip archive, or its entry is not as it must be.
        UnknownFormat: a newer version of reblock wrote it.
    """
    try:
        with damage_reported(path), open_archive(path) as archive:
            return _parse(read_description(archive, path))
    except OSError as error:
        raise CorruptArtifact(f"cannot be read: {error.strerror}", path=path) from error


def write_resized(
    source: str, destination: str, *, dram: Mapping[str, Grid], num_blocks: int
) -> None:
    """Write the program at `source` to `destination` with other cache sizes.

    Args:
        source: A `.rbln` file; never written.
        destination: A path where nothing is yet.
        dram: The unaligned bytes of every cache at `num_blocks`.
        num_blocks: The new block count.

    Raises:
        CorruptArtifact: the source is not as it must be; every entry is checked on the way.
        OSError: the destination cannot be written.
    """
    with (
        damage_reported(source),
        open_archive(source) as archive,
        zipfile.ZipFile(destination, "x") as out,
    ):
        description = read_description(archive, source).values
        description |= {"kvcache_num_blocks": num_blocks, "dram": dram}
        for info in archive.infolist():
            copied = _stored_like(info)
            if is_description(info):
                out.writestr(copied, json.dumps(description, allow_nan=False))
                continue
            with archive.open(info) as reader, out.open(copied, "w") as writer:
                shutil.copyfileobj(reader, writer, 2**20)


def _stored_like(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    new = zipfile.ZipInfo(info.filename, info.date_time)
    new.external_attr = info.external_attr
    new.create_system = info.create_system
    new.file_size = info.file_size  # decides whether the entry is written with 64-bit sizes
    return new


@contextmanager
def damage_reported(path: str) -> Iterator[None]:
    """Turn what zipfile raises for damaged archives into CorruptArtifact."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        EOFError,
        OverflowError,
        RuntimeError,
        ValueError,  # of a seek to an impossible place, and of text that is none
        struct.error,
    ) as error:
        raise CorruptArtifact(f"is damaged or cut off: {error}", path=path) from error


@contextmanager
def open_archive(path: str) -> Iterator[zipfile.ZipFile]:
    """Give the archive at `path`, with everything checked but the content of its entries."""
    with open_regular(path) as file:
        check_end(file, path)
        with zipfile.ZipFile(file) as archive:
            check_entries(archive, file, path)
            yield archive


def is_description(info: zipfile.ZipInfo) -> bool:
    """Return whether an entry is the JSON that describes the program."""
    return info.filename == ENTRY_NAME or info.filename.endswith(f"/extra/{ENTRY_NAME}")


def read_description(archive: zipfile.ZipFile, path: str) -> JsonFields:
    """Return the JSON that describes the program, its format known but its values unchecked."""
    entries = [info for info in archive.infolist() if is_description(info)]
    if len(entries) != 1:
        raise CorruptArtifact(f"must hold one {ENTRY_NAME}, but holds {len(entries)}", path=path)
    if entries[0].file_size > MAX_JSON_BYTES:
        raise CorruptArtifact(f"its {ENTRY_NAME} is above {MAX_JSON_BYTES:,} bytes", path=path)
    raw = parse_json_object(archive.read(entries[0]), path=path)
    fields = JsonFields(raw, path=path, prefix=f"{ENTRY_NAME}: ")
    check_format_version(fields)
    fields.refuse_unknown(_KEYS)
    return fields


def _parse(fields: JsonFields) -> ProgramFile:
    memory = ProgramMemory(
        name=fields.text("name"), alloc=_grids(fields, "alloc"), caches=_grids(fields, "dram")
    )
    fields.nested("graph")
    return ProgramFile(
        name=memory.name,
        path=fields.path,
        kvcache_num_blocks=fields.integer("kvcache_num_blocks"),
        memory=memory,
    )


def _grids(fields: JsonFields, key: str) -> dict[str, Grid]:
    sizes = fields.nested(key)
    return {name: _grid(sizes, name) for name in sizes.values}


def _grid(fields: JsonFields, name: str) -> Grid:
    value = fields.values[name]
    if isinstance(value, list) and value and all(_is_node(node) for node in value):
        return tuple(tuple(node) for node in value)
    raise fields.corrupt(name, "must be a list of lists of bytes, [node][chiplet]")


def _is_node(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(size) is int and 0 <= size <= _MAX_BYTES for size in value)
    )
