"""`optimum-rbln-cli`: its options, and how it refuses what it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import assert_refused, optimum, optimum_here

from artifacts import fingerprint, make_artifact

if TYPE_CHECKING:
    from pathlib import Path

GET, SET, BUDGET = "--get-kvcache-num-blocks", "--set-kvcache-num-blocks", "--set-memory-budget"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([GET, SET, "20"], "not allowed with"),
        ([GET, BUDGET, "50%"], "not allowed with"),
        ([SET, "20", BUDGET, "50%"], "not allowed with"),
        ([f"{SET}=20", GET], "not allowed with"),
        ([SET], "expected one argument"),
        ([SET, "20", SET, "24"], "given twice"),
        ([f"{GET}=yes"], "ignored explicit argument"),
        ([GET, "--batch-size", "4"], "unrecognized arguments: --batch-size 4"),
        ([SET, "20", "--force"], "unrecognized arguments: --force"),
        ([SET, "20", "stray"], "unrecognized arguments: stray"),
        (["--set-kvcache", "20"], "is unknown"),
        ([BUDGET, "50%", "--output", "b"], "unrecognized arguments: --output b"),
        ([SET, "20", "--output-dir="], "the value is empty"),
        ([SET, "20", "--output-dir", ""], "the value is empty"),
        ([SET, "20", "--output_dir", "b"], "unrecognized arguments: --output_dir b"),
        ([SET, "20", "--output-dir", "artifact"], "is the source itself"),
        ([SET, "20", "--output-dir=artifact/b"], "lies inside the source"),
    ],
)
def test_bad_options_exit_with_2_and_change_nothing(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    make_artifact(tmp_path / "artifact")
    before = fingerprint(tmp_path)
    result = optimum_here("--model-id", "artifact", *arguments, cwd=tmp_path)
    assert_refused(result, 2, message)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("arguments", [[], [GET], [SET, "20"], [GET, "--model-id="]])
def test_without_a_model_it_exits_with_2(arguments: list[str]) -> None:
    assert_refused(optimum(*arguments), 2, "--model-id")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "4"], "'batch_size'"),
        (["--batch_sizes=4"], "'batch_size'"),
        (["--batch-size"], "option --batch-size needs a value"),
        (["--batch-size", "--max-seq-len", "64"], "option --batch-size needs a value"),
        (["--batch-size=1", "--batch-size", "2"], "given twice"),
        (["--batch-size=1", "--batch_size=2"], "given twice"),
        (["--batch-size", "0"], "batch_size"),
        (["stray"], "unexpected argument 'stray'"),
        (["-b", "4"], "unexpected argument '-b'"),
        (["--memory-budget", "0"], "memory_budget"),
        (["--memory-budget", "80%", "--kvcache-num-blocks", "9"], "exclude each other"),
        (["--tensor-parallel-size", "4"], "not supported"),
        (["--output-dir", "model"], "is the source itself"),
    ],
)
def test_bad_keys_for_compiling_exit_with_2_before_any_work(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "model").mkdir()
    result = optimum_here("--model-id", "model", *arguments, cwd=tmp_path)
    assert_refused(result, 2, message)


def test_compiling_into_what_is_there_already_exits_with_1_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    result = optimum("--model-id", "org/model", "--output-dir", "there", cwd=tmp_path)
    assert_refused(result, 1, "not an empty directory")


def test_help_names_every_exit_code() -> None:
    result = optimum("--help")
    assert result.returncode == 0
    for line in ("0  done", "1  failed", "2  usage", "3  does not fit", "4  bad artifact"):
        assert line in result.stdout
