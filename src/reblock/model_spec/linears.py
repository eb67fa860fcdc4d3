"""The linear layers of a model, whose weights programs for the cpu keep in a type of their own.

Known for the model types that tests hold against the models that transformers builds; for any
other the answer is None. Experts and their routers are no linear layers there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reblock.errors import UnsupportedModel
from reblock.model_spec.families import FAMILIES, UNCHECKED
from reblock.model_spec.feed_forward import (
    dense_width,
    expert_width,
    has_bias,
    has_experts,
    shared_width,
)
from reblock.model_spec.kinds import layer_kinds
from reblock.model_spec.layers import read_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.model_spec.families import Family
    from reblock.model_spec.fields import ModelFields
    from reblock.model_spec.layers import LayerCache

__all__ = ["LinearShape", "Linears", "read_linears"]

# Of these, one layer makes queries, keys and values, or the gate and what it lets through.
_FUSED_ATTENTION = ("bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "phi3")
_FUSED_GATE = ("glm", "glm4", "phi3")
# Of these, the weights that choose among experts are float32 whatever the model is.
_FLOAT32_ROUTERS = (
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "hy_v3",
    "mimo_v2_flash",
    "sarvam_moe",
    "solar_open",
)
# Of these, the embedding has a class of its own, which reads no weight of another type.
_OWN_EMBEDDING = (
    "biogpt",
    "gemma",
    "gemma2",
    "gemma3_text",
    "vaultgemma",
    "xglm",
)
# Those with linear layers or with float32 in other places, or that transformers builds only within
# larger models.
_NOT_COUNTED = (
    "afmoe",
    "dbrx",
    "falcon",
    "flint",
    "gemma4_text",
    "gemma4_unified_text",
    "glm4v_moe_text",
    "glm4v_text",
    "glm_ocr_text",
    "granite_docling_text",
    "hunyuan_v1_moe",
    "mllama_text_model",
    "paddleocr_vl_text",
    "phi4_multimodal",
    "qwen2_5_omni_text",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_omni_moe_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
)


class LinearShape(NamedTuple):
    """A weight [outputs, inputs] of a linear layer."""

    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Linears:
    """Every shape of a weight with the number of them.

    The head is among them. `num_float32` counts the elements that are float32 whatever the type of
    the model: biases, and the routers of some mixtures of experts. `has_copy`: the embedding of
    the tokens has the same weight as the head, but could not read it in another type.
    """

    shapes: tuple[tuple[LinearShape, int], ...]
    head: LinearShape
    num_float32: int
    has_copy: bool

    @property
    def num_elements(self) -> int:
        """The elements of all weights, and of what is float32 besides."""
        weights = sum(count * outputs * inputs for (outputs, inputs), count in self.shapes)
        return weights + self.num_float32


def read_linears(fields: ModelFields) -> Linears | None:
    """Return the linear layers, None where they are not known for the architecture."""
    kind = fields.model_type
    family = FAMILIES.get(kind)
    if family is None or kind in _NOT_COUNTED or kind in UNCHECKED:
        return None
    if set(layer_kinds(fields)) - {"full", "sliding"} or fields.has("kv_lora_rank"):
        return None
    try:
        return _read(fields, family)
    except UnsupportedModel:
        # A size that memory of tokens does not depend on is not said.
        return None


def _read(fields: ModelFields, family: Family) -> Linears | None:
    layers = read_layers(fields)
    if any(layer.shares_with is not None for layer in layers):
        return None
    head = LinearShape(fields.required("vocab_size"), fields.required("hidden_size"))
    shapes, num_float32 = Counter([head]), 0
    if has_bias(fields, family.head_bias):
        num_float32 = head.outputs
    for index, layer in enumerate(layers):
        num_float32 += _add_attention(shapes, fields, family, layer)
        num_float32 += _add_feed_forward(shapes, fields, family, index)
    is_tied = fields.boolean("tie_word_embeddings")
    return Linears(
        shapes=tuple(shapes.items()),
        head=head,
        num_float32=num_float32,
        has_copy=is_tied and fields.model_type in _OWN_EMBEDDING,
    )


def _add_attention(
    shapes: Counter[LinearShape], fields: ModelFields, family: Family, layer: LayerCache
) -> int:
    """Add the weights of a layer's attention and return the elements of its biases."""
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    queries = heads * layer.key_width * (2 if family.is_query_gated else 1)
    keys, values = layer.num_kv_heads * layer.key_width, layer.num_kv_heads * layer.value_width
    outputs = [queries, keys, values]
    is_fused = fields.model_type in _FUSED_ATTENTION
    shapes.update(_into(hidden, outputs, is_fused=is_fused))
    shapes[LinearShape(hidden, heads * layer.value_width)] += 1
    num_biases = sum(outputs) if has_bias(fields, family.qkv_bias) else 0
    return num_biases + (hidden if has_bias(fields, family.output_bias) else 0)


def _add_feed_forward(
    shapes: Counter[LinearShape], fields: ModelFields, family: Family, index: int
) -> int:
    """Add the weights of that layer's other part and return how many elements are float32."""
    hidden = fields.required("hidden_size")
    experts = fields.integer("num_local_experts", minimum=0, noted=False) or 0
    width, num_float32 = dense_width(fields, index), 0
    if experts and has_experts(fields, index):
        if fields.model_type in _FLOAT32_ROUTERS:
            num_float32 += experts * (hidden + (1 if family.is_router_corrected else 0))
        if family.is_shared_gated:
            shapes[LinearShape(1, hidden)] += 1
        width = shared_width(fields, expert_width(fields))
    if not width:
        return num_float32
    outputs = [width, width] if family.mlp == "gated" else [width]
    shapes.update(_into(hidden, outputs, is_fused=fields.model_type in _FUSED_GATE))
    shapes[LinearShape(hidden, width)] += 1
    return num_float32 + (sum(outputs) + hidden if has_bias(fields, family.mlp_bias) else 0)


def _into(hidden: int, outputs: list[int], *, is_fused: bool) -> Mapping[LinearShape, int]:
    """Return the weights that make `outputs` out of the hidden states."""
    return Counter(LinearShape(each, hidden) for each in ([sum(outputs)] if is_fused else outputs))
