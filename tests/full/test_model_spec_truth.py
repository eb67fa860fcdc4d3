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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from reblock.model_spec import LayerCache, ModelSpec, parse_model_config
from reblock.model_spec.defaults import DEFAULTS
from reblock.model_spec.families import FAMILIES, UNCHECKED
from reblock.model_spec.fields import NAMES
from small_configs import SMALL_CONFIGS, SmallConfig

pytestmark = pytest.mark.full

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
# transformers reads these with code of the checkpoint only.
FOREIGN = ("Kimi-K2-Instruct", "MiniMax-Text-01")
KNOWN = sorted(path.name for path in CONFIGS.iterdir() if path.name not in FOREIGN)

# What a configuration may turn on and off, and what parameters depend on.
BIASES = (
    "add_bias_linear",
    "attention_bias",
    "attention_out_bias",
    "bias",
    "conv_bias",
    "lm_head_bias",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mamba_rms_norm",
    "mlp_bias",
    "projectors_bias",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_conv_bias",
    "use_qk_norm",
    "use_qkv_bias",
)
# Flags that transformers refuses, or follows for more than embeddings.
FIXED = {
    "dbrx": {"tie_word_embeddings": False},
    "internlm3": {"attention_bias": False, "mlp_bias": False},
    "kimi_linear": {"tie_word_embeddings": False},
    "nemotron_h": {"tie_word_embeddings": False},
    "zamba": {"tie_word_embeddings": True},
    "zamba2": {"tie_word_embeddings": True},
}
# What must be said for transformers to build the model at all.
NEEDED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}

# Language models that transformers builds within these models only.
WHOLES = {
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "granite_docling": "granite_docling_text",
    "mllama": "mllama_text_model",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
ALONE = sorted(FAMILIES.keys() - set(WHOLES.values()) - UNCHECKED)

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


def meta_model(config: Any, build: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return build.from_config(config, dtype=torch.bfloat16).eval()


def family_config(model_type: str, **values: Any) -> Any:
    build: Any = CONFIG_MAPPING[model_type]
    return build(**(NEEDED.get(model_type, {}) | values))


def parse(config: Any) -> ModelSpec:
    text = json.dumps(config.to_dict(), default=str)
    return parse_model_config(text, path=config.model_type)


def count(model: Any, *, parts: tuple[str, ...] = ("",), but: str = "only in parts") -> int:
    """Return the parameters with one of `parts` in their name and without `but`, each once."""
    return sum(
        tensor.numel()
        for name, tensor in model.named_parameters()
        if any(part in name for part in parts) and but not in name
    )


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
    assert read(name).num_parameters == meta_model(text_config(name)).num_parameters()


def test_every_public_config_is_counted() -> None:
    assert all(read(path.name).num_parameters for path in CONFIGS.iterdir())


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


@pytest.mark.parametrize("model_type", ALONE)
def test_parameters_of_every_family_are_those_of_transformers(model_type: str) -> None:
    flags = [key for key in BIASES if hasattr(family_config(model_type), key)]
    for value in (False, True):
        config = family_config(
            model_type, **(dict.fromkeys(flags, value) | FIXED.get(model_type, {}))
        )
        theirs = count(meta_model(config), but="embed_tokens_extend")
        assert parse(config).num_parameters == theirs, value


@pytest.mark.parametrize("whole", WHOLES)
def test_language_models_within_a_whole_have_the_parameters_of_transformers(whole: str) -> None:
    config: Any = CONFIG_MAPPING[whole]()
    text = config.get_text_config(decoder=True)
    assert text.model_type == WHOLES[whole]
    if whole in ("glm4v_moe", "qwen3_omni_moe_thinker"):
        # Its heads do not divide its width, which no file of a model says.
        text.head_dim = 128
    text.tie_word_embeddings = config.tie_word_embeddings = False
    model = meta_model(config, AutoModelForImageTextToText)
    theirs = count(model, parts=("language_model", "text_model", "lm_head"))
    assert parse(config).num_parameters == theirs


def test_lightning_attention_counts_like_the_model_of_transformers_that_has_it() -> None:
    values = json.loads((CONFIGS / "MiniMax-Text-01" / "config.json").read_text())
    kinds = ["linear_attention", "full_attention"]
    config: Any = CONFIG_MAPPING["minimax"](
        layer_types=[kinds[kind] for kind in values.pop("attn_type_list")],
        **{key: values[key] for key in values if key.startswith(("num_", "head_", "hidden_size"))},
        intermediate_size=values["intermediate_size"],
        vocab_size=values["vocab_size"],
    )
    assert read("MiniMax-Text-01").num_parameters == meta_model(config).num_parameters()


@pytest.mark.parametrize("small", SMALL_CONFIGS, ids=str)
def test_parameters_of_small_models_are_those_that_transformers_builds(small: SmallConfig) -> None:
    build: Any = CONFIG_MAPPING[small.model_type]
    assert meta_model(build(**small.values)).num_parameters() == small.parameters


# transformers cannot run these on shapes alone, or keeps their cache outside of it.
NOT_RUN = (
    "bamba",
    "biogpt",
    "dbrx",
    "deepseek_v2",
    "granitemoehybrid",
    "minimax",
    "recurrent_gemma",
)
# The defaults of these fit no other depth.
DEEP = ("gemma3n_text", "gpt_neo", "lfm2_moe", "zamba", "zamba2")


@pytest.mark.parametrize("model_type", sorted({*ALONE, "persimmon"} - {*NOT_RUN}))
def test_cache_of_every_family_is_that_of_transformers(model_type: str) -> None:
    depth = {} if model_type in DEEP else {"num_hidden_layers": 6}
    config = family_config(model_type, **depth)
    assert run_cache(config) == [expected_elements(layer) for layer in parse(config).layers]


@pytest.mark.parametrize("model_type", sorted({*ALONE} - {"gpt_neo"}))
def test_windows_of_every_family_are_those_of_transformers(model_type: str) -> None:
    # Longer than any window, which would otherwise never be full.
    config = family_config(model_type, max_position_embeddings=1_000_000)
    types, arguments = get_layer_types_and_kwargs(config)
    theirs = [
        (KINDS[kind], entry.get("sliding_window"))
        for kind, entry in zip(types, arguments, strict=True)
    ]
    same = {"latent": "full", "shared": "none"}
    layers = parse(config).layers
    assert [(same.get(layer.kind, layer.kind), layer.window) for layer in layers] == theirs


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
