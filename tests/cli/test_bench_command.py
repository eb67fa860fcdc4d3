"""`reblock bench` on a fake engine: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from commands import assert_refused, reblock_here

from fakes import FakeRunner, FakeSampler, make_limits
from loaded_modules import modules_loaded_by
from reblock.backends import loading
from reblock.bench.trace import read_trace
from reblock.cli import bench
from reblock.engine.engine import Engine
from reblock.errors import InvalidLogits

if TYPE_CHECKING:
    from pathlib import Path


class FakeModel:
    """Stands in for an artifact that was loaded, and remembers how it was asked for."""

    def __init__(self) -> None:
        self.runner = FakeRunner(make_limits(max_seq_len=64, num_blocks=24, max_batch=4))
        self.loaded: list[tuple[str, int | None]] = []

    def load(self, directory: str, num_threads: int | None) -> Engine:
        self.loaded.append((directory, num_threads))
        return Engine(self.runner, sampler=FakeSampler())


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr(bench, "_load", fake.load)
    return fake


def report_of(*arguments: str | Path) -> dict[str, Any]:
    result = reblock_here("bench", "dir", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def lengths(report: dict[str, Any]) -> list[tuple[float, int, int]]:
    keys = ("arrival_s", "num_prompt_tokens", "num_new_tokens")
    return [tuple(request[key] for key in keys) for request in report["requests"]]


def test_tables_say_what_was_served_and_fit_80_columns(model: FakeModel) -> None:
    result = reblock_here("bench", "dir", "--requests=5", "--prompt-tokens=8-20", "--new-tokens=3")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("KV cache    24 blocks of 4 tokens, 12.00 KiB; up to ")
    assert lines[1].startswith("requests    5 of 5 served; up to ")
    rows = {line.strip().rpartition("  ")[0].strip() for line in lines}
    for name in ("blocks free", "blocks used", "blocks cached", "preemptions"):
        assert name in rows
    for name in ("tokens prefilled", "tokens decoded", "scheduler", "programs", "sampler"):
        assert any(line.strip().startswith(f"{name}  ") for line in lines)
    assert any(line.split() == ["tokens", "decoded", "10"] for line in lines)
    assert model.loaded == [("dir", None)]


def test_tables_say_how_many_requests_were_refused_and_why(
    model: FakeModel, tmp_path: Path
) -> None:
    file = tmp_path / "trace"
    file.write_text(
        '{"arrival_s": 0, "num_prompt_tokens": 2, "num_new_tokens": 1}\n'
        '{"arrival_s": 90, "num_prompt_tokens": 65, "num_new_tokens": 1}\n'
    )
    result = reblock_here("bench", "dir", "--trace", file)
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    assert "1 of 2 served; 1 refused, as one request can have 64 tokens at most;" in text
    assert "s of it without a request (skipped)" in text
    (row,) = [line for line in result.stdout.splitlines() if "between two tokens" in line]
    assert row.split()[-4:] == ["-"] * 4  # an answer of one token has none between


def test_json_is_one_object_with_a_version(model: FakeModel) -> None:
    report = report_of("--requests=3", "--threads=2", "--seed=5")
    assert report["schema_version"] == 1
    assert report["seed"] == 5
    assert report["num_requests"] == report["num_completed"] == 3
    assert report["counters"]["num_prefilled_tokens"] == sum(
        request["num_prompt_tokens"] for request in report["requests"]
    )
    assert model.loaded == [("dir", 2)]


def test_requests_are_those_of_the_seed_and_the_options(model: FakeModel) -> None:
    options = ("--requests=9", "--rate=100", "--prompt-tokens=5-9", "--new-tokens=4")
    made = lengths(report_of(*options))
    assert made == lengths(report_of(*options))
    assert made != lengths(report_of(*options, "--seed=1"))
    assert {new for _, _, new in made} == {4}
    assert {prompt for _, prompt, _ in made} <= set(range(5, 10))
    assert len({arrival for arrival, _, _ in made}) == 9


def test_without_options_a_trace_is_made_that_fits(model: FakeModel) -> None:
    report = report_of()
    assert report["num_requests"] == report["num_completed"] == bench.DEFAULT_REQUESTS


def test_a_trace_that_was_saved_is_served_again(model: FakeModel, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    made = report_of("--requests=4", "--rate=50", "--save-trace", file)
    assert lengths(report_of("--trace", file)) == lengths(made)
    assert len(read_trace(str(file)).requests) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests=0"], "--requests must be from 1 to 32,768, not 0"),
        (["--requests=32769"], "--requests must be from 1 to 32,768, not 32769"),
        (["--requests=x"], "argument --requests: 'x' is no whole number"),
        (["--rate=0"], "--rate must be above 0, not 0.0"),
        (["--rate=-1"], "--rate must be above 0, not -1.0"),
        (["--rate=inf"], "--rate must be above 0, not inf"),
        (["--rate=nan"], "--rate must be above 0, not nan"),
        (["--rate=fast"], "argument --rate: 'fast' is no number"),
        (["--prompt-tokens=0-3"], "argument --prompt-tokens: from 0 to 3 tokens"),
        (["--prompt-tokens=5-3"], "argument --prompt-tokens: from 5 to 3 tokens"),
        (["--prompt-tokens=5-"], "argument --prompt-tokens: '5-' is no range"),
        (["--new-tokens=1-2-3"], "argument --new-tokens: '1-2-3' is no range"),
        (["--new-tokens=many"], "argument --new-tokens: 'many' is no range"),
        (["--seed=-1"], "argument --seed: '-1' is no whole number"),
        (["--seed=1", "--seed=2"], "option --seed is given twice"),
        (["--threads=0"], "--threads must be from 1 to 1,024, not 0"),
        (["--trace=/nowhere/at/all"], "cannot read the trace '/nowhere/at/all'"),
        (["--trace=x", "--rate=1", "--new-tokens=2"], "leave it out, or --rate, --new-tokens"),
        (["--save-trace=/"], "--save-trace '/' is there already"),
        (["--batch-size=1"], "unrecognized arguments: --batch-size=1"),
    ],
)
def test_options_that_make_no_sense_exit_with_2_before_anything_is_loaded(
    model: FakeModel, arguments: list[str], message: str
) -> None:
    assert_refused(reblock_here("bench", "dir", *arguments), 2, message)
    assert model.loaded == []


def test_a_trace_that_cannot_be_written_is_refused_before_it_is_served(
    model: FakeModel, tmp_path: Path
) -> None:
    result = reblock_here("bench", "dir", "--save-trace", tmp_path / "no" / "trace")
    assert_refused(result, 2, "cannot write the trace", "No such file")
    assert model.runner.calls == []


def test_ctrl_c_ends_it_without_a_traceback(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.runner, "decode", interrupt)
    result = reblock_here("bench", "dir")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_progress_is_shown_on_a_terminal_alone(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with bench._progress(7) as on_step:
        on_step(7)
    assert "7/7" in terminal.getvalue()


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == package else object())
    result = reblock_here("bench", "dir")
    assert_refused(result, 1, f"needs {package}", "pip install 'reblock[torch]'")


def test_a_bad_artifact_is_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda package: package)
    monkeypatch.setitem(sys.modules, "reblock.backends.torch", None)
    assert_refused(reblock_here("bench", tmp_path), 4, str(tmp_path))


def test_logits_that_are_no_numbers_are_an_error_in_one_line(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise InvalidLogits("the programs computed logits that are infinite")

    monkeypatch.setattr(FakeSampler, "choose", refuse)
    assert_refused(reblock_here("bench", "dir"), 4, "logits that are infinite")


def test_blocks_of_answers_of_one_token_were_used(model: FakeModel) -> None:
    report = report_of("--requests=1", "--prompt-tokens=9", "--new-tokens=1")
    assert report["most_used_blocks"] == 3
    assert report["counters"]["num_used_blocks"] == 0


def test_help_names_every_option() -> None:
    result = reblock_here("bench", "--help")
    assert result.returncode == 0
    for option in ("--trace", "--requests", "--rate", "--prompt-tokens", "--new-tokens", "--seed"):
        assert option in result.stdout


def test_the_package_loads_neither_torch_nor_transformers() -> None:
    imports = "reblock.bench.document, reblock.bench.replay, reblock.cli.bench"
    assert modules_loaded_by(imports, "torch", "transformers", "numpy", "rich") == []
