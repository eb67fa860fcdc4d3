"""`reblock compile` up to the compiler, which a stand-in takes the place of here."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from commands import assert_refused, optimum_here, reblock_here

from reblock.backends import loading
from reblock.cli.compile import default_output_dir
from reblock.errors import UsageError
from reblock.options import CompileOptions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, CompileOptions]]:
    """What the compiler was asked for."""
    asked: list[tuple[str, str, CompileOptions]] = []

    def compile_model(model: str, output_dir: str, options: CompileOptions, progress: Any) -> Any:
        asked.append((model, output_dir, options))
        with progress.stage("compiling"):
            pass
        sizing = SimpleNamespace(
            num_blocks=40,
            bounds=SimpleNamespace(minimum=9, full=40),
            limited_by="full_batch",
            budget_bytes=2**30,
        )
        return SimpleNamespace(
            output_dir=output_dir, sizing=sizing, seconds={"export": 1.0, "compile": 2.0}
        )

    backend = ModuleType("reblock.backends.torch")
    backend.compile_model = compile_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reblock.backends.torch", backend)
    monkeypatch.setattr(loading, "find_spec", lambda name: object())
    return asked


def test_compile_passes_every_option_on(calls: list[Any], tmp_path: Path) -> None:
    options = ["--batch-size", "4", "--max-seq-len=256", "--memory-budget", "80%"]
    result = reblock_here("compile", "org/model", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    expected = CompileOptions.from_keys(
        {"batch_size": "4", "max_seq_len": "256", "memory_budget": "80%"}
    )
    assert calls == [("org/model", "model", expected)]
    assert result.stdout.splitlines() == [
        "written to          model, in 3 s",
        "kvcache_num_blocks  40, of at most 40",
        "memory budget       1.00 GiB",
    ]
    assert "compiling: done in" in result.stderr


def test_compile_by_the_options_of_optimum_rbln_asks_for_the_same(
    calls: list[Any], tmp_path: Path
) -> None:
    keys = ["--batch_size", "4", "--max-seq-len=256", "--memory-budget=80%"]
    assert optimum_here("--model-id", "org/model", *keys, cwd=tmp_path).returncode == 0
    reblock_keys = ["--batch-size=4", "--max-seq-len", "256", "--memory-budget", "80%"]
    assert reblock_here("compile", "org/model", *reblock_keys, cwd=tmp_path).returncode == 0
    assert calls[0] == calls[1]


def write_config(directory: Path) -> None:
    """Write the configuration of a model whose weights and smallest cache take a few MiB."""
    directory.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))


def test_compile_with_a_budget_that_a_plan_finds_too_small_warns_and_goes_on(
    calls: list[Any], tmp_path: Path
) -> None:
    write_config(tmp_path / "model")
    arguments = ["compile", "model", "--output-dir", "out", "--weight-dtype", "int8"]
    result = reblock_here(*arguments, "--memory-budget", "100MB", cwd=tmp_path)
    assert result.returncode == 0
    assert len(calls) == 1
    found = re.search(
        r"memory_budget='100MB' is probably too small.*\(([\d,]+) bytes", result.stderr
    )
    assert found is not None, result.stderr
    enough = found[1].replace(",", "")
    result = reblock_here(*arguments, "--memory-budget", enough, cwd=tmp_path)
    assert len(calls) == 2
    assert "probably too small" not in result.stderr


def test_compile_leaves_what_no_plan_can_read_to_the_compiler(
    calls: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    arguments = ["compile", "model", "--output-dir", "out", "--memory-budget", "100MB"]
    result = reblock_here(*arguments, cwd=tmp_path)
    assert result.returncode == 0
    assert len(calls) == 1
    assert "too small" not in result.stderr


def test_compile_json_prints_one_object(calls: list[Any], tmp_path: Path) -> None:
    result = reblock_here("compile", "model.gguf", "--output-dir", "out", "--json", cwd=tmp_path)
    assert json.loads(result.stdout) == {
        "output_dir": "out",
        "kvcache_num_blocks": 40,
        "num_min_blocks": 9,
        "num_full_blocks": 40,
        "limited_by": "full_batch",
        "budget_bytes": 2**30,
        "seconds": {"export": 1.0, "compile": 2.0},
    }


def test_compile_without_torch_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    result = reblock_here("compile", "org/model", cwd=tmp_path)
    assert_refused(result, 1, "pip install 'reblock[torch]'")


def test_compile_into_the_model_is_refused_before_any_work(
    calls: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    assert_refused(reblock_here("compile", "model", cwd=tmp_path), 2, "is the source itself")
    assert_refused(
        reblock_here("compile", "model", "--output-dir=model/b", cwd=tmp_path), 2, "lies inside"
    )
    assert calls == []


def test_every_compile_option_is_an_option_of_the_command() -> None:
    result = reblock_here("compile", "--help")
    for field in fields(CompileOptions):
        assert f"--{field.name.replace('_', '-')} " in result.stdout


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b-chat-hf"),
        ("/models/smol/", "smol"),
        ("smol.Q8_0.gguf", "smol.Q8_0"),
        ("models/SMOL.GGUF", "SMOL"),
    ],
)
def test_default_output_dir_is_the_name_of_the_model(model: str, name: str) -> None:
    assert default_output_dir(model) == name


@pytest.mark.parametrize("model", ["/", ".", "a/..", ".gguf"])
def test_default_output_dir_of_a_model_without_a_name_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="--output-dir"):
        default_output_dir(model)
