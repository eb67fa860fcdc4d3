"""Artifacts whose linear layers keep their weights in another type than the programs compute in."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from installed import generate, reblock, refused
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from reblock.artifact.reader import open_artifact
from reblock.backends.torch.native.pack import unpack
from reblock.backends.torch.profile import _compare
from reblock.planning import plan
from tiny_models import write_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

PROMPTS = ("The cache holds the keys", "in blocks. " * 30, "and")
NEW = 24
# What docs/models.md states for weights of a random model: of the norm of all logits.
BOUNDS = {"int8": 0.1, "bfloat16": 0.03}


@dataclass(frozen=True)
class Case:
    weight_dtype: str
    model: Path
    artifact: Path


def load(directory: Path) -> Any:
    auto_class: Any = AutoModelForCausalLM
    return auto_class.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose embedding and head are one weight, with sizes that fill no whole panel."""
    directory: Path = tmp_path_factory.mktemp("tied") / "model"
    write_model("llama", directory)
    config: Any = AutoConfig.from_pretrained(directory)
    config.tie_word_embeddings, config.intermediate_size = True, 134
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = 0
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=BOUNDS)
def case(
    request: pytest.FixtureRequest, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    artifact = tmp_path_factory.mktemp(request.param) / "artifact"
    options = ("--dtype", "float32", "--weight-dtype", request.param)
    sizes = ("--batch-size", "2", "--max-seq-len", "512", "--kvcache-num-blocks", "8")
    result = reblock("compile", tied_model, "--output-dir", artifact, *options, *sizes)
    assert result.returncode == 0, result.stderr
    return Case(request.param, tied_model, artifact)


def tensors(artifact: Path) -> dict[str, torch.Tensor]:
    return load_file(artifact / "weights.safetensors")


def with_kept_weights(case: Case) -> Any:
    """Return transformers' model with the weights that the artifact has, widened to float32."""
    kept, model = tensors(case.artifact), load(case.model)
    with torch.no_grad():
        for name, module in model.named_modules():
            # The head is the embedding, under whose name the shared weight is kept.
            key = "model.embed_tokens" if name == "lm_head" else name
            if type(module) is nn.Linear:
                weight = unpack(kept[f"{key}.weight"], *module.weight.shape).float()
                scales = kept.get(f"{key}.scales")
                module.weight.copy_(weight if scales is None else weight * scales[:, None])
    assert model.get_input_embeddings().weight is model.lm_head.weight
    return model


def answers(model: Any, directory: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(new[0, ids.shape[1] :].tolist())
    return found


def test_the_artifact_says_what_its_weights_are_and_can_be_resized(
    case: Case, tmp_path: Path
) -> None:
    written = json.loads((case.artifact / "rbln_config.json").read_text())
    assert (written["dtype"], written["reblock"]["weight_dtype"]) == ("float32", case.weight_dtype)
    assert f"float32, weights {case.weight_dtype}" in reblock("inspect", case.artifact).stdout
    copy = shutil.copytree(case.artifact, tmp_path / "copy")
    assert reblock("set", copy, 6).returncode == 0
    assert reblock("get", copy).stdout == "6\n"
    assert open_artifact(str(copy)).config.weight_dtype == case.weight_dtype
    assert reblock("verify", copy).returncode == 0
    short = generate(copy, PROMPTS[:1], "--raw", "--max-new-tokens", NEW)
    assert short["kvcache_num_blocks"] == 6


def test_weights_take_what_was_planned(case: Case) -> None:
    kept = tensors(case.artifact)
    term = open_artifact(str(case.artifact)).memory_plan().static["Weight"]
    assert term == ((sum(tensor.nbytes for tensor in kept.values()),),)
    planned = plan(
        str(case.model), npu="cpu", dtype="float32", weight_dtype=case.weight_dtype, batch_size=1
    )
    weights = next(term for term in planned.waterfall.terms if term.name == "Weight")
    buffers = sum(tensor.nbytes for name, tensor in kept.items() if "inv_freq" in name)
    assert 0 < buffers <= 1024
    assert term[0][0] == weights.num_bytes + buffers
    assert planned.weights_dtype == case.weight_dtype
    assert f"--weight-dtype {case.weight_dtype}" in planned.commands[0].line


def test_greedy_tokens_are_those_of_transformers_with_the_kept_weights(case: Case) -> None:
    report = generate(case.artifact, PROMPTS, "--raw", "--max-new-tokens", NEW)
    found = [result["token_ids"] for result in report["results"]]
    assert found == answers(with_kept_weights(case), case.artifact)


def test_logits_are_within_the_stated_bound_of_the_model_that_was_not_rounded(case: Case) -> None:
    ids = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(1))
    artifact = open_artifact(str(case.artifact))
    errors = []
    for model in (load(case.model), with_kept_weights(case)):
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, -50:]
        errors.append(_compare(artifact, {"input_ids": ids, "logits": logits}))
    assert 1e-3 < errors[0] < BOUNDS[case.weight_dtype]
    # Against the rounded weights, which every compilation is checked against, it is exact.
    assert errors[1] < 1e-4


def test_a_false_type_of_the_weights_is_found_when_programs_are_loaded(
    case: Case, tmp_path: Path
) -> None:
    false = shutil.copytree(case.artifact, tmp_path / "false")
    config = json.loads((false / "rbln_config.json").read_text())
    for stated in {*BOUNDS, "float32"} - {case.weight_dtype}:
        config["reblock"]["weight_dtype"] = stated
        (false / "rbln_config.json").write_text(json.dumps(config))
        contradiction = f"weights in {case.weight_dtype}, but rbln_config.json says {stated}"
        refused(reblock("generate", false, "--prompt", "a", "--raw"), 4, contradiction)
    result = reblock("verify", false)
    assert result.returncode == 4
    assert contradiction in result.stdout


def test_weights_of_another_type_are_refused_when_programs_are_loaded(
    case: Case, tmp_path: Path
) -> None:
    mixed = shutil.copytree(case.artifact, tmp_path / "mixed")
    path = mixed / "weights.safetensors"
    widened = {name: tensor.float() for name, tensor in load_file(path).items()}
    save_file(widened, path)
    config = json.loads((mixed / "rbln_config.json").read_text())
    config["reblock"]["weights"]["weights.safetensors"]["bytes"] = path.stat().st_size
    (mixed / "rbln_config.json").write_text(json.dumps(config))
    result = reblock("generate", mixed, "--prompt", "a", "--raw")
    refused(result, 4, "other names, types or shapes")
