"""One edit of an artifact at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import fingerprint, make_artifact
from reblock.artifact.count import read_num_blocks
from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import apply_resize, plan_resize
from reblock.artifact.transaction import lock as lock_module
from reblock.artifact.transaction.lock import edit_lock
from reblock.errors import ArtifactBusy, EditFailed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", num_blocks=16)


def replace(directory: Path) -> None:
    """Put another directory, a copy in all that counts here, where an artifact is."""
    directory.rename(directory.with_name("old"))
    make_artifact(directory, num_blocks=17)


def test_a_lock_ends_with_its_context(directory: Path) -> None:
    for _ in range(2):
        with edit_lock(str(directory)) as lock:
            lock.check()


def test_a_second_edit_waits_and_locks_what_the_first_has_put_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_NOTICE_S", 0)
    waiting, entered = threading.Event(), threading.Event()
    calls: list[str] = []

    def tell(holder: str) -> None:
        calls.append(holder)
        waiting.set()

    def second() -> None:
        with edit_lock(str(directory), on_wait=tell) as lock:
            lock.check()
            entered.set()

    thread = threading.Thread(target=second)
    with edit_lock(str(directory)):
        thread.start()
        assert waiting.wait(10)
        replace(directory)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()
    assert len(calls) == 1


def test_who_waits_too_long_is_told_who_holds_the_lock(directory: Path) -> None:
    script = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for timeout_s in (0, 0.05):
            with (
                pytest.raises(ArtifactBusy, match="--lock-timeout") as caught,
                edit_lock(str(directory), timeout_s=timeout_s),
            ):
                pass
            # Not every system shows the locks of other processes.
            assert caught.value.holder == "another process" or (
                f"process {holder.pid} (" in caught.value.holder
                and str(directory) in caught.value.holder
            )
        holder.kill()
    # A lock dies with its process.
    with edit_lock(str(directory), timeout_s=0):
        pass


def test_a_holder_that_the_system_does_not_tell_is_another_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "open", refuse_to_open, raising=False)
    with (
        edit_lock(str(directory)),
        pytest.raises(ArtifactBusy, match="by another process"),
        edit_lock(str(directory), timeout_s=0),
    ):
        pass


def refuse_to_open(*arguments: Any, **keywords: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_check_refuses_a_directory_that_was_replaced_or_is_gone(directory: Path) -> None:
    with edit_lock(str(directory)) as lock:
        replace(directory)
        with pytest.raises(EditFailed, match="run it again"):
            lock.check()
        directory.rename(directory.with_name("gone"))
        with pytest.raises(EditFailed, match="run it again"):
            lock.check()


def test_a_file_system_without_locks_still_has_the_check(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with edit_lock(str(directory)) as lock:
        replace(directory)
        with pytest.raises(EditFailed):
            lock.check()


def test_a_directory_that_cannot_be_opened_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(EditFailed, match="No such file"), edit_lock(str(tmp_path / "absent")):
        pass


def test_apply_resize_refuses_an_artifact_that_has_changed_since_it_was_opened(
    directory: Path,
) -> None:
    artifact = open_artifact(str(directory))
    apply_resize(artifact, plan_resize(artifact, 20))
    before = fingerprint(directory.parent)
    with pytest.raises(EditFailed, match="was changed since it was opened"):
        apply_resize(artifact, plan_resize(artifact, 24))
    assert fingerprint(directory.parent) == before
    assert read_num_blocks(str(directory)) == 20


@pytest.mark.parametrize("output_dir", [None, "out"])
def test_apply_resize_refuses_a_source_that_is_replaced_on_the_way(
    directory: Path, output_dir: str | None
) -> None:
    with edit_lock(str(directory)) as lock:
        artifact = open_artifact(str(directory))
        plan = plan_resize(artifact, 20)
        directory.rename(directory.with_name("old"))
        os.symlink("old", directory)  # whole, and still what the lock is on
        lock.check()
        os.unlink(directory)
        make_artifact(directory, num_blocks=16)
        out = None if output_dir is None else str(directory.with_name(output_dir))
        with pytest.raises(EditFailed, match="was replaced"):
            apply_resize(artifact, plan, out, lock=lock)
    assert sorted(os.listdir(directory.parent)) == ["artifact", "old"]
    assert read_num_blocks(str(directory)) == 16
