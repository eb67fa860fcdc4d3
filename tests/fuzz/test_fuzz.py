"""At least ten thousand mutated artifacts, and each gives an error of ours or a valid read."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import mutate_json
import probe
import pytest
from cases import Case, Maker

import artifacts
import fuzz
import zip_archives
from reblock.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_CASES = 10_000


@pytest.mark.timeout(1800)
def test_no_mutated_artifact_makes_a_command_fail_in_a_way_that_is_not_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = fuzz.run(seed=0, cases=NUM_CASES)
    with capsys.disabled():
        print()
        fuzz.show(report, seed=0)
    assert report.findings == []
    assert report.num_cases == NUM_CASES
    outcomes = {outcome for _, outcome in report.counts}
    # Had no mutated artifact been read, or none refused, this would have tested nothing.
    assert {"0", "4"} <= outcomes <= {"0", "1", "3", "4"}


def test_a_case_is_the_same_each_time_that_it_is_made(tmp_path: Path) -> None:
    first, second = (_files_of_case(os.path.join(tmp_path, name)) for name in ("a", "b"))
    assert first == second


def _files_of_case(root: str) -> dict[str, bytes]:
    maker = Maker(root)
    found = {}
    for index in range(20):
        # One that is read without waiting: other kinds hold pipes.
        rng = Random(f"0/{index}")
        name, data = mutate_json.mutate(rng, maker.config)
        found[f"{index} {name}"] = data
    return found


def test_an_archive_that_is_taken_apart_and_written_again_is_the_same(
    tmp_path: Path,
) -> None:
    maker = Maker(str(tmp_path))
    for data in maker.programs.values():
        archive = zip_archives.read(zip_archives.write(zip_archives.read(data)))
        assert archive == zip_archives.read(data)


def fail(argv: list[str]) -> int:
    raise ValueError("not one of ours")


def exit_oddly(argv: list[str]) -> int:
    print("reblock: error: odd", file=sys.stderr)
    return 7


def fail_silently(argv: list[str]) -> int:
    return 4


def print_a_traceback(argv: list[str]) -> int:
    print("Traceback (most recent call last):\nreblock: error: x", file=sys.stderr)
    return 4


def print_control_characters(argv: list[str]) -> int:
    print("reblock: error: \x1b[31mred", file=sys.stderr)
    return 4


def change_a_file(argv: list[str]) -> int:
    with open(os.path.join(argv[1], "rbln_config.json"), "ab") as file:
        file.write(b" ")
    print("reblock: error: refused", file=sys.stderr)
    return 4


def leave_a_file_beside(argv: list[str]) -> int:
    if argv[0] == "set" and "--dry-run" not in argv:
        with open(os.path.join(argv[1], "..", "left"), "wb"):
            pass
    return main(argv)


def claim_to_have_set(argv: list[str]) -> int:
    return 0 if argv[0] == "set" else main(argv)


def wait(argv: list[str]) -> int:
    time.sleep(5)
    return 0


@pytest.mark.parametrize(
    ("command", "finding"),
    [
        (fail, "raised ValueError"),
        (exit_oddly, "exited with 7"),
        (fail_silently, "exited with 4 and said ''"),
        (print_a_traceback, "said 'Traceback"),
        (print_control_characters, "a character that does not show"),
        (change_a_file, "a command that only reads has changed the artifact"),
        (leave_a_file_beside, "set left ['left'] behind"),
        (claim_to_have_set, "wrote 16"),
        (wait, "raised TooSlow"),
    ],
)
def test_a_command_that_does_what_none_may_do_is_a_finding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[list[str]], int],
    finding: str,
) -> None:
    maker = Maker(str(tmp_path / "maker"))
    (tmp_path / "case").mkdir()
    os.rename(maker.ours, tmp_path / "case" / "a")
    case = Case(mutator="none", directory=str(tmp_path / "case" / "a"), may_be_finished=False)
    monkeypatch.setattr(probe, "_SHARE_OF_ALL_WHERE_READ", 1.0)
    monkeypatch.setattr(probe, "ALARM_S", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    try:
        probe.prepare()
        sound = probe.Probe(case, Random(3))
        sound.run()
        artifacts_again(case.directory)
        monkeypatch.setattr(probe, "main", command)
        broken = probe.Probe(case, Random(3))
        broken.run()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sound.findings == []
    assert any(finding in text for text in broken.findings), broken.findings


def artifacts_again(directory: str) -> None:
    shutil.rmtree(directory)
    artifacts.make_artifact(Path(directory))


def test_a_process_that_dies_is_a_finding_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = fuzz.run(seed=0, cases=4, workers=2)
    assert {index for index, _, _ in report.findings} == {0, 1, 2, 3}
    assert all("the process ended with 1" in finding for _, _, finding in report.findings)
