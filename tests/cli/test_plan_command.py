"""`reblock plan` as it is typed: options, exit codes, JSON, pictures, terminals of all kinds."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from commands import assert_refused, reblock, reblock_here, run
from jsonschema import Draft202012Validator

from artifacts import make_artifact
from rbln_artifacts import DATA, FLASH, LLAMA2_EAGER, QWEN3_CR13, STANDIN, make_vision_language
from rbln_artifacts import copy_artifact as copy_rbln
from reblock.planning import PlanSettings
from reblock.planning.document import read_schema

if TYPE_CHECKING:
    from subprocess import CompletedProcess

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
QWEN3_8B, QWEN3_4B = CONFIGS / "Qwen3-8B", CONFIGS / "Qwen3-4B"
COMPILER = {"PYTHONPATH": str(STANDIN)}
CR13 = ("--npu", "RBLN-CR13", "--max-seq-len", "8192")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rebel", raising=False)
    monkeypatch.syspath_prepend(str(STANDIN))


def document(result: CompletedProcess[str]) -> dict[str, Any]:
    """Return what `--json` printed, which is one line and as the schema has it."""
    assert result.stdout.count("\n") == 1, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    Draft202012Validator(read_schema()).validate(content)
    return content


# What is planned.


def test_plan_of_a_model_answers_and_names_the_command_that_compiles_it() -> None:
    result = reblock("plan", QWEN3_8B, *CR13, "--memory-budget", "80%")
    assert (result.returncode, result.stderr) == (0, "")
    assert "requests    84 of 8,192 tokens side by side" in result.stdout
    line = next(line for line in result.stdout.splitlines() if "optimum-rbln-cli" in line)
    assert f"--model-id {QWEN3_8B} --batch-size 84 --max-seq-len 8192" in line


@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_model_is_named_by_its_directory_or_its_config_json(form: str) -> None:
    name = QWEN3_8B if form == "directory" else QWEN3_8B / "config.json"
    (found,) = document(reblock_here("plan", name, *CR13, "--json"))["plans"]
    assert (found["name"], found["kind"]) == (str(QWEN3_8B), "model")


@pytest.mark.parametrize("name", [*FLASH, LLAMA2_EAGER])
def test_plan_of_an_artifact_of_optimum_rbln_is_for_its_own_device(name: str) -> None:
    result = run("reblock", "plan", DATA / name, "--json", env=COMPILER)
    assert result.returncode == 0, result.stderr
    (found,) = document(result)["plans"]
    assert found["kind"] == "artifact"
    assert found["device"].startswith("RBLN-")
    assert found["num_blocks"] == found["largest_num_blocks"]


def test_the_command_of_a_plan_can_be_pasted_and_makes_it_true(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "an artifact", num_blocks=9)
    asked = ("--npu", "cpu:1GB", "--memory-budget", "80MB")
    planned = reblock("plan", directory, *asked)
    assert planned.returncode == 0, planned.stderr
    (found,) = document(reblock_here("plan", directory, *asked, "--json"))["plans"]
    lines = [line.strip() for line in planned.stdout.splitlines() if "  reblock set" in line]
    assert lines == [command["line"] for command in found["commands"]]
    for line, held in zip(reversed(lines), (9, found["num_blocks"]), strict=True):
        words = shlex.split(line)
        assert run(words[0], *words[1:]).returncode == 0
        assert reblock_here("get", directory).stdout == f"{held}\n"


def test_a_count_can_be_asked_for_instead(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    small = ("--npu", "cpu:320MB")
    (found,) = document(reblock_here("plan", directory, *small, "--num-blocks", "12", "--json"))[
        "plans"
    ]
    assert (found["num_blocks"], found["limited_by"]) == (12, "given")
    too_many = reblock_here("plan", directory, *small, "--num-blocks", "32", "--json")
    assert too_many.returncode == 3
    assert document(too_many)["plans"][0]["fits"] is False
    too_few = reblock_here("plan", directory, *small, "--num-blocks", "2")
    assert_refused(too_few, 3, "num_blocks=2 is below 9")


def test_the_size_of_the_weights_can_be_said() -> None:
    options = (*CR13, "--weight-bytes", "8GB", "--json")
    (found,) = document(reblock_here("plan", QWEN3_8B, *options))["plans"]
    (weights,) = [term for term in found["waterfall"]["terms"] if term["name"] == "Weight"]
    assert weights["num_bytes"] == 8 * 2**30


def test_every_setting_of_a_plan_is_an_option() -> None:
    text = reblock_here("plan", "--help").stdout
    for field in fields(PlanSettings):
        assert f"--{field.name.replace('_', '-')} " in text


def test_the_module_of_an_artifact_of_several_is_named(tmp_path: Path) -> None:
    directory = make_vision_language(tmp_path / "a")
    assert_refused(reblock_here("plan", directory), 2, "language_model")
    result = reblock_here("plan", directory, "--module", "language_model")
    assert result.returncode == 0, result.stderr
    assert "\nmodule     language_model\n" in result.stdout
    assert f"\n  reblock get {directory} --module language_model\n" in result.stdout


def test_plan_writes_nothing(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    assert reblock("plan", directory).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}


# Several devices, budgets, names.


def test_every_device_is_planned_with_every_budget() -> None:
    result = reblock_here(
        *("plan", QWEN3_8B, "--npu", "RBLN-CR13", "--npu=RBLN-CA25x4"),
        *("--memory-budget=80%", "--memory-budget", "100%", "--json"),
    )
    assert result.returncode == 0
    found = [(each["npu"], each["memory_budget"]) for each in document(result)["plans"]]
    assert found == [
        ("RBLN-CR13", "80%"),
        ("RBLN-CR13", "100%"),
        ("RBLN-CA25x4", "80%"),
        ("RBLN-CA25x4", "100%"),
    ]


def test_a_size_above_one_device_leaves_the_others_their_rows() -> None:
    options = ("--npu", "RBLN-CA25x4", "--npu", "RBLN-CR13", "--memory-budget", "40GB")
    result = reblock("plan", QWEN3_8B, *options)
    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if "40GB " in line}
    assert rows["RBLN-CA25x4"].endswith("not possible")
    assert rows["RBLN-CR13"].endswith("memory budget")
    content = document(reblock_here("plan", QWEN3_8B, *options, "--json"))
    assert [each["npu"] for each in content["plans"]] == ["RBLN-CR13"]
    (refused,) = content["refused"]
    assert (refused["npu"], refused["memory_budget"]) == ("RBLN-CA25x4", "40GB")
    assert "15.72 GiB" in refused["reason"]


def test_what_no_device_can_do_is_an_error_and_no_table() -> None:
    options = ("--npu", "RBLN-CA25", "--npu", "RBLN-CA25x4", "--memory-budget", "40GB")
    assert_refused(reblock_here("plan", QWEN3_8B, *options), 3, "memory_budget='40GB' is 40.00 GiB")


def test_models_share_a_device_and_split_its_memory() -> None:
    names = (QWEN3_8B, QWEN3_4B)
    result = reblock_here("plan", *names, *CR13, "--batch-size", "4", "--json")
    assert result.returncode == 0, result.stderr
    content = document(result)
    assert [each["name"] for each in content["plans"]] == [str(name) for name in names]
    assert content["shared"]["is_split"] is True
    table = reblock("plan", *names, *CR13, "--batch-size", "4")
    assert table.returncode == 0, table.stderr
    assert table.stdout.startswith(f"1        {QWEN3_8B}\n2        {QWEN3_4B}\n")


def test_an_artifact_and_a_model_share_the_device_of_the_artifact(tmp_path: Path) -> None:
    directory = copy_rbln(QWEN3_CR13, tmp_path / "a")
    names = (directory, QWEN3_4B)
    budgets = ("--memory-budget", "60%", "--memory-budget", "40%")
    content = document(reblock_here("plan", *names, "--batch-size", "2", *budgets, "--json"))
    assert [each["npu"] for each in content["plans"]] == ["RBLN-CR13", "RBLN-CR13"]
    assert content["shared"]["is_split"] is False
    assert content["shared"]["fits"] is True


# Exit codes.


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--memory-budget", "80%"), 0),
        (("--memory-budget", "1GB"), 3),
        (("--memory-budget", "1GB", "--memory-budget", "80%"), 0),
        (("--memory-budget", "1GB", "--memory-budget", "2GB"), 3),
    ],
)
def test_the_exit_code_is_3_where_nothing_fits(options: tuple[str, ...], code: int) -> None:
    for output in ((), ("--json",)):
        result = reblock_here("plan", QWEN3_8B, *CR13, *options, *output)
        assert result.returncode == code
        assert result.stderr == ""
        assert result.stdout
    fitting = [each["fits"] for each in document(result)["plans"]]
    assert any(fitting) == (code == 0)


def test_the_exit_code_is_3_where_models_do_not_fit_together() -> None:
    result = reblock_here(
        *("plan", QWEN3_8B, QWEN3_4B, *CR13),
        *("--batch-size", "4", "--memory-budget", "5%"),
    )
    assert result.returncode == 3
    assert "Does not fit: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "required: NAME"),
        ([""], 2, "the value is empty"),
        ([QWEN3_8B, "--npu"], 2, "expected one argument"),
        ([QWEN3_8B, "--npu", "RBLN-CR31"], 2, "did you mean 'RBLN-CR13'?"),
        ([QWEN3_8B, "--npu", "RBLN-CA25x0"], 2, "give 1 to"),
        ([QWEN3_8B, "--memory-budget", "80%,60%"], 2, "memory_budget='80%,60%' is no"),
        ([QWEN3_8B, "--memory-budget="], 2, "is empty"),
        ([QWEN3_8B, "--memory-budget", "0"], 2, "is less than one byte"),
        ([QWEN3_8B, "--memory-budget", "-1"], 2, "is negative"),
        ([QWEN3_8B, "--npu", "RBLN-CR13", "--memory-budget", "200GB"], 3, "140.00 GiB"),
        ([QWEN3_8B, "--batch-size", "none"], 2, "batch_size='none' must be a whole number"),
        ([QWEN3_8B, "--batch-size", "0"], 2, "batch_size=0 must be a whole number"),
        ([QWEN3_8B, "--batch-size", "\u0664"], 2, "must be a whole number"),
        ([QWEN3_8B, "--batch-size", "9" * 5000], 2, "must be a whole number"),
        ([QWEN3_8B, "--batch-size", "1", "--batch-size", "2"], 2, "is given twice"),
        ([QWEN3_8B, "--max-seq-len", "50000"], 2, "max_seq_len=50000 is more than the 40960"),
        ([QWEN3_8B, "--attn-impl", "paged"], 2, "choose eager or flash_attn"),
        ([QWEN3_8B, "--dtype", "int3"], 2, "dtype='int3' is not known"),
        ([QWEN3_8B, "--weight-dtype", "int3"], 2, "weight_dtype='int3' is not known"),
        ([QWEN3_8B, *CR13, "--weight-dtype", "int8"], 2, "weight_dtype='int8' is for the cpu"),
        ([QWEN3_8B, "--dtype", "int8"], 2, "give weight_dtype=int8"),
        ([QWEN3_8B, "--num-blocks", "1.5"], 2, "must be a whole number"),
        ([QWEN3_8B, "--weight-bytes", "heavy"], 2, "weight_bytes: 'heavy' is no size"),
        ([QWEN3_8B, "--weight-bytes", "0"], 2, "must be a whole number of bytes"),
        ([QWEN3_8B, "--module", "language_model"], 2, "is no artifact"),
        ([QWEN3_8B, QWEN3_4B, "--module", "language_model"], 2, "is for one artifact"),
        ([QWEN3_8B, QWEN3_4B, "--npu", "cpu", "--npu", "RBLN-CR13"], 2, "give --npu once"),
        ([QWEN3_8B, QWEN3_4B, *CR13], 2, "give batch_size"),
        ([QWEN3_8B, QWEN3_4B, *CR13, *(["--memory-budget=9%"] * 3)], 2, "3 memory budgets for 2"),
        ([QWEN3_8B, "--plot", "plan.pdf"], 2, ".svg, .png"),
        ([QWEN3_8B, "--plot", "no/such/place/plan.svg"], 2, "no/such/place"),
        ([QWEN3_8B, "--output-dir", "a"], 2, "unrecognized arguments: --output-dir"),
        (["./no_such_model"], 1, "there is no such file or directory"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str | Path], code: int, message: str
) -> None:
    assert_refused(reblock_here("plan", *arguments), code, message)


def test_an_artifact_refuses_what_compiling_has_settled(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    result = reblock_here("plan", directory, "--batch-size", "8", "--dtype", "bfloat16")
    assert_refused(result, 2, "which has settled batch_size, dtype")


def test_a_damaged_artifact_exits_with_4(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / "a")
    (directory / "prefill.rbln").write_bytes(b"cut off")
    assert_refused(reblock("plan", directory), 4, "prefill.rbln")


def test_a_picture_of_another_kind_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    result = reblock_here("plan", tmp_path / "nothing", "--plot", tmp_path / "plan.txt")
    assert_refused(result, 2, "plan.txt")


# How it is printed.


@pytest.mark.parametrize(
    "arguments", [(QWEN3_8B,), (DATA / QWEN3_CR13,), (CONFIGS / "gpt-oss-20b",)]
)
def test_lines_end_at_80_columns_but_for_what_is_copied(arguments: tuple[Path, ...]) -> None:
    result = run("reblock", "plan", *arguments, "--npu", "RBLN-CR13", env=COMPILER)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        is_copied = line.startswith(("model ", "artifact ", "  optimum-rbln-cli ", "  reblock "))
        assert is_copied or len(line) <= 80, line
        assert line == line.rstrip()


def test_plan_prints_ascii_alone_where_the_terminal_has_no_more() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = run("reblock", "plan", QWEN3_8B, *CR13, env=ascii_only)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "\\u" not in result.stdout
    assert "W weights" in result.stdout
    assert "-----" in result.stdout


def on_a_terminal(*arguments: str | Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `reblock` on a terminal of its own, and return its exit code and all that it showed."""
    terminal, end = os.openpty()
    script = os.path.join(sysconfig.get_path("scripts"), "reblock")
    process = subprocess.Popen(
        [script, *map(str, arguments)], stdout=end, stderr=end, env=os.environ | (env or {})
    )
    os.close(end)
    shown = b""
    # Once nobody has its other end any more, reading from a terminal fails.
    with suppress(OSError):
        while piece := os.read(terminal, 65_536):
            shown += piece
    os.close(terminal)
    return process.wait(timeout=60), shown.decode()


def test_plan_prints_no_colours_even_to_a_terminal() -> None:
    code, shown = on_a_terminal("plan", QWEN3_8B, *CR13)
    assert code == 0
    assert "requests    " in shown
    assert "\x1b" not in shown


def test_a_terminal_is_told_that_the_hub_is_asked(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    name = "some-owner/some-model"
    code, shown = on_a_terminal("plan", name, *CR13, env=offline)
    assert code == 1
    assert shown.startswith(f"looking for {name} on the hub ...")
    for path in ("./no_such_model", QWEN3_8B):
        assert "on the hub" not in on_a_terminal("plan", path, *CR13, env=offline)[1]
    piped = run("reblock", "plan", name, *CR13, env=offline)
    assert_refused(piped, 1, name)
    assert "looking for" not in piped.stderr


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    script = os.path.join(sysconfig.get_path("scripts"), "reblock")
    result = subprocess.run(
        [script, "plan", QWEN3_8B, *CR13], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


def test_the_first_lines_can_be_taken_with_head() -> None:
    script = os.path.join(sysconfig.get_path("scripts"), "reblock")
    line = f"{shlex.join([script, 'plan', str(QWEN3_8B), *CR13])} | head -n 2"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("model ")
    assert result.stdout.count("\n") == 2
    assert result.stderr == ""


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    make_artifact(tmp_path / "[bold]a[")
    result = reblock_here("plan", "[bold]a[", cwd=tmp_path)
    assert result.stdout.startswith("artifact   [bold]a[\n")


def test_help_has_examples_and_says_what_3_means() -> None:
    result = run("reblock", "plan", "--help", env={"COLUMNS": "80"})
    assert result.returncode == 0
    assert result.stdout.count("\n  reblock plan ") == 4
    assert "80%\n" in result.stdout
    assert "3 means that none of them fits" in result.stdout


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_plan_loads_neither_torch_nor_what_it_does_not_print(output: tuple[str, ...]) -> None:
    code = (
        "import sys; from reblock.cli.main import main; main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "plan", str(QWEN3_8B), *CR13, *output],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in result.stderr.split()}
    assert not loaded & {"torch", "transformers", "numpy", "matplotlib", "huggingface_hub"}
    assert ("rich" in loaded) == (output == ())


# Pictures.


@pytest.mark.parametrize(
    ("name", "start"),
    [("plan.svg", b"<?xml"), ("plan.png", b"\x89PNG"), ("plan.HTML", b"<!")],
)
def test_a_picture_is_written_and_said_so_on_stderr(
    name: str, start: bytes, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    result = reblock_here("plan", QWEN3_8B, *CR13, "--json", "--plot", path)
    assert result.returncode == 0, result.stderr
    assert document(result)["plans"]
    assert result.stderr == f"picture written to {path}\n"
    assert path.read_bytes().startswith(start)


def test_a_picture_shows_all_plans_and_what_is_shared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shared = reblock_here(
        *("plan", QWEN3_8B, QWEN3_4B, *CR13, "--batch-size", "4"),
        *("--plot", tmp_path / "shared.html"),
    )
    assert shared.returncode == 0, shared.stderr
    text = (tmp_path / "shared.html").read_text()
    assert "Qwen3-8B" in text
    assert "Qwen3-4B" in text
    several = reblock_here(
        *("plan", QWEN3_8B, "--npu", "RBLN-CR13", "--npu", "RBLN-CA25x4"),
        *("--memory-budget", "80%", "--memory-budget", "20GB"),
        *("--plot", tmp_path / "several.html"),
    )
    assert several.returncode == 0, several.stderr
    assert "RBLN-CA25x4" in (tmp_path / "several.html").read_text()
