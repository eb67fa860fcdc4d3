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
