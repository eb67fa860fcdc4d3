"""What counts as a change of the file system, and that a killed call is not made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench import WAYS, places
from tracing import changes_file_system, parse_log
from trees import NEW, OLD

if TYPE_CHECKING:
    from pathlib import Path

    from bench import Way

_CHANGING = """\
openat(AT_FDCWD</base>, "/base/file", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0666) = 7</base/file>
openat(AT_FDCWD</base>, "/base", O_RDWR|O_TMPFILE, 0600) = 7</base/#1 (deleted)>
write(7</base/file>, ""..., 387) = 387
sendfile(7</base/file>, 8</base/other>, [0] => [19], 8388608) = 19
copy_file_range(8</base/other>, NULL, 7</base/file>, NULL, 100, 0) = 100
ioctl(7</base/file>, BTRFS_IOC_CLONE or FICLONE, 8</base/other>) = -1 EOPNOTSUPP (...)
mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 7</base/file>, 0) = 0x7f5e2c6f9000
fsync(7</base/file>) = 0
renameat2(AT_FDCWD</base>, "/base/a", AT_FDCWD</base>, "/base/b", RENAME_EXCHANGE) = 0
a_call_of_tomorrow(7</base/file>) = 0
"""
_HARMLESS = """\
read(7</base/file>, ""..., 4096) = 19
openat(AT_FDCWD</base>, "/base/file", O_RDONLY|O_CLOEXEC) = 7</base/file>
openat(AT_FDCWD</base>, "/dev/null", O_WRONLY|O_CLOEXEC) = 7</dev/null>
write(1<pipe:[82412]>, ""..., 127) = 127
write(2</dev/null>, ""..., 127) = 127
ioctl(7</base/file>, TCGETS, 0x7ffd6a0b2f10) = -1 ENOTTY (Inappropriate ioctl for device)
mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f5e2c6f9000
--- SIGTERM {si_signo=SIGTERM, si_code=SI_USER, si_pid=1, si_uid=0} ---
+++ exited with 0 +++
"""


def test_a_call_counts_as_a_change_unless_it_is_known_not_to_be_one() -> None:
    changing = parse_log(_CHANGING, "/base")
    assert len(changing) == len(_CHANGING.splitlines())
    assert [call for call in changing if not changes_file_system(call)] == []
    harmless = parse_log(_HARMLESS, "/base")
    assert len(harmless) == len(_HARMLESS.splitlines()) - 2
    assert [call for call in harmless if changes_file_system(call)] == []


def test_calls_are_counted_by_name_and_compared_without_what_is_random() -> None:
    first, second, third = parse_log(
        'mkdir("/base/.artifact.reblock-0123abcd", 0777) = 0\n'
        "fsync(3</base>) = 0\n"
        'mkdir("/base/.artifact.reblock-4567cdef", 0777) = -1 EEXIST (File exists)\n',
        "/base",
    )
    assert [(call.name, call.nth) for call in (first, second, third)] == [
        ("mkdir", 1),
        ("fsync", 1),
        ("mkdir", 2),
    ]
    assert first.arguments == third.arguments
    assert (first.has_succeeded, third.has_succeeded) == (True, False)


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_call_is_not_made_and_those_before_it_are(tmp_path: Path, way: Way) -> None:
    with places(tmp_path, way) as (place, _):
        place.reset()
        place.server.kill_at(place.calls[0], *place.edit)
        assert place.strays(OLD) == []
        place.reset()
        place.server.kill_at(place.calls[1], *place.edit)
        assert place.strays(OLD) != []
        assert place.strays(NEW) != []
