"""The smallest artifact with all kinds of entries, and what is on the disk of it and beside it."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artifacts import make_artifact, read_config, write_config

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = 16, 20
# Above what `--output-dir` copies rather than links. It takes no room on the disk.
_LARGE_BYTES = 17 * 2**20
_LONG_AGO_S = 1_500_000_000
_ATTRIBUTE = "user.reblock-test"
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "pipe",
}


def make_small_artifact(directory: Path, num_blocks: int = OLD) -> Path:
    """Write an artifact of two programs at `directory` and return the directory."""
    make_artifact(directory, num_blocks=num_blocks)
    config = read_config(directory)
    config["decoder_batch_sizes"] = [4]
    config["_compile_cfgs"] = [
        program
        for program in config["_compile_cfgs"]
        if program["compiled_model_name"] != "decoder_batch_1"
    ]
    programs = config["reblock"].get("programs")
    if programs is not None:
        del programs["decoder_batch_1"]
    write_config(directory, config)
    (directory / "decoder_batch_1.rbln").unlink()
    (directory / "README.md").write_text("Not known to reblock, and read-only.\n")
    (directory / "README.md").chmod(0o444)
    (directory / "prefill.rbln").chmod(0o640)
    (directory / "assets").mkdir()
    (directory / "assets" / "notes.txt").write_text("notes\n")
    (directory / "empty").mkdir(mode=0o750)
    (directory / "latest").symlink_to("config.json")
    with open(directory / "assets" / "large.bin", "wb") as file:
        file.truncate(_LARGE_BYTES)
    for name in ("config.json", "prefill.rbln", "rbln_config.json", "assets"):
        set_attribute(directory / name)
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (_LONG_AGO_S, _LONG_AGO_S), follow_symlinks=False)
    return directory


def set_attribute(path: Path) -> None:
    """Give a file an extended attribute, where the file system has them."""
    try:
        os.setxattr(path, _ATTRIBUTE, b"kept")
    except OSError:
        return


def copy_tree(source: Path, destination: Path) -> None:
    """Copy a directory with everything that a `listing` shows; large files stay sparse."""
    shutil.copytree(
        source, destination, symlinks=True, copy_function=_copy_file, dirs_exist_ok=True
    )


def _copy_file(source: str, destination: str) -> None:
    status = os.stat(source)
    if status.st_blocks:
        shutil.copy2(source, destination)
        return
    with open(destination, "wb") as file:
        file.truncate(status.st_size)
    shutil.copystat(source, destination)


def clear(directory: Path, *, keep: Path | None = None) -> None:
    """Remove all that is in a directory, but neither the directory nor `keep`."""
    for entry in list(os.scandir(directory)):
        if keep is not None and entry.path == str(keep):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, directory or link; what a file holds, or where a link leads, is in `content`."""

    kind: str
    mode: str
    owner: tuple[int, int]
    attributes: tuple[tuple[str, bytes], ...]
    changed_at_ns: int
    content: str


def listing(directory: Path, *, has_all_times: bool = False) -> dict[str, Entry]:
    """Return everything below `directory`, by its path relative to it.

    Times are those of files that an edit carries over, and 0 for all else, unless all are asked
    for.
    """
    found = {}
    for root, directories, files in os.walk(directory):
        for name in [*directories, *files]:
            path = os.path.join(root, name)
            has_time = has_all_times or (
                name in files and not os.path.islink(path) and not is_written(name)
            )
            found[os.path.relpath(path, directory)] = _entry(path, has_time=has_time)
    return found


def _entry(path: str, *, has_time: bool) -> Entry:
    status = os.lstat(path)
    return Entry(
        kind=_KINDS[stat.S_IFMT(status.st_mode)],
        mode=oct(stat.S_IMODE(status.st_mode)),
        owner=(status.st_uid, status.st_gid),
        attributes=_attributes(path),
        changed_at_ns=status.st_mtime_ns if has_time else 0,
        content=_content(path, status),
    )


def is_written(name: str) -> bool:
    """Return whether an edit writes the file again, so that its times are those of the edit."""
    return name in ("rbln_config.json", ".reblock.json") or name.endswith(".rbln")


def _attributes(path: str) -> tuple[tuple[str, bytes], ...]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return ()
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names))


def _content(path: str, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(status.st_mode):
        return ""
    if not status.st_blocks and status.st_size >= _LARGE_BYTES:
        return f"{status.st_size} zeros"
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest if status.st_size < _LARGE_BYTES else _zeros_or(digest, status.st_size)


def _zeros_or(digest: str, size: int) -> str:
    is_zeros = digest == hashlib.sha256(bytes(size)).hexdigest()
    return f"{size} zeros" if is_zeros else digest


def differences(found: dict[str, Entry], expected: dict[str, Entry]) -> list[str]:
    """Return one line for each path on which two listings do not agree."""
    lines = []
    for path in sorted({*found, *expected}):
        one, other = found.get(path), expected.get(path)
        if one is None or other is None:
            lines.append(f"{path} is {'missing' if one is None else 'there'}")
        elif one != other:
            names = [name for name in Entry.__slots__ if getattr(one, name) != getattr(other, name)]
            lines.append(f"{path} has another {' and '.join(names)}")
    return lines
