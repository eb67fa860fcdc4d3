"""Edits that are interrupted, that meet each other, and whose outcome cannot be printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
from typing import TYPE_CHECKING, Any

import pytest
from commands import optimum_here, reblock, reblock_here, run

from artifacts import fingerprint, make_artifact
from reblock.artifact import resize as resize_module
from reblock.artifact.count import read_num_blocks
from reblock.artifact.reader import open_artifact
from reblock.artifact.transaction import begin_edit
from reblock.artifact.transaction import stage as stage_module
from reblock.cli.main import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCRIPT = os.path.join(sysconfig.get_path("scripts"), "reblock")
STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", num_blocks=16)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_shell(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a line of shell, in which $0 is `reblock`."""
    return subprocess.run(
        ["sh", "-c", script, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def with_signal(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, during which the process is sent a signal."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        signal.raise_signal(number)
        return function(*arguments, **keywords)

    return call


def test_a_second_command_waits_for_the_first_and_says_so(directory: Path) -> None:
    with begin_edit(str(directory)):
        second = start("set", directory, "20")
        assert second.stderr is not None
        note = second.stderr.readline()
        assert note.startswith("note: waiting for ")
        assert note.endswith(f", which edits {directory}\n")
        assert read_num_blocks(str(directory)) == 16
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert read_num_blocks(str(directory)) == 20


def test_commands_that_edit_one_artifact_side_by_side_all_succeed(directory: Path) -> None:
    names = sorted(fingerprint(directory))
    commands = [start("set", directory, str(count)) for count in (17, 18, 19, 20)]
    for command in commands:
        _, stderr = command.communicate(timeout=60)
        assert command.returncode == 0, stderr
    assert open_artifact(str(directory)).config.kvcache_num_blocks in (17, 18, 19, 20)
    assert set(fingerprint(directory)) == {*names, ".reblock.json"}
    assert os.listdir(directory.parent) == [directory.name]


def test_a_dry_run_does_not_wait(directory: Path) -> None:
    with begin_edit(str(directory)):
        assert reblock_here("set", directory, "20", "--dry-run").returncode == 0


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_signal_before_the_commit_leaves_everything_as_it_was(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    before = fingerprint(directory.parent)
    monkeypatch.setattr(
        resize_module, "write_resized", with_signal(number, resize_module.write_resized)
    )
    assert reblock_here("set", directory, "20").returncode == code
    assert fingerprint(directory.parent) == before


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_second_signal_does_not_stop_the_cleaning_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    before = fingerprint(directory.parent)
    monkeypatch.setattr(
        resize_module, "write_resized", with_signal(number, resize_module.write_resized)
    )
    monkeypatch.setattr(
        stage_module, "remove_tree", with_signal(signal.SIGINT, stage_module.remove_tree)
    )
    assert reblock_here("set", directory, "20").returncode == code
    assert fingerprint(directory.parent) == before


@pytest.mark.parametrize("number", [number for number, _ in STOPS])
@pytest.mark.parametrize("function", ["exchange", "remove_tree"])
def test_a_signal_during_the_commit_comes_too_late(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, function: str
) -> None:
    monkeypatch.setattr(
        stage_module, function, with_signal(number, getattr(stage_module, function))
    )
    result = reblock_here("set", directory, "20")
    assert result.returncode == 0
    assert "16 -> 20" in result.stdout
    assert open_artifact(str(directory)).config.kvcache_num_blocks == 20
    assert os.listdir(directory.parent) == [directory.name]


@pytest.mark.parametrize("number", [number for number, _ in STOPS])
@pytest.mark.parametrize("options", [[], ["--output-dir"]])
def test_a_signal_after_the_commit_comes_too_late_until_the_outcome_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, options: list[str]
) -> None:
    from reblock.cli import resizing

    # What runs after the change is made and before it is told.
    monkeypatch.setattr(resizing, "_as_text", with_signal(number, resizing._as_text))
    place = [*options, str(directory.with_name("out"))] if options else []
    result = reblock_here("set", directory, "20", *place)
    assert result.returncode == 0
    assert "16 -> 20" in result.stdout


def test_a_command_leaves_the_handlers_of_its_process_as_they_were(directory: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert reblock_here("set", directory, "20").returncode == 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_that_is_ignored_from_the_start_stays_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_guarded("x", with_signal(signal.SIGHUP, lambda: 0)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_cannot_be_removed_is_named_and_removed_by_the_next_edit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device", "there")

    with monkeypatch.context() as patch:
        patch.setattr(stage_module, "remove_tree", lambda path: False)
        done = reblock_here("set", directory, "20")
        old = next(name for name in os.listdir(directory.parent) if name[-1] not in "kt")
        assert done.returncode == 0
        assert f"note: {directory.parent / old} could not be removed" in done.stderr
        patch.setattr(resize_module, "write_resized", fail)
        refused = reblock_here("set", directory, "24")
    assert refused.returncode == 1
    assert "nothing was changed" in refused.stderr
    assert "reblock: note: " in refused.stderr
    assert "could not be removed" in refused.stderr
    assert reblock_here("get", directory).stdout == "20\n"
    assert os.listdir(directory.parent) == [directory.name]


def test_a_second_command_gives_up_after_its_time_and_says_who_is_in_the_way(
    directory: Path,
) -> None:
    before = fingerprint(directory.parent)
    for timeout in ("0", "0.2"):
        with begin_edit(str(directory)):
            result = reblock_here("set", directory, "20", "--lock-timeout", timeout)
        assert result.returncode == 1
        assert f"is being edited by process {os.getpid()} (" in result.stderr
    assert fingerprint(directory.parent) == before
    for timeout in ("-1", "nan", "inf", "1m", ""):
        result = reblock_here("set", directory, "20", f"--lock-timeout={timeout}")
        assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize("options", ["", "--json"])
def test_an_edit_whose_outcome_cannot_be_printed_is_done(directory: Path, options: str) -> None:
    result = in_shell(f'"$0" set "$1" 20 {options} >/dev/full', directory)
    assert result.returncode == 0
    assert result.stderr.startswith("note: the artifact was written, but")
    assert read_num_blocks(str(directory)) == 20


def test_output_that_cannot_be_printed_without_an_edit_is_an_error(directory: Path) -> None:
    assert in_shell('"$0" set "$1" 20 --dry-run >/dev/full', directory).returncode == 1


def test_warnings_do_not_land_in_stdout_where_stderr_is_closed(directory: Path) -> None:
    result = in_shell('"$0" set "$1" 33 --json 2>&-', directory)
    assert result.returncode == 0
    assert json.loads(result.stdout)["kvcache_num_blocks"] == 33


def test_an_error_with_both_streams_closed_has_its_exit_code(directory: Path) -> None:
    assert in_shell('"$0" set "$1" 8 >&- 2>&-', directory).returncode == 3


def test_an_error_that_cannot_be_printed_has_its_exit_code(directory: Path) -> None:
    assert in_shell('"$0" set "$1" 8 2>/dev/full', directory).returncode == 3


def test_names_outside_of_the_encoding_are_printed_escaped(tmp_path: Path) -> None:
    names = ["caf\N{LATIN SMALL LETTER E WITH ACUTE}", os.fsdecode(b"bytes-\xff")]
    for name in names:
        directory = make_artifact(tmp_path / name, num_blocks=16)
        for encoding in ("ascii", "utf-8"):
            env = {"PYTHONIOENCODING": encoding}
            result = run("reblock", "set", directory, "20", env=env)
            assert result.returncode == 0, result.stderr
            assert "kvcache_num_blocks" in result.stdout
            result = run("reblock", "set", directory, "8", env=env)
            assert (result.returncode, "Traceback" in result.stderr) == (3, False)


def test_inspect_draws_with_what_the_encoding_has(directory: Path) -> None:
    plain = run("reblock", "inspect", directory, env={"PYTHONIOENCODING": "ascii"}).stdout
    lined = run("reblock", "inspect", directory, env={"PYTHONIOENCODING": "utf-8"}).stdout
    assert plain.isascii()
    assert plain == lined.replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "-")
    assert plain != lined


def test_an_artifact_with_the_longest_name_can_be_resized(tmp_path: Path) -> None:
    for name in ("a" * 255, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 127):
        directory = make_artifact(tmp_path / name, num_blocks=16)
        result = reblock_here("set", directory, "20")
        assert result.returncode == 0, result.stderr
        assert read_num_blocks(str(directory)) == 20


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750])
def test_a_copy_has_the_mode_of_its_source(directory: Path, tmp_path: Path, mode: int) -> None:
    directory.chmod(mode)
    out = tmp_path / "above" / "out"
    assert reblock_here("set", directory, "20", "--output-dir", out).returncode == 0
    assert out.stat().st_mode & 0o7777 == mode


def test_flags_given_twice_are_refused(directory: Path) -> None:
    for arguments in (
        ["set", directory, "20", "--json", "--json"],
        ["set", directory, "20", "--dry-run", "--dry-run"],
        ["get", directory, "--json", "--json"],
    ):
        result = reblock_here(*arguments)
        assert (result.returncode, "given twice" in result.stderr) == (2, True)
    flag = "--get-kvcache-num-blocks"
    result = optimum_here(flag, flag, "--model-id", directory)
    assert (result.returncode, "given twice" in result.stderr) == (2, True)
    assert reblock("get", directory, "--json").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "--model-id", "mod", "4"],
        ["--batch-size", "--model-id=mod", "4"],
        ["--model-id", "mod", "--batch-size", "--output-dir", "out", "4"],
    ],
)
def test_a_key_does_not_take_its_value_from_behind_another_option(arguments: list[str]) -> None:
    result = optimum_here(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "option --batch-size needs a value" in result.stderr
