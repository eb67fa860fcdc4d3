"""Edits of a directory that cannot be exchanged, and what is left where they are cut off."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import fingerprint, make_artifact
from reblock.artifact.count import read_num_blocks
from reblock.artifact.location import has_left_overs, locate
from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import apply_resize, plan_resize
from reblock.artifact.transaction import begin_edit
from reblock.artifact.transaction import journal as journal_module
from reblock.artifact.transaction import replace as replace_module
from reblock.artifact.transaction.journal import finish_journal, journal_in
from reblock.artifact.transaction.lock import edit_lock
from reblock.artifact.verify import verify_artifact
from reblock.errors import ArtifactBusy, EditFailed
from reblock.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NEW_FILES = ["decoder_batch_1.rbln", "decoder_batch_4.rbln", "prefill.rbln", "rbln_config.json"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "parent" / "artifact", num_blocks=16)


@pytest.fixture(autouse=True)
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace_module, "_may_exchange", lambda target: False)


def resize(directory: Path, num_blocks: int) -> list[str]:
    artifact = open_artifact(str(directory))
    return apply_resize(artifact, plan_resize(artifact, num_blocks))


def leave_committed(directory: Path, num_blocks: int) -> None:
    """Leave what an edit leaves that is cut off right after its commit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replace_module, "finish_journal", lambda directory: None)
        patch.setattr(replace_module, "clean_up_for_edit", lambda lock: [])
        resize(directory, num_blocks)
    assert (directory / ".reblock-edit" / "committed" / "rbln_config.json").exists()


def test_an_edit_by_journal_changes_only_what_it_must(directory: Path) -> None:
    before = {path.name: path.stat().st_ino for path in directory.iterdir()}
    assert resize(directory, 20) == []
    after = {path.name: path.stat().st_ino for path in directory.iterdir()}
    assert read_num_blocks(str(directory)) == 20
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {*NEW_FILES, ".reblock.json"}
    assert os.listdir(directory.parent) == ["artifact"]


def test_an_edit_by_journal_is_the_edit_by_exchange(directory: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(directory, other)
    resize(directory, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replace_module, "_may_exchange", lambda target: True)
        resize(other, 20)
    assert fingerprint(directory) == fingerprint(other)


def test_a_committed_edit_is_what_readers_see_before_it_is_finished(directory: Path) -> None:
    leave_committed(directory, 20)
    with edit_lock(str(directory)):  # as somebody who is finishing it
        assert read_num_blocks(str(directory)) == 20
        artifact = open_artifact(str(directory))
    assert artifact.config.kvcache_num_blocks == 20
    assert all("/committed/" in program.path for program in artifact.programs)


@pytest.mark.parametrize("num_moved", range(len(NEW_FILES) + 2))
def test_a_committed_edit_is_whole_however_many_files_were_moved(
    directory: Path, num_moved: int
) -> None:
    leave_committed(directory, 20)
    committed = directory / ".reblock-edit" / "committed"
    for name in sorted(os.listdir(committed))[:num_moved]:
        os.rename(committed / name, directory / name)
    with edit_lock(str(directory)):
        assert open_artifact(str(directory)).config.kvcache_num_blocks == 20
        assert (directory / ".reblock-edit").exists()
    assert open_artifact(str(directory)).config.kvcache_num_blocks == 20
    assert not (directory / ".reblock-edit").exists()


def test_a_committed_edit_is_finished_by_the_next_one(directory: Path) -> None:
    leave_committed(directory, 20)
    assert has_left_overs(str(directory))
    with begin_edit(str(directory)) as lock:
        artifact = open_artifact(str(directory))
        apply_resize(artifact, plan_resize(artifact, 24), lock=lock)
    assert read_num_blocks(str(directory)) == 24
    assert not has_left_overs(str(directory))
    assert sorted(os.listdir(directory)) == sorted(
        [*NEW_FILES, ".reblock.json", "config.json", "tokenizer.json", "weights.safetensors"]
    )


def test_a_staged_edit_is_removed_by_the_next_reader(directory: Path) -> None:
    before = fingerprint(directory)
    (directory / ".reblock-edit" / "staged").mkdir(parents=True)
    (directory / ".reblock-edit" / "staged" / "rbln_config.json").write_text("{")
    assert read_num_blocks(str(directory)) == 16
    assert fingerprint(directory) == before


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_something_else_under_the_name_of_a_journal_is_left_and_refused(
    directory: Path, kind: str
) -> None:
    path = directory / ".reblock-edit"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to("..")
    else:
        (path / "mine").mkdir(parents=True)
    before = fingerprint(directory)
    assert read_num_blocks(str(directory)) == 16
    with pytest.raises(EditFailed, match="in the way"):
        resize(directory, 20)
    assert fingerprint(directory) == before


def test_a_journal_of_somebody_who_is_at_work_is_left_alone(directory: Path) -> None:
    with begin_edit(str(directory)), journal_in(str(directory)) as journal:
        assert read_num_blocks(str(directory)) == 16
        assert os.path.isdir(journal.staged)
        with pytest.raises(ArtifactBusy), begin_edit(str(directory), timeout_s=0):
            pass


def fail(*arguments: Any) -> None:
    raise OSError(errno.EIO, "Input/output error", arguments[-1])


def test_a_commit_that_does_not_reach_the_disk_is_undone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(directory)
    sync_path = journal_module.sync_path
    monkeypatch.setattr(
        journal_module,
        "sync_path",
        lambda path: (fail if path.endswith(".reblock-edit") else sync_path)(path),
    )
    with pytest.raises(EditFailed, match="nothing was changed"):
        resize(directory, 20)
    assert fingerprint(directory) == before


def test_a_commit_that_cannot_be_finished_is_one_and_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "rename", lambda a, b: (rename if b.endswith("committed") else fail)(a, b)
        )
        (note,) = resize(directory, 20)
        assert note.startswith("the change is made, but ")
        assert read_num_blocks(str(directory)) == 20
        with pytest.raises(EditFailed, match="Input/output error") as caught:
            resize(directory, 24)
        assert "has to be finished first" in caught.value.__notes__[0]
    finish_journal(str(directory))
    assert read_num_blocks(str(directory)) == 20


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EBUSY, errno.EINVAL, errno.ENOSYS])
def test_an_exchange_that_the_system_refuses_becomes_an_edit_by_journal(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    from reblock.artifact.transaction import stage as stage_module

    def refuse(first: str, second: str) -> None:
        raise OSError(code, os.strerror(code), second)

    monkeypatch.setattr(replace_module, "_may_exchange", lambda target: True)
    monkeypatch.setattr(stage_module, "exchange", refuse)
    inode = directory.stat().st_ino
    assert resize(directory, 20) == []
    assert directory.stat().st_ino == inode
    assert read_num_blocks(str(directory)) == 20
    assert os.listdir(directory.parent) == ["artifact"]


def test_an_artifact_that_another_program_changes_meanwhile_is_left_as_it_is_then(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replace_module, "_may_exchange", lambda target: True)
    carry_over = replace_module.carry_over

    def carry_and_meddle(*arguments: Any, **keywords: Any) -> None:
        carry_over(*arguments, **keywords)
        (directory / "notes.txt").write_text("mine")

    monkeypatch.setattr(replace_module, "carry_over", carry_and_meddle)
    with pytest.raises(EditFailed, match=r"notes\.txt' was changed by another program"):
        resize(directory, 20)
    assert read_num_blocks(str(directory)) == 16
    assert (directory / "notes.txt").read_text() == "mine"


def test_locate_takes_what_is_committed_before_what_is_not(directory: Path) -> None:
    plain = str(directory / "prefill.rbln")
    assert locate(str(directory), "prefill.rbln") == plain
    leave_committed(directory, 20)
    assert locate(str(directory), "prefill.rbln") != plain
    assert locate(str(directory), "config.json") == str(directory / "config.json")


@pytest.mark.parametrize(
    "place", [".reblock-edit", ".reblock-edit/committed", ".reblock-edit/staged"]
)
def test_a_link_in_place_of_the_journal_moves_and_removes_nothing(
    directory: Path, place: str
) -> None:
    outside = directory.parent / "outside"
    outside.mkdir()
    (outside / "rbln_config.json").write_text("keep this")
    (directory / place).parent.mkdir(exist_ok=True)
    (directory / place).symlink_to(outside)
    before = fingerprint(outside), fingerprint(directory)
    with pytest.raises(EditFailed, match="it holds something else"):
        finish_journal(str(directory))
    assert (fingerprint(outside), fingerprint(directory)) == before


@pytest.mark.parametrize("name", ["committed", "staged"])
def test_a_pipe_in_the_journal_is_not_waited_for(directory: Path, name: str) -> None:
    (directory / ".reblock-edit").mkdir()
    os.mkfifo(directory / ".reblock-edit" / name)
    with pytest.raises(EditFailed, match="it holds something else"):
        finish_journal(str(directory))


@pytest.mark.parametrize("way", ["exchange", "journal"])
def test_what_another_program_does_while_files_are_flushed_is_not_lost(
    directory: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    from reblock.artifact.transaction import stage as stage_module

    monkeypatch.setattr(replace_module, "_may_exchange", lambda target: way == "exchange")
    module = stage_module if way == "exchange" else journal_module
    sync_tree = module.sync_tree

    def flush_slowly(path: str) -> None:
        sync_tree(path)
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer.json").write_text("mine")

    monkeypatch.setattr(module, "sync_tree", flush_slowly)
    with pytest.raises(EditFailed, match=r"tokenizer\.json' was changed by another program"):
        resize(directory, 20)
    assert (directory / "tokenizer.json").read_text() == "mine"
    assert read_num_blocks(str(directory)) == 16
    assert os.listdir(directory.parent) == ["artifact"]
    assert ".reblock-edit" not in os.listdir(directory)


def test_an_artifact_that_is_moved_into_the_place_meanwhile_is_not_lost(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reblock.artifact.transaction import stage as stage_module

    monkeypatch.setattr(replace_module, "_may_exchange", lambda target: True)
    other = make_artifact(tmp_path / "other", num_blocks=30)
    sync_tree = stage_module.sync_tree

    def flush_slowly(path: str) -> None:
        sync_tree(path)
        directory.rename(tmp_path / "old")
        other.rename(directory)

    monkeypatch.setattr(stage_module, "sync_tree", flush_slowly)
    with pytest.raises(EditFailed, match="was changed by another program"):
        resize(directory, 20)
    assert read_num_blocks(str(directory)) == 30
    assert read_num_blocks(str(tmp_path / "old")) == 16


def test_a_file_that_cannot_be_replaced_is_found_before_the_commit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reblock.artifact.transaction import system

    points = system._mount_points
    mounted = os.fsencode(directory / "rbln_config.json")
    monkeypatch.setattr(system, "_mount_points", lambda: {*points(), mounted})
    before = fingerprint(directory)
    with pytest.raises(EditFailed, match="something is mounted on it"):
        resize(directory, 20)
    monkeypatch.undo()
    monkeypatch.setattr(replace_module, "_may_exchange", lambda target: False)
    (directory / ".reblock.json").mkdir()
    with pytest.raises(EditFailed, match="Is a directory"):
        resize(directory, 20)
    (directory / ".reblock.json").rmdir()
    assert fingerprint(directory) == before


def test_a_link_under_the_name_of_what_is_committed_is_not_followed(
    directory: Path, tmp_path: Path
) -> None:
    other = make_artifact(tmp_path / "other", num_blocks=30)
    (directory / ".reblock-edit").mkdir()
    (directory / ".reblock-edit" / "committed").symlink_to(other)
    assert read_num_blocks(str(directory)) == 16


def test_that_one_may_not_look_is_not_taken_for_nothing_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_committed(directory, 20)

    def refuse(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(PermissionError):
        locate(str(directory), "rbln_config.json")


@contextmanager
def calling_after_a_look(path: str, look: int, call: Callable[[], object]) -> Iterator[list[str]]:
    """Call once the system has been asked about `path` so many times and once more.

    Yields the looks so far.
    """
    looks: list[str] = []

    def watched(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def asking(asked: Any, *arguments: Any, **options: Any) -> os.stat_result:
            found = ask(asked, *arguments, **options)
            if asked == path:
                looks.append(path)
                if len(looks) == look + 1:
                    call()
            return found

        return asking

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "lstat", watched(os.lstat))
        patch.setattr(os, "stat", watched(os.stat))
        yield looks


@pytest.mark.parametrize("look", range(8))
def test_get_finds_a_config_that_is_moved_up_after_any_look_at_it(
    directory: Path, look: int
) -> None:
    leave_committed(directory, 20)
    config = str(directory / ".reblock-edit" / "committed" / "rbln_config.json")
    # The edit is under way, so that it is nobody else's to be finished.
    with (
        edit_lock(str(directory)),
        calling_after_a_look(
            config, look, lambda: os.rename(config, directory / "rbln_config.json")
        ) as looks,
    ):
        assert read_num_blocks(str(directory)) == 20
    assert len(looks) >= min(look + 1, 3)


@pytest.mark.parametrize("name", ["prefill.rbln", ".reblock.json"])
@pytest.mark.parametrize("look", range(12))
def test_verify_finds_no_fault_where_a_file_is_moved_up_after_any_look_at_it(
    directory: Path, look: int, name: str
) -> None:
    leave_committed(directory, 20)
    path = str(directory / ".reblock-edit" / "committed" / name)
    with (
        edit_lock(str(directory)),
        calling_after_a_look(path, look, lambda: finish_journal(str(directory))),
    ):
        found = verify_artifact(
            str(directory),
            module=None,
            is_quick=True,
            check_memory=lambda directory: pytest.fail("a quick check loads nothing"),
            progress=SilentProgress(),
        )
    assert found.is_ok, found
    assert found.num_blocks == 20
