"""What is read from `config.json` alone is what transformers builds from the same file.

Models are built on torch's meta device, so that a trillion parameters take no memory, and run
once there to see the shapes of their caches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from reblock.model_spec import LayerCache, ModelSpec, parse_model_config
from reblock.model_spec.defaults import DEFAULTS
from reblock.model_spec.fields import NAMES
from reblock.model_spec.parameters import FAMILIES

pytestmark = pytest.mark.full

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
# transformers reads these with code of the checkpoint only.
FOREIGN = ("Kimi-K2-Instruct", "MiniMax-Text-01")
KNOWN = sorted(path.name for path in CONFIGS.iterdir() if path.name not in FOREIGN)

# Model types whose parameters are not counted: the architecture has parts of its own.
NOT_COUNTED = {
    "falcon_h1": "attention and Mamba side by side",
    "gemma3n": "embeddings of every layer, alternating updates, low-rank paths",
    "gemma4": "layers of two shapes, values that are keys",
    "gemma4_unified": "layers of two shapes, values that are keys",
    "glm_moe_dsa": "an index in every layer",
    "kimi_linear": "a delta rule with low-rank gates",
    "lfm2": "short convolutions",
    "nemotron_h": "layers that are a feed-forward part alone",
    "recurrent_gemma": "block-diagonal recurrences",
}

# What a configuration may turn on and off, and what parameters depend on.
BIASES = (
    "attention_bias",
    "attention_out_bias",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mlp_bias",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_conv_bias",
    "use_qk_norm",
    "use_qkv_bias",
)

PARTS = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}

KINDS = {
    "full_attention": "full",
    "indexed_attention": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "dummy": "none",
}


def read(name: str) -> ModelSpec:
    path = CONFIGS / name / "config.json"
    return parse_model_config(path.read_bytes(), path=str(path))


def text_config(name: str) -> Any:
    return AutoConfig.from_pretrained(CONFIGS / name).get_text_config(decoder=True)


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return build(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("name", KNOWN)
def test_kinds_and_windows_of_layers_are_those_of_transformers(name: str) -> None:
    spec = read(name)
    types, arguments = get_layer_types_and_kwargs(text_config(name))
    theirs = [
        (KINDS[kind], entry.get("sliding_window"))
        for kind, entry in zip(types, arguments, strict=True)
    ]
    same = {"latent": "full", "shared": "none"}
    ours = [(same.get(layer.kind, layer.kind), layer.window) for layer in spec.layers]
    if name == "Phi-3-mini-128k-instruct":
        # Its window is longer than its context, so nothing ever leaves it.
        assert set(theirs) == {("sliding", 262_144)}
        theirs = [("full", None)] * len(theirs)
    assert ours == theirs


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    spec = read(name)
    if spec.model_type in NOT_COUNTED:
        assert spec.num_parameters is None
        return
    assert spec.num_parameters == meta_model(text_config(name)).num_parameters()


def test_reasons_for_not_counting_are_of_models_that_are_not_counted() -> None:
    assert {read(name).model_type for name in KNOWN if read(name).num_parameters is None} == set(
        NOT_COUNTED
    )


def kept_elements(layer: Any) -> tuple[int, int]:
    """Return the elements of a token, and of the state, that a layer's cache holds."""
    keys: Any = getattr(layer, "keys", None)
    values: Any = getattr(layer, "values", None)
    per_token = 0
    if keys is not None and keys.dim() == 4:
        per_token = keys.shape[1] * (keys.shape[3] + values.shape[3])
    indices = getattr(layer, "indexer_keys", None)
    if indices is not None:
        per_token += indices.shape[-1]
    states: list[Any] = []
    for name in ("conv_states", "recurrent_states"):
        found = getattr(layer, name, None) or {}
        states.extend(found.values() if isinstance(found, dict) else found)
    return per_token, sum(state.numel() for state in states if state is not None)


def run_cache(config: Any) -> list[tuple[int, int]]:
    """Return what every layer of the cache holds after the model has run once."""
    model, cache = meta_model(config), DynamicCache(config=config)
    with torch.no_grad():
        model(torch.zeros(1, 6, dtype=torch.long, device="meta"), use_cache=True, cache=cache)
    return [kept_elements(layer) for layer in cache.layers]


def expected_elements(layer: LayerCache) -> tuple[int, int]:
    return layer.elements_per_token, layer.state_elements


@pytest.mark.parametrize("name", KNOWN)
def test_cache_has_the_widths_and_states_that_were_read(name: str) -> None:
    spec = read(name)
    if name == "recurrentgemma-2b":
        pytest.skip("transformers keeps its states outside of the cache")
    theirs = run_cache(text_config(name))
    ours = [expected_elements(layer) for layer in spec.layers]
    if name == "falcon-40b":
        # transformers repeats the keys of a group for every head of it.
        ours = [(per_token * 128 // 8, state) for per_token, state in ours]
    assert theirs == ours


def test_parts_of_models_that_see_count_like_the_model_they_are_made_of() -> None:
    # transformers builds these within the whole model only.
    for part, whole in PARTS.items():
        assert FAMILIES[part] is FAMILIES[whole]


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - PARTS.keys()))
def test_parameters_of_every_family_are_those_of_transformers(model_type: str) -> None:
    build: Any = CONFIG_MAPPING[model_type]
    flags = [key for key in BIASES if hasattr(build(), key)]
    for value in (False, True):
        config = build(**dict.fromkeys(flags, value))
        text = json.dumps(config.to_dict(), default=str)
        spec = parse_model_config(text, path=model_type)
        assert spec.num_parameters == meta_model(config).num_parameters(), value


@pytest.mark.parametrize(
    "model_type", ["bloom", "cohere2", "falcon_h1", "mimo_v2_flash", "persimmon", "zamba", "zamba2"]
)
def test_cache_of_types_with_widths_of_their_own_is_that_of_transformers(model_type: str) -> None:
    config: Any = CONFIG_MAPPING[model_type]()
    spec = parse_model_config(json.dumps(config.to_dict(), default=str), path=model_type)
    assert run_cache(config) == [expected_elements(layer) for layer in spec.layers]


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    fields = CONFIG_MAPPING[model_type].__dataclass_fields__
    for name, value in DEFAULTS[model_type].items():
        key = next(key for key in NAMES.get(name, (name,)) if key in fields)
        assert fields[key].default == value, name


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_no_default_that_decides_on_the_cache_is_missing(model_type: str) -> None:
    fields = CONFIG_MAPPING[model_type].__dataclass_fields__
    for name in ("num_key_value_heads", "sliding_window", "kv_lora_rank", "attention_chunk_size"):
        key = next((key for key in NAMES.get(name, (name,)) if key in fields), None)
        default = None if key is None else fields[key].default
        if isinstance(default, int) and key != "window_size":
            assert DEFAULTS[model_type][name] == default, name
