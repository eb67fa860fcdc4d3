"""Mutations of what lies in the file system where a file of an artifact should be, or beside it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

_TIB = 2**40


def missing(rng: Random, path: str) -> None:
    pass


def empty(rng: Random, path: str) -> None:
    _write(path, b"")


def pipe(rng: Random, path: str) -> None:
    os.mkfifo(path)


def socket(rng: Random, path: str) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def directory(rng: Random, path: str) -> None:
    os.mkdir(path)
    if rng.random() < 0.5:
        _write(os.path.join(path, "x"), b"x")


def link(rng: Random, path: str) -> None:
    targets = ("/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/self/environ")
    targets += ("/proc/kmsg", "/etc/passwd", "nowhere", ".", "..", "/", os.path.basename(path))
    os.symlink(rng.choice(targets), path)


def link_loop(rng: Random, path: str) -> None:
    os.symlink(os.path.basename(path) + ".loop", path)
    os.symlink(os.path.basename(path), path + ".loop")


def sparse(rng: Random, path: str) -> None:
    _write(path, rng.choice((b"", b"{", b'{"kvcache_num_blocks": 16}', b" ")))
    os.truncate(path, _TIB)


def sparse_archive(rng: Random, path: str) -> None:
    """A file of 10 GB that says that 9 GB of it are the directory of an archive."""
    size, length = 10 * 10**9, 9 * 10**9
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    start = size - 98
    count = rng.choice((1, 3, 10**6, 2**63))
    record = (44, 45, 45, 0, 0, count, count, length, start - length)
    end_64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", *record)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start, 1)
    _write(path, b"")
    os.truncate(path, start)
    with open(path, "ab") as file:
        file.write(end_64 + locator + end)


def swapped(rng: Random, path: str) -> None:
    """Another file of the artifact under this name."""
    folder = os.path.dirname(path)
    names = sorted(os.listdir(folder))
    files = [name for name in names if os.path.isfile(os.path.join(folder, name))]
    if files:
        os.link(os.path.join(folder, rng.choice(files)), path)


REPLACEMENTS: tuple[Callable[[Random, str], None], ...] = (
    missing,
    empty,
    pipe,
    socket,
    directory,
    link,
    link,
    link_loop,
    sparse,
    sparse_archive,
    swapped,
)


def replace(rng: Random, folder: str, name: str, how: Callable[[Random, str], None]) -> None:
    path = os.path.join(folder, name)
    if os.path.lexists(path):
        os.unlink(path)
    how(rng, path)


def plant_journal(rng: Random, folder: str, victim: str) -> None:
    """Leave what looks like an edit to be finished, with ways out of the artifact in it."""
    journal = os.path.join(folder, ".reblock-edit")
    where = rng.randrange(6)
    if where == 0:
        rng.choice((empty, pipe, socket, link, link_loop))(rng, journal)
        return
    if where == 1:
        os.symlink(victim, journal)
        return
    os.mkdir(journal)
    for name in ("committed", "staged"):
        path = os.path.join(journal, name)
        how = rng.randrange(5)
        if how == 0:
            os.symlink(victim, path)
        elif how == 1:
            rng.choice((empty, pipe, link, link_loop, directory))(rng, path)
        elif how == 2:
            os.mkdir(path)
            _plant_files(rng, folder, path, victim)


def _plant_files(rng: Random, folder: str, path: str, victim: str) -> None:
    for name in ("rbln_config.json", "prefill.rbln", "x", "weights.safetensors"):
        target = os.path.join(path, name)
        how = rng.randrange(5)
        if how == 0:
            rng.choice(REPLACEMENTS)(rng, target)
        elif how == 1:
            os.symlink(os.path.join(victim, "secret"), target)
        elif how == 2 and os.path.isfile(os.path.join(folder, name)):
            shutil.copy(os.path.join(folder, name), target)


def plant_beside(rng: Random, folder: str, victim: str) -> None:
    """Leave what looks like the stage of an edit that was cut off, beside the artifact."""
    parent, name = os.path.split(folder)
    stage = os.path.join(parent, f".{name}.reblock-0123abcd")
    for path in (stage, stage + ".lock", stage + "-old"):
        how = rng.randrange(5)
        if how == 0:
            os.symlink(victim, path)
        elif how == 1:
            rng.choice((empty, pipe, link, link_loop, directory))(rng, path)
        elif how == 2:
            os.mkdir(path)
            os.symlink(victim, os.path.join(path, "x"))
            os.mkdir(os.path.join(path, "y"))
        elif how == 3:
            _write(path, rng.randbytes(20))


def plant_history(rng: Random, folder: str) -> None:
    """Write a `.reblock.json` that says something odd of the count before the last change."""
    text = json.dumps({"format_version": 1, "previous_kvcache_num_blocks": rng.choice((9, 24))})
    _write(os.path.join(folder, ".reblock.json"), text.encode())


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
