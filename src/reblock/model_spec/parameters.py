"""How many parameters a model has, counted from its configuration.

Exact for the families of `model_spec.families`, which tests hold against models that transformers
builds; for any other the answer is None. Embeddings that the output layer shares are counted once,
and buffers, such as rotary tables and the correction of a router, are no parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.errors import UnsupportedModel
from reblock.model_spec.attention import attention, image_attention, latent_attention
from reblock.model_spec.families import FAMILIES, UNCHECKED
from reblock.model_spec.feed_forward import dense, feed_forward, has_bias, nemotron_experts
from reblock.model_spec.kinds import layer_kinds, layer_names
from reblock.model_spec.layers import read_layers
from reblock.model_spec.mixers import RECURRENT, recurrent_mixer
from reblock.model_spec.shared_parts import layer_parts, shared_parts, zamba_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.model_spec.families import Family
    from reblock.model_spec.fields import ModelFields
    from reblock.model_spec.layers import LayerCache

__all__ = ["FAMILIES", "count_parameters"]

_LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "minicpm3",
    "sarvam_mla",
    "youtu",
)
# What other models of these types have set otherwise, which changes their parts.
_USUAL: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "opt": (
        ("_remove_final_layer_norm", False),
        ("do_layer_norm_before", True),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
    ),
    "stablelm": (("use_parallel_residual", False),),
}
_WITHOUT_FEED_FORWARD = ("falcon_mamba", "mamba", "mamba2")
_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
# Positions that are learned: the embeddings beyond those of the context; None: there are none.
_LEARNED_POSITIONS = {"biogpt": 2, "gpt2": 0, "gpt_bigcode": 0, "gpt_neo": 0, "opt": 2}


def count_parameters(fields: ModelFields) -> int | None:
    """Return the parameters of the language model, None where its architecture is not known."""
    family = FAMILIES.get(fields.model_type)
    if family is None:
        return None
    kinds = layer_kinds(fields)
    if _has_oddity(fields, kinds):
        return None
    try:
        total = _count(fields, family, kinds)
    except UnsupportedModel:
        # A size that memory of tokens does not depend on is not said.
        return None
    if fields.model_type in UNCHECKED:
        fields.note(
            f"Parameters of {fields.model_type} models are counted by their published code, not "
            "checked against transformers, which has no such model."
        )
    return total


def _count(fields: ModelFields, family: Family, kinds: tuple[str, ...]) -> int:
    hidden = fields.required("hidden_size")
    vocabulary = fields.required("vocab_size")
    norm = 2 * hidden if family.has_norm_bias else hidden
    total = vocabulary * hidden + _position_parameters(fields, hidden)
    if family.has_final_norm:
        total += norm
    if not fields.boolean("tie_word_embeddings"):
        total += vocabulary * hidden
    if has_bias(fields, family.head_bias):
        total += vocabulary
    total += shared_parts(fields, kinds)
    layers = read_layers(fields)
    for index, kind in enumerate(kinds):
        total += _layer_parameters(fields, family, layers, index, kind)
    return total


def _has_oddity(fields: ModelFields, kinds: tuple[str, ...]) -> bool:
    """Return whether the model has parts that are rare and not counted here."""
    projected = fields.integer("word_embed_proj_dim") if fields.model_type == "opt" else None
    return (
        (projected is not None and projected != fields.required("hidden_size"))
        or fields.boolean("qk_layernorm")
        or any(
            fields.boolean(key, default=usual) != usual
            for key, usual in _USUAL.get(fields.model_type, ())
        )
        or fields.has("block_configs")
        or (fields.has("per_layer_config") and fields.model_type not in _GEMMA4)
        or ("none" in kinds and fields.model_type not in ("mllama_text_model", "nemotron_h"))
        or ("recurrent" in kinds and fields.model_type not in RECURRENT)
        or (fields.has("cross_attention_layers") and fields.model_type != "mllama_text_model")
        or any(fields.is_list(name) for name in ("num_key_value_heads", "head_dim"))
        or (fields.has("kv_lora_rank") and fields.model_type not in _LATENT)
    )


def _position_parameters(fields: ModelFields, hidden: int) -> int:
    more = _LEARNED_POSITIONS.get(fields.model_type)
    if more is not None:
        return (fields.required("max_position_embeddings") + more) * hidden
    if fields.model_type == "mllama_text_model":
        # Tokens that stand for images have embeddings, but are never the answer.
        return 8 * hidden
    # Bloom has a norm behind its embeddings.
    return 2 * hidden if fields.model_type == "bloom" else 0


def _layer_parameters(
    fields: ModelFields, family: Family, layers: tuple[LayerCache, ...], index: int, kind: str
) -> int:
    if fields.model_type in ("zamba", "zamba2"):
        return zamba_layer(fields, kind)
    layer = layers[index]
    total = _norms(fields, family) + layer_parts(fields)
    if kind in ("recurrent", "hybrid"):
        total += recurrent_mixer(fields)
    if kind not in ("recurrent", "none"):
        total += _attention(fields, family, layers, index, kind)
    if fields.model_type == "nemotron_h":
        return total + (_nemotron_feed_forward(fields, family, index) if kind == "none" else 0)
    if kind == "none":
        total += image_attention(fields)
    if fields.model_type in _WITHOUT_FEED_FORWARD:
        return total
    return total + feed_forward(fields, family, index, is_shared=layer.kind == "shared")


def _norms(fields: ModelFields, family: Family) -> int:
    hidden = fields.required("hidden_size")
    count = family.norms
    if fields.model_type == "falcon" and _falcon_has_two_norms(fields):
        count += 1
    return count * (2 * hidden if family.has_norm_bias else hidden)


def _falcon_has_two_norms(fields: ModelFields) -> bool:
    if fields.boolean("new_decoder_architecture"):
        return fields.integer("num_ln_in_parallel_attn", minimum=0) != 1
    return not fields.boolean("parallel_attn", default=True)


def _attention(
    fields: ModelFields, family: Family, layers: tuple[LayerCache, ...], index: int, kind: str
) -> int:
    layer = layers[index]
    if fields.integer("kv_lora_rank", noted=False) is not None:
        return latent_attention(fields, layer)
    owner = layer if layer.shares_with is None else layers[layer.shares_with]
    return attention(fields, family, kind, layer, owner)


def _nemotron_feed_forward(fields: ModelFields, family: Family, index: int) -> int:
    """Return the parameters of a layer that has neither attention nor a recurrence."""
    name = layer_names(fields)[index]
    if name in ("moe", "E"):
        return nemotron_experts(fields, family)
    return dense(fields, family, fields.required("intermediate_size"))
