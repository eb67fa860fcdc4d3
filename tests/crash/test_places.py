"""Edits of artifacts in unusual places: mounted, linked, shared, and where little is allowed.

What cannot be mounted here - a file system without hard links, or without an exchange - is stood
in for by a filter of system calls (seccomp), which lets the calls in question fail for the command.
"""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from bench import MOUNTED_ON_ITSELF, VERIFY
from namespaces import NO_EXCHANGE, NO_LINKS, need_filters, need_mounts, need_overlay
from tracing import CommandServer, need_strace
from trees import NEW, OLD, clear, copy_tree, differences, is_written, listing, make_small_artifact

from artifacts import read_config, read_description
from reblock.artifact.reader import open_artifact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tracing import Outcome
    from trees import Entry

_PREVIOUS = ".reblock.json"
_TMPFS = 'mount -t tmpfs -o mode=755,size=64m tmpfs "$1/{0}"'
_FILLED = f'{_TMPFS.format("parent/artifact")}; cp -a "$1/template/." "$1/parent/artifact"'
_READ_ONLY = f'{MOUNTED_ON_ITSELF}; mount -o remount,bind,ro "$1/parent/artifact"'
_OVERLAY = """
mount -t tmpfs -o mode=755 tmpfs "$1/parent"
mkdir "$1/parent/lower" "$1/parent/upper" "$1/parent/work" "$1/parent/merged"
cp -a "$1/template" "$1/parent/lower/artifact"
options="lowerdir=$1/parent/lower,upperdir=$1/parent/upper,workdir=$1/parent/work"
mount -t overlay -o "$options,userxattr" overlay "$1/parent/merged"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An artifact in a place, and a server that runs commands there.

    `directory` is what commands are given, `real` is where it is in truth, and `around` the
    directory in which nothing else may appear but `output`.
    """

    server: CommandServer
    directory: Path
    real: Path
    around: Path
    output: Path

    def run(self, *argv: str | Path) -> Outcome:
        return self.server.run(*argv)

    def seen(self, path: Path | None = None) -> dict[str, Entry]:
        return listing(self.server.seen(path or self.around), has_all_times=True)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with an artifact at parent/artifact, and its like at template."""
    make_small_artifact(tmp_path / "template")
    copy_tree(tmp_path / "template", tmp_path / "parent" / "artifact")
    return tmp_path


@contextmanager
def site(
    base: Path,
    mounts: str = "",
    *,
    directory: str = "parent/artifact",
    real: str = "parent/artifact",
    around: str = "parent",
    refused: Sequence[tuple[str, int]] = (),
    prefix: Sequence[str] | None = None,
) -> Iterator[Site]:
    """Yield the artifact at `directory`, after `mounts` were made."""
    if mounts:
        need_mounts()
    with CommandServer(base, mounts=mounts, prefix=prefix, refused=refused) as server:
        yield Site(
            server=server,
            directory=base / directory,
            real=base / real,
            around=base / around,
            output=base / around / "output",
        )


def check_all(site: Site, *, linked: Sequence[str] = ()) -> None:
    """Read, verify, copy and resize the artifact, and check what is there after each."""
    before = site.seen()
    check_reads(site, site.directory, OLD)
    assert differences(site.seen(), before) == []
    check_copy(site)
    check_in_place(site, linked=linked)
    result = site.run("set", site.directory, "--previous")
    assert result.code == 0, result.stderr
    check_reads(site, site.directory, OLD)


def check_reads(site: Site, directory: Path, count: int) -> None:
    for command in (("get",), VERIFY, ("inspect", "--json")):
        result = site.run(*command, directory)
        assert result.code == 0, (command, result.stderr)
        assert result.stderr == ""
    assert site.run("get", directory).stdout == f"{count}\n"


def check_copy(site: Site) -> None:
    """Check that a copy is whole and carries all over, and that nothing else has changed."""
    before, source = site.seen(), site.seen(site.real)
    result = site.run("set", site.directory, str(NEW), "--output-dir", site.output)
    assert result.code == 0, result.stderr
    check_reads(site, site.output, NEW)
    check_carried(source, site.seen(site.output), is_copy=True)
    name = site.output.name
    rest = {path: e for path, e in site.seen().items() if path.split("/")[0] != name}
    assert differences(rest, before) == []


def check_in_place(site: Site, *, linked: Sequence[str] = ()) -> None:
    """Check that a resize in place carries all over and leaves nothing beside it."""
    before, source = set(site.seen()), site.seen(site.real)
    result = site.run("set", site.directory, str(NEW))
    assert result.code == 0, result.stderr
    check_reads(site, site.directory, NEW)
    check_carried(source, site.seen(site.real), linked=linked)
    new = set(site.seen()) - before
    assert {path.rsplit("/", 1)[-1] for path in new} <= {_PREVIOUS}
    assert before <= set(site.seen())


def check_carried(
    source: dict[str, Entry],
    edited: dict[str, Entry],
    *,
    linked: Sequence[str] = (),
    is_copy: bool = False,
) -> None:
    """Check that all is as it was but what the edit writes, and that as well in all but content.

    `linked` are files that were links and are files now that they have been written. In a copy,
    links that lead out of the artifact are the files they led to.
    """
    assert set(edited) - set(source) == {_PREVIOUS}
    expected = {path: _expected(entry, edited.get(path)) for path, entry in source.items()}
    ignored = {_PREVIOUS, *linked}
    if is_copy:
        ignored |= {path for path, entry in source.items() if entry.content.startswith("..")}
    found = {path: e for path, e in edited.items() if path not in ignored}
    assert differences(found, {p: e for p, e in expected.items() if p not in ignored}) == []
    assert all(edited[path].kind == "file" for path in linked)


def _expected(before: Entry, now: Entry | None) -> Entry:
    if now is None or before.kind != "file" or before.content == now.content:
        return before
    return replace(before, content=now.content, changed_at_ns=now.changed_at_ns)


def test_what_may_change_in_an_edit_does_and_nothing_else(base: Path) -> None:
    with site(base) as here:
        source = here.seen(here.real)
        check_all(here)
        assert here.run("set", here.directory, str(NEW)).code == 0
        edited = here.seen(here.real)
    changed = {path for path, entry in source.items() if edited[path].content != entry.content}
    assert changed == {path for path in source if is_written(path)}


def test_an_artifact_that_is_a_mount_point(base: Path) -> None:
    with site(base, MOUNTED_ON_ITSELF) as here:
        check_all(here)


def test_an_artifact_on_another_device_than_the_directory_that_holds_it(base: Path) -> None:
    with site(base, _FILLED) as here:
        assert here.server.seen(here.real).stat().st_dev != here.around.stat().st_dev
        check_all(here)


@pytest.mark.parametrize("is_relative", [True, False])
def test_an_artifact_behind_a_symbolic_link(base: Path, is_relative: bool) -> None:
    text = "../parent/artifact" if is_relative else base / "parent" / "artifact"
    (base / "links").mkdir()
    (base / "links" / "link").symlink_to(text)
    with site(base, directory="links/link") as here:
        check_all(here)
    assert os.readlink(base / "links" / "link") == str(text)
    assert os.listdir(base / "links") == ["link"]


def test_an_artifact_behind_a_chain_of_symbolic_links(base: Path) -> None:
    (base / "links").mkdir()
    (base / "links" / "third").symlink_to(base / "parent" / "artifact")
    (base / "links" / "second").symlink_to("third")
    (base / "links" / "first").symlink_to(base / "links" / "second")
    with site(base, directory="links/first") as here:
        check_all(here)
    assert sorted(os.listdir(base / "links")) == ["first", "second", "third"]
    assert all((base / "links" / name).is_symlink() for name in ("first", "second", "third"))


def test_an_artifact_behind_a_link_on_another_file_system(base: Path) -> None:
    (base / "links").mkdir()
    mounts = f'{_TMPFS.format("links")}; ln -s "$1/parent/artifact" "$1/links/link"'
    with site(base, mounts, directory="links/link") as here:
        check_all(here)
        assert os.listdir(here.server.seen(base / "links")) == ["link"]


def test_an_artifact_in_a_directory_that_one_may_not_write(base: Path) -> None:
    (base / "outputs").mkdir()
    # Root is a user like any other without this: then only the owner's bits count.
    as_user = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    prefix = as_user if os.geteuid() == 0 else []
    (base / "parent").chmod(0o555)
    try:
        with site(base, prefix=prefix) as here:
            outside = replace(here, around=base / "outputs", output=base / "outputs" / "output")
            check_reads(here, here.directory, OLD)
            refused = here.run("set", here.directory, str(NEW), "--output-dir", here.output)
            check_refusal(refused, str(here.around))
            check_copy(outside)
            check_in_place(here)
    finally:
        (base / "parent").chmod(0o755)


def test_an_artifact_that_one_may_only_read(base: Path) -> None:
    with site(base, _READ_ONLY) as here:
        before = here.seen()
        check_reads(here, here.directory, OLD)
        refused = here.run("set", here.directory, str(NEW))
        check_refusal(refused, str(here.directory))
        assert differences(here.seen(), before) == []
        check_copy(here)


def check_refusal(outcome: Outcome, *fragments: str) -> None:
    assert (outcome.code, outcome.stdout) == (1, ""), outcome
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("reblock: error: ")
    for fragment in fragments:
        assert fragment in line


def test_a_journal_that_was_not_finished_is_read_where_nothing_may_be_written(base: Path) -> None:
    need_strace()
    with site(base, MOUNTED_ON_ITSELF) as here:
        calls, _ = here.server.record("set", here.directory, str(NEW))
        commit = next(n for n, call in enumerate(calls) if 'committed"' in call.arguments)
        for call in calls[commit + 1 :]:
            clear(here.real)
            copy_tree(base / "template", here.real)
            here.server.kill_at(call, "set", here.directory, str(NEW))
            check_reads_past_journal(here, base)
    assert calls[commit].name.startswith("rename")
    assert len(calls) > commit + 2


def check_reads_past_journal(here: Site, base: Path) -> None:
    before = here.seen()
    for command in (("get",), VERIFY, ("inspect",)):
        result = here.server.run(*command, here.directory, read_only=base)
        assert (result.code, result.stderr) == (0, "")
        if command == ("get",):
            assert result.stdout == f"{NEW}\n"
    refused = here.server.run("set", here.directory, "18", read_only=base)
    check_refusal(refused, str(here.directory))
    assert differences(here.seen(), before) == []


def make_shared_store(base: Path) -> Path:
    """Make of the artifact at parent/artifact one of links to read-only files, as a cache does."""
    snapshot = base / "parent" / "artifact"
    blobs = base / "parent" / "blobs"
    blobs.mkdir()
    for path in [path for path in snapshot.rglob("*") if path.is_file() and not path.is_symlink()]:
        blob = blobs / hashlib.sha256(str(path.relative_to(base)).encode()).hexdigest()
        path.rename(blob)
        blob.chmod(0o444)
        path.symlink_to(os.path.relpath(blob, path.parent))
    return blobs


def test_an_artifact_of_links_to_read_only_files_in_a_shared_store(base: Path) -> None:
    blobs = make_shared_store(base)
    before = listing(blobs, has_all_times=True)
    numbers = {path.name: path.stat().st_ino for path in blobs.iterdir()}
    source = listing(base / "parent" / "artifact")
    with site(base) as here:
        check_all(here, linked=[path for path in source if is_written(path)])
        assert differences(listing(blobs, has_all_times=True), before) == []
        assert numbers == {path.name: path.stat().st_ino for path in blobs.iterdir()}
        # A copy stands on its own: whoever empties the store does not take its files along.
        assert not [p for p in here.output.rglob("*") if p.is_symlink() and p.name != "latest"]
        output = listing(here.output)
    assert output["latest"].content == "config.json"
    sizes = {path: (base / "parent/artifact" / path).stat().st_size for path in source}
    assert all(
        (base / "parent/output" / path).stat().st_size == sizes[path]
        for path in source
        if not is_written(path)
    )


def test_a_directory_that_shares_its_files_by_hard_links_stays_as_it_is(base: Path) -> None:
    twin = base / "twin"
    for path in [path for path in (base / "parent" / "artifact").rglob("*") if path.is_file()]:
        other = twin / path.relative_to(base / "parent" / "artifact")
        other.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, other, follow_symlinks=False)
    before = listing(twin, has_all_times=True)
    with site(base) as here:
        check_all(here)
    assert differences(listing(twin, has_all_times=True), before) == []


LINKS_UNKNOWN = [("link", errno.EOPNOTSUPP), ("linkat", errno.EOPNOTSUPP)]
EXCHANGE_UNKNOWN = [("renameat2", errno.ENOSYS)]


@pytest.mark.parametrize(
    "refused",
    [NO_LINKS, LINKS_UNKNOWN, NO_EXCHANGE, EXCHANGE_UNKNOWN, NO_LINKS + NO_EXCHANGE],
    ids=["no-links", "links-unknown", "no-exchange", "exchange-unknown", "neither"],
)
def test_a_file_system_that_knows_less(base: Path, refused: list[tuple[str, int]]) -> None:
    need_filters()
    with site(base, refused=refused) as here:
        check_all(here)


def test_a_mount_point_on_a_file_system_without_hard_links(base: Path) -> None:
    need_filters()
    with site(base, MOUNTED_ON_ITSELF, refused=NO_LINKS) as here:
        check_all(here)


def test_an_artifact_in_the_lower_directory_of_an_overlay(base: Path) -> None:
    need_overlay()
    merged = "parent/merged"
    place = f"{merged}/artifact"
    with site(base, _OVERLAY, directory=place, real=place, around=merged) as here:
        before = here.seen(base / "parent" / "lower")
        check_all(here)
        assert differences(here.seen(base / "parent" / "lower"), before) == []


def test_programs_and_configuration_agree_after_an_edit(base: Path) -> None:
    with site(base) as here:
        assert here.run("set", here.directory, str(NEW)).code == 0
    artifact = open_artifact(str(here.real))
    assert {p.kvcache_num_blocks for p in artifact.programs} == {NEW}
    assert read_config(here.real)["kvcache_num_blocks"] == NEW
    assert read_description(here.real / "prefill.rbln")["kvcache_num_blocks"] == NEW
