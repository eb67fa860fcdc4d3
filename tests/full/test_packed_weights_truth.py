"""What weights are planned to take is what the packed model takes, of every counted model type.

Models are built and packed on torch's meta device, as the compiler does before it reads weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from test_model_spec_truth import ALONE, BIASES, DEEP, FIXED, KNOWN, family_config, text_config
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from reblock.backends.torch.native import replace_linears
from reblock.backends.torch.source import TORCH_DTYPES, linear_dtype
from reblock.model_spec import ModelSpec, parse_model_config
from reblock.planning.packed_weights import plan_packed_weights
from reblock.planning.sources import ModelSource

pytestmark = pytest.mark.full

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
TYPES: list[tuple[Any, Any]] = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
]


def parse(config: Any) -> ModelSpec:
    text = json.dumps(config.to_dict(), default=str)
    return parse_model_config(text, path=config.model_type)


def packed_bytes(config: Any, dtype: Any, weight_dtype: Any) -> int:
    """Return what the parameters take that a compiled model has; buffers are no parameters."""
    auto_class: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=TORCH_DTYPES[dtype])
    replace_linears(model, linear_dtype(dtype, weight_dtype))
    assert not [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def planned_bytes(spec: ModelSpec, dtype: Any, weight_dtype: Any) -> int:
    source = ModelSource(name="it", kind="directory", spec=spec, stored=None, notes=())
    planned = plan_packed_weights(source, dtype, weight_dtype, None)
    assert planned.term.error_bytes == 0
    assert planned.dtype == weight_dtype
    return planned.num_bytes


def config_of(model_type: str, *, has_flags: bool) -> Any:
    """Return the default configuration with few layers, its biases and tied weights on or off."""
    flags = [key for key in BIASES if hasattr(family_config(model_type), key)]
    depth = {} if model_type in DEEP or model_type == "lfm2" else {"num_hidden_layers": 6}
    values = dict.fromkeys(flags, has_flags) | FIXED.get(model_type, {})
    return family_config(model_type, **depth, **values)


COUNTED = [name for name in ALONE if parse(config_of(name, has_flags=True)).linears is not None]


def test_linear_layers_are_counted_of_what_is_tested_on_compilations() -> None:
    compiled = {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2"}
    compiled |= {"opt", "phi3", "qwen2", "qwen3", "smollm3"}
    assert compiled <= set(COUNTED)


@pytest.mark.parametrize("model_type", COUNTED)
def test_planned_weights_of_every_counted_family_are_what_packing_makes_of_it(
    model_type: str,
) -> None:
    for has_flags in (False, True):
        config = config_of(model_type, has_flags=has_flags)
        for types in (("float32", "int8"), ("bfloat16", "bfloat16")):
            assert planned_bytes(parse(config), *types) == packed_bytes(config, *types)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_sizes_that_fill_no_panel_and_no_word_are_counted_filled_up(types: tuple[Any, Any]) -> None:
    for is_tied in (False, True):
        config = family_config(
            "llama",
            hidden_size=50,
            intermediate_size=131,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=10,
            num_hidden_layers=2,
            vocab_size=1001,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=is_tied,
        )
        assert planned_bytes(parse(config), *types) == packed_bytes(config, *types)


@pytest.mark.parametrize("name", KNOWN)
def test_planned_weights_of_public_models_are_what_packing_makes_of_them(name: str) -> None:
    config = text_config(name)
    path = CONFIGS / name / "config.json"
    spec = parse_model_config(path.read_bytes(), path=str(path))
    if spec.linears is None:
        pytest.skip("its linear layers are not counted")
    for types in (("bfloat16", "bfloat16"), ("bfloat16", "int8")):
        assert planned_bytes(spec, *types) == packed_bytes(config, *types)
