"""The parameters of what stands beside a model's layers, or is used by several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.model_spec.mixers import recurrent_mixer

if TYPE_CHECKING:
    from reblock.model_spec.fields import ModelFields

__all__ = ["layer_parts", "shared_parts", "zamba_layer"]


def shared_parts(fields: ModelFields, kinds: tuple[str, ...]) -> int:
    """Return the parameters that no single layer has."""
    if fields.model_type in ("zamba", "zamba2"):
        return _zamba_blocks(fields, kinds.count("hybrid"))
    return _token_inputs(fields, len(kinds)) + _alternating_inputs(fields)


def layer_parts(fields: ModelFields) -> int:
    """Return the parameters that every layer has beside its norms, mixer and feed-forward part."""
    hidden = fields.required("hidden_size")
    total = 0
    if width := fields.number("hidden_size_per_layer_input", default=0):
        # Into the width of the layer's own input of a token, and back; a norm.
        total += 2 * hidden * width + hidden
    if fields.model_type != "gemma3n_text":
        return total
    rank = fields.required("laurel_rank")
    total += 2 * hidden * rank + hidden
    streams = fields.number("altup_num_inputs", default=4)
    # Predicting and correcting the streams, a router between them and its norm, a scale.
    return total + streams**3 + streams**2 + streams * hidden + 2 * hidden


def _token_inputs(fields: ModelFields, num_layers: int) -> int:
    """Return the embeddings that give every layer an input of its own for a token."""
    width = fields.number("hidden_size_per_layer_input", default=0)
    if not width:
        return 0
    vocabulary = fields.required("vocab_size_per_layer_input")
    return (vocabulary + fields.required("hidden_size")) * num_layers * width + width


def _alternating_inputs(fields: ModelFields) -> int:
    """Return what makes several streams of the embeddings, and one of the streams again."""
    if fields.model_type != "gemma3n_text":
        return 0
    streams, hidden = fields.number("altup_num_inputs", default=4), fields.required("hidden_size")
    return 2 * max(streams - 1, 0) * hidden * hidden


def zamba_layer(fields: ModelFields, kind: str) -> int:
    """Return the parameters of a layer's own: a recurrence, and the way out of a shared block."""
    hidden = fields.required("hidden_size")
    own = recurrent_mixer(fields) + hidden
    return own + (hidden * hidden if kind == "hybrid" else 0)


def _zamba_blocks(fields: ModelFields, num_uses: int) -> int:
    """Return the blocks that layers take turns to use, with what adapts them to each use."""
    hidden, width = fields.required("hidden_size"), fields.required("intermediate_size")
    heads, inner = fields.required("num_attention_heads"), 2 * hidden
    attention_width = heads * (fields.integer("attention_head_dim") or inner // heads)
    kv_heads = fields.integer("num_key_value_heads") or heads
    kv_width = attention_width // heads * kv_heads
    block = inner * (attention_width + 2 * kv_width) + attention_width * hidden
    block += 3 * hidden * width + inner + hidden
    block += 2 * width + hidden if fields.boolean("add_bias_linear") else 0
    num_blocks = min(fields.number("num_mem_blocks", default=1), num_uses)
    return num_blocks * block + num_uses * _zamba_adapters(fields, hidden, width)


def _zamba_adapters(fields: ModelFields, hidden: int, width: int) -> int:
    if fields.model_type == "zamba":
        return 0
    rank = fields.number("adapter_rank", default=128)
    total = rank * (hidden + 2 * width)
    if fields.boolean("use_shared_attention_adapter"):
        total += 3 * 2 * rank * 2 * hidden
    return total
