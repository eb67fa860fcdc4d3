"""The parameters of attention: plain, latent, and the index of sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.model_spec.feed_forward import has_bias

if TYPE_CHECKING:
    from reblock.model_spec.families import Family
    from reblock.model_spec.fields import ModelFields
    from reblock.model_spec.layers import LayerCache

__all__ = ["attention", "image_attention", "latent_attention"]

# Of these, only models whose file asks for it have norms of queries and keys.
_OPTIONAL_QK_NORM = ("cohere", "glm4_moe")
# Of these, the gate of the queries has no bias where they have one.
_GATE_WITHOUT_BIAS = ("afmoe",)


def attention(
    fields: ModelFields, family: Family, kind: str, layer: LayerCache, owner: LayerCache
) -> int:
    """Return the parameters of one layer's plain attention.

    `owner` is the layer whose keys it reads, which is the layer itself where it has some. `kind`
    is what the file says of it: a window that is never full is none to `layer`.
    """
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    queries = heads * owner.key_width * (2 if family.is_query_gated else 1)
    keys, values = layer.num_kv_heads * layer.key_width, layer.num_kv_heads * layer.value_width
    if kind == "full" and fields.boolean("attention_k_eq_v"):
        values = 0
    total = hidden * (queries + keys + values) + heads * owner.value_width * hidden
    if has_bias(fields, family.qkv_bias):
        total += queries + keys + values
        total -= queries // 2 if fields.model_type in _GATE_WITHOUT_BIAS else 0
    if has_bias(fields, family.output_bias):
        total += hidden
    if fields.boolean("use_qk_norm", default=fields.model_type not in _OPTIONAL_QK_NORM):
        total += _query_and_key_norms(family, layer, heads * owner.key_width, owner.key_width)
    if family.sinks in ("all", kind):
        total += heads
    return total + (heads * owner.value_width if family.has_inner_norms else 0)


def image_attention(fields: ModelFields) -> int:
    """Return the parameters of one layer that attends to images, with its norms and two gates."""
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    head_dim = fields.integer("head_dim") or hidden // heads
    kv_heads = fields.integer("num_key_value_heads") or heads
    return 2 * hidden * (heads + kv_heads) * head_dim + 2 * head_dim + 2


def _query_and_key_norms(family: Family, layer: LayerCache, queries: int, head: int) -> int:
    keys = layer.num_kv_heads * layer.key_width
    if family.qk_norm == "head":
        return head + (head if keys else 0)
    return queries + keys if family.qk_norm == "width" else 0


def latent_attention(fields: ModelFields, layer: LayerCache) -> int:
    """Return the parameters of one layer's latent attention, its index included."""
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    rank, rotary = fields.required("kv_lora_rank"), fields.required("qk_rope_head_dim")
    nope_dim = fields.required("qk_nope_head_dim")
    value_dim = fields.integer("v_head_dim") or hidden // heads
    has_biases = fields.boolean("attention_bias")
    query_rank = fields.integer("q_lora_rank", noted=False)
    if query_rank is None:
        total = hidden * heads * (nope_dim + rotary)
    else:
        total = hidden * query_rank + query_rank + query_rank * heads * (nope_dim + rotary)
        total += query_rank if has_biases else 0
    total += hidden * (rank + rotary) + rank
    total += rank * heads * (nope_dim + value_dim)
    total += heads * value_dim * hidden
    total += rank + rotary + hidden if has_biases else 0
    return total + _index(fields, layer, query_rank or hidden)


def _index(fields: ModelFields, layer: LayerCache, query_rank: int) -> int:
    """Return what chooses the tokens to attend to: queries, one key, its norm, weights of heads."""
    width = layer.index_width
    if not width:
        return 0
    hidden, heads = fields.required("hidden_size"), fields.required("index_n_heads")
    return query_rank * heads * width + hidden * width + 2 * width + hidden * heads
