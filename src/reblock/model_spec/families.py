"""What the layers of each model type are made of, as far as parameters go.

A type that is not listed is not counted. Tests hold every line against the model that
transformers builds, with each of its biases and norms turned on and off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "UNCHECKED", "Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the layers of a model type are made of.

    `norms` counts the norms of a layer that have weights, and `has_norm_bias` says whether these
    have a bias as well; `has_final_norm` is about the norm behind all layers. Biases are always
    there ("yes"), never ("no"), or where the file says so under the key that is named. `qk_norm`
    is over one "head" or over the "width" of all. Sinks are in all layers or in those with a
    window. `is_router_corrected`: the correction of a router is a parameter, not a buffer.
    `mlp_extra` counts what an activation learns.
    """

    norms: int = 2
    has_norm_bias: bool = False
    has_final_norm: bool = True
    qkv_bias: str = "no"
    output_bias: str = "no"
    qk_norm: Literal["no", "head", "width"] = "no"
    mlp: Literal["gated", "plain"] = "gated"
    mlp_bias: str = "no"
    mlp_extra: int = 0
    head_bias: str = "no"
    is_query_gated: bool = False
    sinks: Literal["no", "all", "sliding"] = "no"
    has_inner_norms: bool = False
    router_bias: bool = False
    is_router_corrected: bool = False
    is_shared_gated: bool = False


_PLAIN = Family()
_ONE_NORM = Family(norms=1)
_ALL_BIASES = Family(
    has_norm_bias=True, qkv_bias="yes", output_bias="yes", mlp="plain", mlp_bias="yes"
)
_ATTENTION_BIAS = Family(qkv_bias="attention_bias", output_bias="attention_bias")
_LLAMA = replace(_ATTENTION_BIAS, mlp_bias="mlp_bias")
_GEMMA2 = replace(_ATTENTION_BIAS, norms=4)
_GEMMA3 = replace(_GEMMA2, qk_norm="head")
_GPTJ = Family(norms=1, has_norm_bias=True, mlp="plain", mlp_bias="yes", head_bias="yes")
_QWEN2 = Family(qkv_bias="yes")
_QWEN3 = replace(_ATTENTION_BIAS, qk_norm="head")
_QWEN3_NEXT = replace(_QWEN3, is_query_gated=True, is_shared_gated=True)
_OLMO2 = replace(_ATTENTION_BIAS, qk_norm="width")
_USE_BIAS = Family(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias")

FAMILIES: Mapping[str, Family] = {
    "afmoe": replace(_GEMMA3, is_query_gated=True, is_router_corrected=True),
    "apertus": replace(_QWEN3, mlp="plain", mlp_extra=2),
    "apertus1p5_text": replace(_QWEN3, mlp="plain", mlp_extra=2),
    "arcee": replace(_LLAMA, mlp="plain"),
    "baichuan": _PLAIN,
    "bamba": _LLAMA,
    "biogpt": _ALL_BIASES,
    "bitnet": replace(_ATTENTION_BIAS, has_inner_norms=True),
    "bloom": _ALL_BIASES,
    "chatglm": Family(qkv_bias="add_qkv_bias"),
    "codegen": _GPTJ,
    "cohere": replace(_OLMO2, norms=1),
    "cohere2": replace(_ATTENTION_BIAS, norms=1),
    "cwm": Family(mlp_bias="mlp_bias"),
    "dbrx": _PLAIN,
    "deepseek": _LLAMA,
    "deepseek_v2": Family(mlp_bias="mlp_bias"),
    "deepseek_v3": _PLAIN,
    "deepseek_v32": _PLAIN,
    "dots1": _QWEN3,
    "ernie4_5": _USE_BIAS,
    "ernie4_5_moe": replace(_USE_BIAS, head_bias="use_bias", is_router_corrected=True),
    "exaone": _LLAMA,
    "exaone4": Family(qk_norm="head"),
    "exaone_moe": Family(qk_norm="head"),
    "falcon": Family(
        norms=1,
        has_norm_bias=True,
        qkv_bias="bias",
        output_bias="bias",
        mlp="plain",
        mlp_bias="bias",
    ),
    "falcon_h1": _LLAMA,
    "falcon_mamba": _ONE_NORM,
    "flex_olmo": _OLMO2,
    "flint": replace(_QWEN3, sinks="all"),
    "gemma": _ATTENTION_BIAS,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _GEMMA3,
    "gemma4_text": _GEMMA3,
    "gemma4_unified_text": _GEMMA3,
    "glm": Family(qkv_bias="attention_bias"),
    "glm4": Family(norms=4, qkv_bias="attention_bias"),
    "glm4_moe": Family(qkv_bias="attention_bias", qk_norm="head"),
    "glm4_moe_lite": _PLAIN,
    "glm4v_moe_text": Family(qkv_bias="attention_bias"),
    "glm4v_text": Family(norms=4, qkv_bias="yes"),
    "glm_moe_dsa": _PLAIN,
    "glm_ocr_text": Family(norms=4),
    "gpt2": _ALL_BIASES,
    "gpt_bigcode": _ALL_BIASES,
    "gpt_neo": replace(_ALL_BIASES, qkv_bias="no"),
    "gpt_neox": replace(_ALL_BIASES, qkv_bias="attention_bias", output_bias="attention_bias"),
    "gpt_oss": replace(_ATTENTION_BIAS, sinks="all", router_bias=True),
    "gptj": _GPTJ,
    "granite": _LLAMA,
    "granite_docling_text": _LLAMA,
    "granite_swa": replace(_LLAMA, sinks="all"),
    "granitemoe": _ATTENTION_BIAS,
    "granitemoe_swa": replace(_ATTENTION_BIAS, sinks="all"),
    "granitemoehybrid": _PLAIN,
    "granitemoeshared": _ATTENTION_BIAS,
    "helium": Family(qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "hunyuan_v1_dense": _QWEN3,
    "hunyuan_v1_moe": _QWEN3,
    "hy_v3": replace(_QWEN3, mlp_bias="mlp_bias"),
    "internlm": Family(qkv_bias="bias", output_bias="bias"),
    "internlm2": Family(qkv_bias="bias", output_bias="bias"),
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "jais2": replace(_LLAMA, has_norm_bias=True, mlp="plain"),
    "jamba": _PLAIN,
    "kimi_linear": _PLAIN,
    "kolibri1": Family(norms=4, qk_norm="head"),
    "lara_mini": _QWEN3,
    "lfm2": Family(qk_norm="head"),
    "lfm2_moe": Family(qk_norm="head"),
    "llama": _LLAMA,
    "llama4_text": _ATTENTION_BIAS,
    "mamba": _ONE_NORM,
    "mamba2": _ONE_NORM,
    "mellum": _QWEN3,
    "mimo_v2_flash": Family(qkv_bias="attention_bias", sinks="sliding"),
    "minicpm3": Family(mlp_bias="mlp_bias"),
    "minimax": _PLAIN,
    "minimax_m2": Family(qk_norm="width"),
    "minimax_text_01": _PLAIN,
    "ministral": _PLAIN,
    "ministral3": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "mllama_text_model": _PLAIN,
    "mpt": Family(mlp="plain"),
    "nanochat": replace(_ATTENTION_BIAS, norms=0, has_final_norm=False, mlp="plain"),
    "nemotron": replace(_LLAMA, has_norm_bias=True, mlp="plain"),
    "nemotron_h": Family(norms=1, mlp="plain", mlp_bias="mlp_bias"),
    "olmo": replace(_ATTENTION_BIAS, norms=0, has_final_norm=False),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmo_hybrid": _OLMO2,
    "olmoe": _OLMO2,
    "opt": _ALL_BIASES,
    "paddleocr_vl_text": _USE_BIAS,
    "phi": replace(_ALL_BIASES, norms=1, head_bias="yes"),
    "phi3": _PLAIN,
    "phi4_multimodal": _PLAIN,
    "phimoe": replace(_ATTENTION_BIAS, has_norm_bias=True, head_bias="lm_head_bias"),
    "qwen": _QWEN2,
    "qwen2": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Family(qkv_bias="qkv_bias", is_shared_gated=True),
    "qwen2_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_omni_moe_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "recurrent_gemma": Family(qkv_bias="attention_bias", output_bias="yes", mlp_bias="yes"),
    "sarvam_mla": _PLAIN,
    "sarvam_moe": Family(qkv_bias="attention_bias", qk_norm="head"),
    "seed_oss": Family(
        qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"
    ),
    "smollm3": _LLAMA,
    "solar_open": Family(qkv_bias="attention_bias"),
    "stablelm": Family(has_norm_bias=True, qkv_bias="use_qkv_bias"),
    "starcoder2": replace(_USE_BIAS, has_norm_bias=True, mlp="plain"),
    "vaultgemma": _ATTENTION_BIAS,
    "xglm": _ALL_BIASES,
    "youtu": _PLAIN,
    "zamba": _PLAIN,
    "zamba2": _PLAIN,
}

# transformers reads these with code of the checkpoint only; published sizes agree.
UNCHECKED = frozenset(
    {"baichuan", "chatglm", "deepseek", "internlm", "internlm2", "minimax_text_01", "qwen"}
)
