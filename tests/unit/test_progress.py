"""What people see of long work."""

from __future__ import annotations

import re
import sys

import pytest

from reblock.cli.progress import TerminalProgress
from reblock.progress import Progress, SilentProgress


def test_a_stage_in_a_log_is_a_line_at_its_beginning_and_one_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress: Progress = TerminalProgress()
    with progress.stage("compiling prefill"):
        assert capsys.readouterr().err == "compiling prefill ...\n"
    progress.note("done")
    captured = capsys.readouterr()
    assert re.fullmatch(r"compiling prefill: done in 0\.\d s\ndone\n", captured.err)
    assert captured.out == ""


def test_a_stage_that_fails_says_after_what_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), TerminalProgress().stage("exporting"):
        raise KeyError
    assert re.search(r"exporting: stopped after 0\.\d s\n", capsys.readouterr().err)


def test_a_stage_on_a_terminal_leaves_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with TerminalProgress().stage("compiling [prefill]"):
        pass
    text = capsys.readouterr().err
    # Written over and over while it lasts, and erased before the line that stays.
    assert re.search(r"compiling \[prefill\]: done in 0\.\d s\n$", text)
    assert "compiling [prefill]" in text.split("done in")[0]


def test_silent_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = SilentProgress()
    with progress.stage("compiling"):
        progress.note("note")
    assert capsys.readouterr() == ("", "")


def test_a_stage_of_bytes_in_a_log_is_two_lines_whatever_it_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress: Progress = TerminalProgress()
    with progress.bytes_stage("copying weights", 100) as advance:
        assert capsys.readouterr().err == "copying weights ...\n"
        advance(60)
        advance(40)
    assert re.fullmatch(r"copying weights: done in 0\.\d s\n", capsys.readouterr().err)


def test_a_stage_of_bytes_on_a_terminal_shows_how_many_are_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with TerminalProgress().bytes_stage("copying [weights]", 2048) as advance:
        advance(1024)
        advance(1024)
    text = capsys.readouterr().err
    assert "copying [weights]" in text.split("done in")[0]
    assert "2.0/2.0 KiB" in text
    assert re.search(r"copying \[weights\]: done in 0\.\d s\n$", text)


def test_silent_progress_takes_any_number_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = SilentProgress()
    with progress.bytes_stage("copying", 10) as advance:
        advance(20)
    assert capsys.readouterr() == ("", "")
