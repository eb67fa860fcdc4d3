"""`reblock` itself: commands, help, exit codes, and how it ends when things go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commands import assert_refused, optimum, reblock, reblock_here, run

import reblock as package
from artifacts import make_artifact
from reblock.cli import main as main_module
from reblock.cli.main import COMMANDS, run_guarded
from reblock.errors import NotAnArtifact

if TYPE_CHECKING:
    from pathlib import Path


def test_version_is_printed_by_both_commands() -> None:
    for result in (reblock("--version"), optimum("--version")):
        assert (result.returncode, result.stdout) == (0, f"reblock {package.__version__}\n")


def test_help_names_the_commands_and_every_exit_code() -> None:
    result = reblock("--help")
    assert result.returncode == 0
    for fragment in (*COMMANDS, "0  done", "1  failed", "2  usage", "3  does not", "4  bad"):
        assert fragment in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_fits_80_columns(command: str) -> None:
    result = run("reblock", command, "--help", env={"COLUMNS": "80"})
    assert result.returncode == 0
    assert "exit codes:" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is needed"),
        (["--"], "unrecognized arguments: --"),
        (["st"], "invalid choice: 'st'"),
        (["--json", "get", "a"], "unrecognized arguments: --json"),
        (["get"], "required: DIR"),
        (["get", ""], "the value is empty"),
        (["get", "a", "b"], "unrecognized arguments: b"),
        (["get", "a", "--js"], "unrecognized arguments: --js"),
        (["inspect", "a", "--verbose"], "unrecognized arguments: --verbose"),
        (["compile"], "required: MODEL"),
        (["compile", "a", "--batch", "4"], "unrecognized arguments: --batch 4"),
        (["compile", "..", "--dtype", "float32"], "choose one with --output-dir"),
        (["compile", "a", "--weight-dtype", "int4"], "choose float32 or bfloat16 or int8"),
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], message: str) -> None:
    assert_refused(reblock_here(*arguments), 2, message)


def test_a_traceback_is_printed_only_where_it_is_asked_for(tmp_path: Path) -> None:
    quiet = run("reblock", "get", tmp_path, env={"REBLOCK_DEBUG": "0"})
    assert "Traceback" not in quiet.stderr
    loud = run("reblock", "get", tmp_path, env={"REBLOCK_DEBUG": "1"})
    assert "Traceback" in loud.stderr
    assert quiet.returncode == loud.returncode == 4


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    reading, writing = os.pipe()
    os.close(reading)
    script = os.path.join(os.path.dirname(sys.executable), "reblock")
    result = subprocess.run(
        [script, "inspect", directory], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


def test_output_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    script = os.path.join(os.path.dirname(sys.executable), "reblock")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [script, "get", directory], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "reblock: error: [Errno 28] No space left on device\n"


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    script = os.path.join(os.path.dirname(sys.executable), "reblock")
    line = ["sh", "-c", '"$0" get "$1" >&-', script, str(make_artifact(tmp_path / "a"))]
    result = subprocess.run(line, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_an_interrupt_exits_with_130() -> None:
    def interrupt() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert run_guarded("reblock", interrupt) == 130


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BrokenPipeError(), 141, ""),
        (
            OSError(28, "No space left on device"),
            1,
            "x: error: [Errno 28] No space left on device\n",
        ),
        (NotAnArtifact("is not there", path="a"), 4, "x: error: a: is not there\n"),
    ],
)
def test_an_error_becomes_a_line_and_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    message: str,
) -> None:
    def fail() -> int:
        raise error

    with open(tmp_path / "stdout", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run_guarded("x", fail) == code
        monkeypatch.undo()
    assert capsys.readouterr().err == message


def test_a_mistake_of_our_own_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_guarded("x", lambda: 1 // 0)


def test_every_command_of_the_table_has_a_module_with_both_functions() -> None:
    directory = os.path.dirname(main_module.__file__)
    for name in COMMANDS:
        with open(os.path.join(directory, f"{name}.py"), encoding="utf-8") as file:
            source = file.read()
        assert "def add_arguments(parser: argparse.ArgumentParser) -> None:" in source
        assert "def run(args: argparse.Namespace) -> int:" in source
