"""Artifacts of several modules, of which one has the KV cache."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from commands import assert_refused, optimum_here, reblock_here

from artifacts import fingerprint
from rbln_artifacts import (
    QWEN3_CA25,
    STANDIN,
    caches,
    copy_artifact,
    make_vision_language,
    read_json,
)
from reblock.artifact.transaction import replace as replace_module

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "language_model"
CHANGED = {
    "rbln_config.json",
    f"{MODULE}/rbln_config.json",
    f"{MODULE}/prefill.rbln",
    f"{MODULE}/decoder_batch_8.rbln",
    f"{MODULE}/.reblock.json",
}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rebel", raising=False)
    monkeypatch.syspath_prepend(STANDIN)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_vision_language(tmp_path / "artifact")


def test_without_a_module_the_error_lists_them(directory: Path) -> None:
    before = fingerprint(directory)
    for arguments in (["get"], ["set", "9"], ["inspect"], ["verify"]):
        command, *rest = arguments
        result = reblock_here(command, directory, *rest)
        assert_refused(result, 2, "choose it with --module: language_model")
    result = optimum_here("--get-kvcache-num-blocks", "--model-id", directory)
    assert_refused(result, 2, "language_model")
    assert fingerprint(directory) == before


@pytest.mark.parametrize("module", ["vision_tower", "none", "..", "/etc", "language_model/.."])
def test_a_module_that_is_not_there_is_refused_with_those_that_are(
    directory: Path, module: str
) -> None:
    for arguments in (["get"], ["set", "9"], ["inspect"], ["verify"]):
        command, *rest = arguments
        result = reblock_here(command, directory, *rest, "--module", module)
        assert_refused(result, 2, "those that it has: language_model")


@pytest.mark.parametrize("spelling", [MODULE, f"{MODULE}/", f"./{MODULE}"])
def test_a_module_is_read(directory: Path, spelling: str) -> None:
    assert reblock_here("get", directory, "--module", spelling).stdout == "40\n"
    report = json.loads(reblock_here("inspect", directory, f"--module={spelling}", "--json").stdout)
    assert (report["module"], report["kvcache_num_blocks"]) == (MODULE, 40)
    assert report["num_fitting_blocks"] == 40
    assert reblock_here("verify", directory, "--module", spelling).returncode == 0
    result = optimum_here("--get-kvcache-num-blocks", "--model-id", directory, "--module", spelling)
    assert result.stdout == "40\n"


@pytest.mark.parametrize("way", ["exchange", "journal"])
def test_a_module_is_resized_in_place_with_what_is_said_of_it_outside(
    directory: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "journal":
        monkeypatch.setattr(replace_module, "_may_exchange", lambda target: False)
    before = fingerprint(directory)
    result = reblock_here("set", directory, "9", "--module", MODULE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("module              language_model\n")
    after = fingerprint(directory)
    assert {name for name in after if before.get(name) != after[name]} == CHANGED
    assert set(caches(directory / MODULE)["past_key_values_0"][0]) == {9 * 4 * 2**20}
    assert read_json(directory / "rbln_config.json")[MODULE]["kvcache_num_blocks"] == 9
    assert read_json(directory / MODULE / "rbln_config.json")["kvcache_num_blocks"] == 9
    result = reblock_here("set", directory, "--previous", "--module", MODULE)
    assert result.returncode == 0, result.stderr
    back = fingerprint(directory)
    del back[f"{MODULE}/.reblock.json"]
    assert back == before
    assert os.listdir(directory.parent) == ["artifact"]


def test_a_module_is_resized_to_a_budget_in_a_copy_of_the_whole(
    directory: Path, tmp_path: Path
) -> None:
    before = fingerprint(directory)
    out = tmp_path / "out"
    result = optimum_here(
        "--set-memory-budget=10GB", "--model-id", directory, "--module", MODULE, "--output-dir", out
    )
    assert result.returncode == 0, result.stderr
    assert fingerprint(directory) == before
    after = fingerprint(out)
    assert {name for name in after if before.get(name) != after[name]} == CHANGED
    assert reblock_here("get", out, "--module", MODULE).stdout == "20\n"


def test_an_outer_configuration_that_says_another_count_is_a_contradiction(directory: Path) -> None:
    config = read_json(directory / "rbln_config.json")
    config[MODULE]["kvcache_num_blocks"] = 39
    (directory / "rbln_config.json").write_text(json.dumps(config))
    before = fingerprint(directory)
    result = reblock_here("set", directory, "9", "--module", MODULE)
    assert_refused(result, 4, "says 39 blocks for language_model, but that says 40 itself")
    assert fingerprint(directory) == before


def test_an_outer_configuration_that_does_not_repeat_the_count_is_left(directory: Path) -> None:
    config = read_json(directory / "rbln_config.json")
    del config[MODULE]
    (directory / "rbln_config.json").write_text(json.dumps(config))
    text = (directory / "rbln_config.json").read_text()
    assert reblock_here("set", directory, "9", "--module", MODULE).returncode == 0
    assert (directory / "rbln_config.json").read_text() == text


def test_a_module_may_lie_deeper(tmp_path: Path) -> None:
    inner = make_vision_language(tmp_path / "a" / "model")
    outer = {"cls_name": "RBLNOuterConfig", "model": read_json(inner / "rbln_config.json")}
    (tmp_path / "a" / "rbln_config.json").write_text(json.dumps(outer))
    assert_refused(reblock_here("get", tmp_path / "a"), 2, "model/language_model")
    result = reblock_here("set", tmp_path / "a", "9", "--module", "model/language_model")
    assert result.returncode == 0, result.stderr
    outer = read_json(tmp_path / "a" / "rbln_config.json")
    assert outer["model"][MODULE]["kvcache_num_blocks"] == 9
    assert read_json(inner / "rbln_config.json")[MODULE]["kvcache_num_blocks"] == 9
    assert reblock_here("get", inner, "--module", MODULE).stdout == "9\n"


def test_a_module_of_an_artifact_that_has_a_cache_itself(tmp_path: Path) -> None:
    directory = copy_artifact(QWEN3_CA25, tmp_path / "a")
    copy_artifact(QWEN3_CA25, directory / "draft")
    assert reblock_here("set", directory, "9", "--module", "draft").returncode == 0
    assert reblock_here("get", directory).stdout == "40\n"
    assert reblock_here("get", directory, "--module", "draft").stdout == "9\n"


def test_links_and_hidden_directories_are_no_modules(directory: Path, tmp_path: Path) -> None:
    other = copy_artifact(QWEN3_CA25, tmp_path / "other")
    (directory / "linked").symlink_to(other)
    copy_artifact(QWEN3_CA25, directory / ".hidden")
    for module in ("linked", ".hidden"):
        result = reblock_here("get", directory, "--module", module)
        assert_refused(result, 2, "those that it has: language_model\n")


def test_a_compilation_has_no_modules() -> None:
    result = optimum_here("--model-id", "model", "--module", "x")
    assert_refused(result, 2, "--module goes with --get-... and --set-...")
