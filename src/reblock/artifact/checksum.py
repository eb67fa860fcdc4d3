"""Digests that tell whether the files of an artifact are still those that were compiled.

The digest of a program covers all that a resize leaves alone, so that a resize does not change it:

    every entry of the archive but the description, in the order of the archive
    the description without `kvcache_num_blocks` and `dram`, as JSON with its keys sorted

Each of them is its name, the length of its content and the content; lengths, that of the name
too, are 8 bytes, the highest first. The description's name is empty.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.files import open_regular
from reblock.artifact.program import (
    damage_reported,
    is_description,
    open_archive,
    read_description,
)
from reblock.errors import CorruptArtifact

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Callable, Mapping

__all__ = ["DigestedProgram", "check_digest", "copy_digested", "file_digest", "program_digest"]

_CHUNK_BYTES = 2**20
# What a resize replaces in a description.
_RESIZED_KEYS = ("kvcache_num_blocks", "dram")


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedProgram:
    """The digest of a program and the graph that it covers."""

    sha256: str
    graph: Mapping[str, object]


def file_digest(path: str, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits.

    Args:
        path: A regular file.
        on_bytes: Told how many bytes more were read, every now and then.

    Raises:
        CorruptArtifact: It is missing or no regular file.
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(path) as file:
        while num_read := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:num_read])
            if on_bytes is not None:
                on_bytes(num_read)
    return digest.hexdigest()


def program_digest(path: str) -> str:
    """Return the digest of the program at `path`, whatever its block count is.

    Raises:
        CorruptArtifact: The file is missing or damaged.
        OSError: It cannot be read.
    """
    return copy_digested(path, lambda _name: None).sha256


def copy_digested(path: str, copy_to: Callable[[str], str | None]) -> DigestedProgram:
    """Return the digest of the program at `path`, and write entries of it elsewhere on the way.

    What was written is what was digested, even where the file changes at the same time.

    Args:
        path: A `.rbln` file.
        copy_to: Returns for the name of an entry the path to write it to, or None.

    Raises:
        CorruptArtifact: The file is missing or damaged.
        OSError: It cannot be read, or a copy cannot be written.
    """
    digest = hashlib.sha256()
    with damage_reported(path), open_archive(path) as archive:
        for info in archive.infolist():
            if not is_description(info):
                _start_part(digest, info.filename.encode(), info.file_size)
                _digest_entry(digest, archive, info, copy_to(info.filename))
        description = read_description(archive, path)
    kept = {key: value for key, value in description.values.items() if key not in _RESIZED_KEYS}
    content = json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    _start_part(digest, b"", len(content))
    digest.update(content)
    return DigestedProgram(sha256=digest.hexdigest(), graph=description.nested("graph").values)


def check_digest(found: str, expected: str, *, path: str) -> None:
    """Refuse the file at `path` where its digest is not the `expected` one.

    Raises:
        CorruptArtifact: It is another one.
    """
    if found != expected:
        raise CorruptArtifact(
            f"its content is not what was compiled: its sha256 is {found} and should be "
            f"{expected}; restore the file, or compile the model again",
            path=path,
        )


def _start_part(digest: hashlib._Hash, name: bytes, num_bytes: int) -> None:
    digest.update(len(name).to_bytes(8, "big") + name + num_bytes.to_bytes(8, "big"))


def _digest_entry(
    digest: hashlib._Hash, archive: zipfile.ZipFile, info: zipfile.ZipInfo, copy: str | None
) -> None:
    with (
        archive.open(info) as entry,
        nullcontext() if copy is None else open(copy, "xb") as file,
    ):
        while chunk := entry.read(_CHUNK_BYTES):
            digest.update(chunk)
            if file is not None:
                file.write(chunk)
