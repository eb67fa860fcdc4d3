"""How many parameters a model has, counted from its configuration.

Exact for the families listed here, which tests hold against models that transformers builds; for
any other the answer is None. Embeddings that the output layer shares are counted once, and
buffers, such as rotary tables and the correction of a router, are no parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reblock.errors import UnsupportedModel
from reblock.model_spec.kinds import layer_kinds
from reblock.model_spec.mixers import latent_attention, recurrent_mixer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.model_spec.fields import ModelFields

__all__ = ["FAMILIES", "count_parameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the layers of a model type are made of.

    `norms` counts the norms of a layer that have weights, and `has_norm_bias` says whether these
    have a bias as well. Biases are always there ("yes"), never ("no"), or where the file says so
    under the key that is named. `qk_norm` is over one "head" or over the "width" of all.
    """

    norms: int = 2
    has_norm_bias: bool = False
    qkv_bias: str = "no"
    output_bias: str = "no"
    qk_norm: Literal["no", "head", "width"] = "no"
    mlp: Literal["gated", "plain"] = "gated"
    mlp_bias: str = "no"
    is_query_gated: bool = False
    has_sinks: bool = False
    router_bias: bool = False
    is_shared_gated: bool = False


_PLAIN = _Family()
_ALL_BIASES = _Family(
    has_norm_bias=True, qkv_bias="yes", output_bias="yes", mlp="plain", mlp_bias="yes"
)
_ATTENTION_BIAS = _Family(qkv_bias="attention_bias", output_bias="attention_bias")
_LLAMA = _Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN2 = _Family(qkv_bias="yes")
_QWEN3 = _Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="head")
_QWEN3_NEXT = _Family(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    is_query_gated=True,
    is_shared_gated=True,
)
_OLMO2 = _Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="width")

FAMILIES: Mapping[str, _Family] = {
    "bloom": _ALL_BIASES,
    "cohere": _Family(
        norms=1, qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="width"
    ),
    "cohere2": _Family(norms=1, qkv_bias="attention_bias", output_bias="attention_bias"),
    "deepseek_v2": _Family(mlp_bias="mlp_bias"),
    "deepseek_v3": _PLAIN,
    "exaone4": _Family(qk_norm="head"),
    "falcon": _Family(norms=1, has_norm_bias=True, mlp="plain"),
    "gemma": _ATTENTION_BIAS,
    "gemma2": _Family(norms=4, qkv_bias="attention_bias", output_bias="attention_bias"),
    "gemma3_text": _Family(
        norms=4, qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="head"
    ),
    "glm": _Family(qkv_bias="attention_bias"),
    "glm4": _Family(norms=4, qkv_bias="attention_bias"),
    "glm4_moe": _Family(qkv_bias="attention_bias", qk_norm="head"),
    "gpt2": _ALL_BIASES,
    "gpt_bigcode": _ALL_BIASES,
    "gpt_neox": _Family(
        has_norm_bias=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp="plain",
        mlp_bias="yes",
    ),
    "gpt_oss": _Family(
        qkv_bias="attention_bias", output_bias="attention_bias", has_sinks=True, router_bias=True
    ),
    "granite": _LLAMA,
    "granitemoehybrid": _PLAIN,
    "jamba": _PLAIN,
    "llama": _LLAMA,
    "llama4_text": _ATTENTION_BIAS,
    "mamba": _Family(norms=1),
    "mamba2": _Family(norms=1),
    "minimax_m2": _Family(qk_norm="width"),
    "ministral3": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMO2,
    "opt": _ALL_BIASES,
    "phi": _Family(
        norms=1,
        has_norm_bias=True,
        qkv_bias="yes",
        output_bias="yes",
        mlp="plain",
        mlp_bias="yes",
    ),
    "phi3": _PLAIN,
    "qwen2": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": _Family(qkv_bias="qkv_bias", is_shared_gated=True),
    "qwen2_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_vl_text": _QWEN3,
    "seed_oss": _Family(
        qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"
    ),
    "smollm3": _LLAMA,
    "stablelm": _Family(has_norm_bias=True, qkv_bias="use_qkv_bias"),
    "starcoder2": _Family(
        has_norm_bias=True,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp="plain",
        mlp_bias="use_bias",
    ),
}


_LATENT = ("deepseek_v2", "deepseek_v3")
_HYBRIDS = (
    "granitemoehybrid",
    "jamba",
    "mamba",
    "mamba2",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
# Of these, only models whose file asks for it have the norm.
_OPTIONAL_QK_NORM = ("cohere", "glm4_moe")


def count_parameters(fields: ModelFields) -> int | None:
    """Return the parameters of the language model, None where its architecture is not known."""
    family = FAMILIES.get(fields.model_type)
    if family is None:
        return None
    kinds = layer_kinds(fields)
    if _has_oddity(fields, kinds):
        return None
    try:
        return _count(fields, family, kinds)
    except UnsupportedModel:
        # A size that memory of tokens does not depend on is not said.
        return None


def _count(fields: ModelFields, family: _Family, kinds: tuple[str, ...]) -> int:
    hidden = fields.required("hidden_size")
    vocabulary = fields.required("vocab_size")
    norm = 2 * hidden if family.has_norm_bias else hidden
    total = vocabulary * hidden + _position_parameters(fields, hidden) + norm
    if not fields.boolean("tie_word_embeddings"):
        total += vocabulary * hidden
    if fields.model_type == "phi":
        total += vocabulary
    for index, kind in enumerate(kinds):
        total += _layer_parameters(fields, family, index, kind, norm)
    return total


def _has_oddity(fields: ModelFields, kinds: tuple[str, ...]) -> bool:
    """Return whether the model has parts that are rare and not counted here."""
    projected = fields.integer("word_embed_proj_dim") if fields.model_type == "opt" else None
    return (
        (projected is not None and projected != fields.required("hidden_size"))
        or fields.boolean("qk_layernorm")
        or fields.has("block_configs")
        or fields.has("per_layer_config")
        or "none" in kinds
        or ("recurrent" in kinds and fields.model_type not in _HYBRIDS)
        or any(fields.is_list(name) for name in ("num_key_value_heads", "head_dim"))
        or (fields.has("kv_lora_rank") and fields.model_type not in _LATENT)
    )


def _position_parameters(fields: ModelFields, hidden: int) -> int:
    if fields.model_type in ("gpt2", "gpt_bigcode"):
        return fields.required("max_position_embeddings") * hidden
    if fields.model_type == "opt":
        return (fields.required("max_position_embeddings") + 2) * hidden
    # Bloom has a norm behind its embeddings.
    return 2 * hidden if fields.model_type == "bloom" else 0


def _layer_parameters(
    fields: ModelFields, family: _Family, index: int, kind: str, norm: int
) -> int:
    total = family.norms * norm
    if fields.model_type == "falcon" and _falcon_has_two_norms(fields):
        total += norm
    if kind == "recurrent":
        total += recurrent_mixer(fields)
    elif fields.integer("kv_lora_rank", noted=False) is not None:
        total += latent_attention(fields)
    else:
        total += _attention(fields, family)
    if fields.model_type in ("mamba", "mamba2"):
        return total
    return total + _feed_forward(fields, family, index)


def _falcon_has_two_norms(fields: ModelFields) -> bool:
    if fields.boolean("new_decoder_architecture"):
        return fields.integer("num_ln_in_parallel_attn", minimum=0) != 1
    return not fields.boolean("parallel_attn", default=True)


def _attention(fields: ModelFields, family: _Family) -> int:
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    head_dim = fields.integer("head_dim") or hidden // heads
    kv_heads = fields.integer("num_key_value_heads") or heads
    if fields.boolean("multi_query") and not fields.boolean("new_decoder_architecture"):
        kv_heads = 1
    width, kv_width = heads * head_dim, kv_heads * head_dim
    queries = 2 * width if family.is_query_gated else width
    total = hidden * (queries + 2 * kv_width) + width * hidden
    if _has_bias(fields, family.qkv_bias):
        total += queries + 2 * kv_width
    if _has_bias(fields, family.output_bias):
        total += hidden
    if fields.boolean("use_qk_norm", default=fields.model_type not in _OPTIONAL_QK_NORM):
        total += {"no": 0, "head": 2 * head_dim, "width": width + kv_width}[family.qk_norm]
    return total + (heads if family.has_sinks else 0)


def _has_bias(fields: ModelFields, key: str) -> bool:
    return key == "yes" or (key != "no" and fields.boolean(key))


def _feed_forward(fields: ModelFields, family: _Family, index: int) -> int:
    experts = fields.integer("num_local_experts", minimum=0, noted=False) or 0
    if fields.model_type == "granitemoehybrid":
        return _granite_experts(fields, experts)
    if experts and _has_experts(fields, index):
        return _experts(fields, family, experts)
    if fields.model_type == "llama4_text":
        return _mlp(fields, family, fields.required("intermediate_size_mlp"))
    hidden = fields.required("hidden_size")
    return _mlp(fields, family, fields.integer("intermediate_size") or 4 * hidden)


def _mlp(fields: ModelFields, family: _Family, width: int) -> int:
    hidden = fields.required("hidden_size")
    matrices = 3 if family.mlp == "gated" else 2
    total = matrices * hidden * width
    if _has_bias(fields, family.mlp_bias):
        total += (matrices - 1) * width + hidden
    return total


def _has_experts(fields: ModelFields, index: int) -> bool:
    """Return whether this layer has experts, where the model has some."""
    types = fields.texts("mlp_layer_types")
    if types is not None and index < len(types):
        return types[index] == "sparse"
    if fields.model_type == "llama4_text":
        chosen = fields.integers("moe_layers")
        step = fields.number("interleave_moe_layer_step", default=1)
        return index in chosen if chosen is not None else step > 0 and (index + 1) % step == 0
    period = fields.integer("expert_layer_period", noted=False)
    if period is not None:
        return index % period == fields.number("expert_layer_offset", default=0)
    if index in (fields.integers("mlp_only_layers") or ()):
        return False
    step = fields.number("decoder_sparse_step", default=1)
    if step > 1 and (index + 1) % step:
        return False
    return index >= fields.number("first_k_dense_replace", default=0)


def _experts(fields: ModelFields, family: _Family, experts: int) -> int:
    hidden = fields.required("hidden_size")
    width = fields.integer("moe_intermediate_size", noted=False)
    width = width or fields.required("intermediate_size")
    total = experts * hidden + experts * 3 * hidden * width
    if family.router_bias:
        # gpt-oss has a bias on its router and on both matrices of an expert.
        total += experts + experts * (2 * width + hidden)
    shared = fields.number("n_shared_experts", default=0) * width
    shared += fields.number("shared_expert_intermediate_size", default=0)
    if fields.model_type == "llama4_text":
        shared = width
    total += 3 * hidden * shared
    if shared and _has_bias(fields, family.mlp_bias):
        total += 2 * shared + hidden
    if family.is_shared_gated:
        total += hidden
    return total


def _granite_experts(fields: ModelFields, experts: int) -> int:
    hidden = fields.required("hidden_size")
    total = 3 * hidden * fields.number("shared_intermediate_size", default=0)
    if experts:
        width = fields.required("intermediate_size")
        total += experts * hidden + experts * 3 * hidden * width
    return total
