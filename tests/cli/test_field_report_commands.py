"""What users of comparable systems reported of what was printed, and of exit codes.

Every test names the report that it is of; docs/field-reports.md lists them all.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from commands import assert_refused, optimum, reblock, reblock_here, run

from artifacts import (
    BLOCK_SIZE,
    BYTES_PER_BLOCK,
    PROGRAMS,
    fingerprint,
    make_artifact,
    read_config,
    read_description,
    write_config,
)
from fakes import ByteTokenizer, FakeRunner, FakeSampler, make_limits
from rbln_artifacts import QWEN3_CA25, QWEN3_CR13, STANDIN, copy_artifact
from reblock.cli import generate
from reblock.engine.engine import Engine

if TYPE_CHECKING:
    import subprocess

MODELS = Path(__file__).parents[1] / "data" / "model_configs"
COMPILER = {"PYTHONPATH": str(STANDIN)}
# What 9 blocks take on each of the four devices, worked out in test_rbln_artifacts.py.
SMALLEST = 9 * 301_989_888 + 4_612_161_536
AVAILABLE = 16_877_879_296


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact", num_blocks=16)


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """An artifact for four RBLN-CA25, so that budgets mean the same on every machine."""
    return copy_artifact(QWEN3_CA25, tmp_path / "compiled")


def set_budget(directory: Path, budget: str) -> subprocess.CompletedProcess[str]:
    return run("reblock", "set", directory, "--memory-budget", budget, env=COMPILER)


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def planned(name: str, *options: str) -> dict[str, Any]:
    """Return the plan of a public model, as `reblock plan --json` prints it."""
    result = reblock_here("plan", MODELS / name, *options, "--json")
    (plan,) = json.loads(result.stdout)["plans"]
    assert (result.returncode == 0) == plan["fits"]
    return dict(plan)


# Budgets


@pytest.mark.parametrize("command", ["set", "plan", "compile"])
def test_the_help_says_what_a_fraction_is_of(command: str) -> None:
    # Report 8: users took a share of what was free for one of the whole.
    text = words(reblock_here(command, "--help").stdout)
    help_text = text[text.index("--memory-budget BUDGET", text.index("options:")) :]
    assert "available" in help_text[:400]


def test_a_refusal_names_the_base_of_a_fraction_and_every_term(compiled: Path) -> None:
    # Reports 3 and 8: where a number comes from, and what a share is a share of.
    result = set_budget(compiled, "30%")
    assert_refused(result, 3, "node 0, chiplet 0 needs", "is not KV cache", "share of the budget")
    for num_bytes in (SMALLEST, 4_612_161_536, AVAILABLE * 3 // 10, AVAILABLE):
        assert f"{num_bytes:,} bytes" in result.stderr
    assert "of the 15.72 GiB (16,877,879,296 bytes) available" in result.stderr


def test_inspect_prints_every_term_between_the_memory_and_what_is_free(directory: Path) -> None:
    # Report 3.
    text = words(reblock("inspect", directory).stdout)
    terms = ("available", "- Weight", "- Workspace", "- fixed KV cache")
    for term in (*terms, "- resizable KV cache, 16 blocks of 4.00 MiB", "- alignment", "= free"):
        assert re.search(rf"{re.escape(term)} [\d.,]+ \w+ [\d,]+|{re.escape(term)} 0 bytes 0", text)


def test_a_plan_prints_every_term_of_a_length_that_does_not_fit() -> None:
    # Report 3.
    options = ["--npu", "RBLN-CA25", "--batch-size", "1", "--max-seq-len", "40960"]
    result = reblock_here("plan", MODELS / "Qwen3-8B", *options)
    assert result.returncode == 3
    plan = planned("Qwen3-8B", *options)
    for term in plan["waterfall"]["terms"]:
        assert f"{term['num_bytes']:,}" in result.stdout
    for key in ("dram_bytes", "reserve_bytes", "budget_bytes", "unused_bytes"):
        assert f"{plan['waterfall'][key]:,}" in result.stdout
    assert plan["waterfall"]["unused_bytes"] < 0


def test_larger_budgets_that_change_nothing_say_why(compiled: Path) -> None:
    # Report 11: "no change at all" from 0.1 to 0.9.
    for budget in ("99%", "100%"):
        result = set_budget(compiled, budget)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("kvcache_num_blocks  40, unchanged\n")
        assert "limited by          the full batch: these programs can never use more" in (
            result.stdout
        )
    result = set_budget(compiled, "50.5%")
    before = result.stdout
    assert "limited by          the memory budget: one more block would not fit" in before
    assert f"one more block      {4_612_161_536 + 13 * 301_989_888:,} bytes of budget" in before


def test_following_a_refusal_ends_at_a_budget_that_works(compiled: Path) -> None:
    # Reports 12, 13 and 14: what the message says works at once, and so does the share it names.
    before = fingerprint(compiled)
    for budget, works in (("43%", None), (str(SMALLEST - 1), None), (str(SMALLEST), 9)):
        result = set_budget(compiled, budget)
        if works is None:
            assert_refused(result, 3, f"raise memory_budget to {SMALLEST}", "43.44% of the")
            assert fingerprint(compiled) == before
        else:
            assert result.returncode == 0, result.stderr
    assert reblock("get", compiled).stdout == "9\n"
    assert set_budget(compiled, "43.44%").returncode == 0
    result = set_budget(compiled, str(AVAILABLE + 1))
    assert_refused(result, 3, "lower memory_budget to that")
    assert "raise" not in result.stderr


def test_one_and_one_point_zero_are_told_apart(compiled: Path) -> None:
    # Report 7.
    assert_refused(set_budget(compiled, "1"), 3, "write 1.0 or 100% for the whole device")
    assert set_budget(compiled, "1.0").returncode == 0
    assert reblock("get", compiled).stdout == "40\n"


@pytest.mark.parametrize("budget", ["30%", "1MB", "17GB", "0", "lots", "120%"])
@pytest.mark.parametrize("options", [[], ["--json"], ["--dry-run"], ["--output-dir=out"]])
def test_a_fit_that_fails_is_no_warning_and_leaves_everything(
    compiled: Path, budget: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Report 56: a fit that failed was a warning, and the server started and ran out of memory.
    monkeypatch.syspath_prepend(STANDIN)
    before = fingerprint(compiled.parent)
    result = reblock_here("set", compiled, "--memory-budget", budget, *options, cwd=compiled.parent)
    assert_refused(result, 3 if budget in ("30%", "1MB", "17GB") else 2, "memory_budget")
    assert fingerprint(compiled.parent) == before


def test_the_fullest_chiplet_decides_and_is_named(tmp_path: Path) -> None:
    # Report 50: the node as a whole had room, and one chiplet of it ran out.
    heavy = copy_artifact(QWEN3_CR13, tmp_path / "heavy")
    path = heavy / "prefill.rbln"
    content = json.loads(path.read_text())
    content["alloc"]["Weight"][0][3] += 2 * 2**30
    path.write_text(json.dumps(content))
    budget = 4 * (33 * 301_989_888 + 5_107_613_696)
    assert_refused(set_budget(heavy, str(budget)), 3, "node 0, chiplet 3 needs")
    result = set_budget(heavy, str(budget + 4 * 2 * 2**30))
    assert result.returncode == 0, result.stderr
    assert reblock("get", heavy).stdout == "33\n"


# Counts and what they hold


def test_a_count_of_one_is_refused_with_the_fewest_that_work(directory: Path) -> None:
    # Report 18: it started, with "16 tokens", and could serve nothing.
    before = fingerprint(directory)
    result = optimum("--set-kvcache-num-blocks", "1", "--model-id", directory)
    assert_refused(result, 3, "kvcache_num_blocks=1 is below the 9 blocks", "use 9 or more")
    assert fingerprint(directory) == before


@pytest.mark.parametrize(("count", "code", "warnings"), [(8, 3, 0), (9, 0, 0), (33, 0, 1)])
def test_counts_around_the_bounds(directory: Path, count: int, code: int, warnings: int) -> None:
    # Report 19: one block more or less than the bound decides.
    result = reblock_here("set", directory, str(count))
    assert result.returncode == code
    assert result.stderr.count("warning: ") == warnings


def test_after_a_change_every_place_names_the_same_count(directory: Path) -> None:
    # Report 24: 100 blocks, and the log went on with the tokens of the count before.
    result = optimum("--set-kvcache-num-blocks", "100", "--model-id", directory)
    assert result.returncode == 0, result.stderr
    assert "16 -> 100" in result.stdout
    assert reblock("get", directory).stdout == "100\n"
    assert read_config(directory)["kvcache_num_blocks"] == 100
    for program in PROGRAMS:
        description = read_description(directory / f"{program}.rbln")
        assert description["kvcache_num_blocks"] == 100
        assert set(map(str, description["dram"].values())) == {str([[100 * BYTES_PER_BLOCK]])}
    report = json.loads(reblock("inspect", directory, "--json").stdout)
    assert (report["kvcache_num_blocks"], report["num_tokens"]) == (100, 100 * BLOCK_SIZE)
    assert f"tokens held now {100 * BLOCK_SIZE:,}" in words(reblock("inspect", directory).stdout)


def test_blocks_and_tokens_are_printed_with_their_names_and_whole_blocks() -> None:
    # Report 28: a number of tokens that was no multiple of the block, and no word on its unit.
    options = ["--npu", "RBLN-CR13", "--max-seq-len", "40960", "--batch-size", "64"]
    plan = planned("Qwen3-8B", *options)
    count, tokens, block = plan["num_blocks"], plan["num_tokens"], plan["kvcache_block_size"]
    assert tokens == count * block
    text = words(reblock_here("plan", MODELS / "Qwen3-8B", *options).stdout)
    assert f"{count:,} of {block:,} tokens = {tokens:,} tokens" in text


def test_models_with_windows_have_two_numbers(directory: Path, tmp_path: Path) -> None:
    # Report 42: one number, bytes a token, was neither.
    options = ["--npu", "RBLN-CR13", "--batch-size", "1", "--max-seq-len", "131072"]
    plan = planned("gemma-3-27b-it", *options)
    assert plan["full_bytes_per_token"] == 81_920
    assert plan["fixed_bytes_per_request"] == 436_207_616
    text = words(reblock_here("plan", MODELS / "gemma-3-27b-it", *options).stdout)
    assert "81,920 bytes a token" in text
    assert "416.00 MiB (436,207,616 bytes) a request" in text
    own = make_artifact(tmp_path / "windows", num_blocks=16, sliding_layers=(1,))
    text = words(reblock_here("inspect", own).stdout)
    assert "- fixed KV cache 16.00 MiB 16,777,216" in text
    assert "- resizable KV cache, 16 blocks of 2.00 MiB 32.00 MiB 33,554,432" in text


def test_a_capacity_is_printed_with_its_type_budget_and_lengths() -> None:
    # Report 46: tools disagreed, as none said for what its capacity was.
    options = ["--npu=RBLN-CR13", "--memory-budget=90%", "--batch-size=8", "--max-seq-len=65536"]
    text = words(reblock_here("plan", MODELS / "gemma-3-27b-it", *options).stdout)
    for part in ("bfloat16", "90% of the 140.00 GiB available", "8 requests of up to 65,536"):
        assert part in text


# Artifacts and requests


@pytest.mark.parametrize("key", ["max_seq_len", "kvcache_block_size", "batch_size", "cache_metas"])
def test_a_field_that_is_missing_is_an_error_and_never_a_small_default(
    directory: Path, key: str
) -> None:
    # Report 61: without its maxContextLen an artifact took 128, and crashed at 127 tokens.
    config = read_config(directory)
    del config[key]
    write_config(directory, config)
    before = fingerprint(directory)
    for arguments in (["inspect"], ["set", "20"], ["plan"], ["set", "--memory-budget", "50%"]):
        command, *rest = arguments
        assert_refused(reblock_here(command, directory, *rest), 4, "rbln_config.json", key)
    assert reblock_here("verify", directory).returncode == 4
    assert fingerprint(directory) == before


def test_a_count_that_was_edited_by_hand_is_found_out(directory: Path) -> None:
    # Report 66: users write the count into the JSON, where the programs do not see it.
    write_config(directory, read_config(directory) | {"kvcache_num_blocks": 256})
    before = fingerprint(directory)
    for arguments in (["inspect"], ["set", "20"], ["plan"]):
        command, *rest = arguments
        result = reblock_here(command, directory, *rest)
        assert_refused(result, 4, "holds 16 blocks", "says 256")
    assert fingerprint(directory) == before


def test_a_prompt_that_can_never_fit_ends_the_command_and_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Report 17: 50 blocks of 16 tokens, and a prompt of 1,002 tokens.
    runner = FakeRunner(make_limits(num_blocks=50, block_size=16, max_seq_len=2048))

    def load(directory: str, num_threads: int | None) -> tuple[Engine, ByteTokenizer]:
        return Engine(runner, sampler=FakeSampler()), ByteTokenizer()

    monkeypatch.setattr(generate, "_load", load)
    arguments = ["generate", "dir", "--raw", "--max-new-tokens", "1", "--prompt"]
    result = reblock_here(*arguments, "x" * 1_002)
    assert_refused(result, 3, "takes 63 blocks of 16 tokens", "the KV cache has 50")
    assert runner.calls == []
    assert reblock_here(*arguments, "x" * 800).returncode == 0


def test_what_will_not_fit_is_said_by_an_exit_code_before_an_hour_of_compiling() -> None:
    # Report 65: "Estimated peak HBM usage (19.0) exceeds 16GB", once it was compiled.
    result = reblock("plan", MODELS / "Llama-2-7b-hf", "--npu", "RBLN-CA25", "--batch-size", "4")
    assert result.returncode == 3
    text = words(result.stdout)
    assert "does not fit" in text.lower()
    assert "21.05 GiB (22,603,636,736 bytes)" in text
    assert "lower batch_size to 1" in text
    options = ["--npu", "RBLN-CA25", "--batch-size", "1"]
    assert reblock("plan", MODELS / "Llama-2-7b-hf", *options).returncode == 0


def test_two_models_are_told_whether_they_fit_together() -> None:
    # Reports 6 and 8: shares of two models on one device, printed with their sum.
    names = [MODELS / "Qwen3-0.6B", MODELS / "Qwen3-1.7B"]
    shapes = ["--batch-size", "16", "--max-seq-len", "8192", "--kvcache-partition-len", "1024"]
    for shares, code in ((("60%", "40%"), 0), (("60%", "50%"), 3)):
        budgets = [text for share in shares for text in ("--memory-budget", share)]
        result = reblock_here("plan", *names, "--npu", "RBLN-CA25", *shapes, *budgets)
        assert result.returncode == code
        assert "together they take" in words(result.stdout).lower()
