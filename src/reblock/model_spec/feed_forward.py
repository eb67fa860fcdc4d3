"""The parameters of the feed-forward part of a layer, dense or a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.model_spec.layers import layer_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reblock.model_spec.families import Family
    from reblock.model_spec.fields import ModelFields

__all__ = ["dense", "feed_forward", "has_bias", "nemotron_experts"]

# How many experts see every token, by the names that it has had.
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
# Of these, the first layer has no experts where the file does not say which have.
_FIRST_IS_DENSE = ("glm4_moe_lite", "hy_v3", "kimi_linear", "mimo_v2_flash")

# Of these, the file states the width of both matrices into the part.
_HALVED = ("qwen", "recurrent_gemma")
_MAX_FACTOR = 1024


def feed_forward(fields: ModelFields, family: Family, index: int, *, is_shared: bool) -> int:
    """Return the parameters of that layer's part; `is_shared`: it reads another layer's cache."""
    own = _OWN.get(fields.model_type)
    if own is not None:
        return own(fields, family, index)
    # Dbrx keeps this part's widths apart from the rest.
    inner = fields.nested("ffn_config") or fields
    experts = inner.integer("num_local_experts", minimum=0, noted=False) or 0
    if experts and fields.model_type != "gemma4_text" and has_experts(fields, index):
        return _experts(fields, family, experts, expert_width(inner))
    width = dense_width(fields, index)
    if is_shared and fields.boolean("use_double_wide_mlp"):
        width *= 2
    total = dense(fields, family, width)
    if fields.boolean("enable_moe_block"):
        total += _gemma4_experts(fields)
    return total


def dense(fields: ModelFields, family: Family, width: int) -> int:
    """Return the parameters of a feed-forward part without experts."""
    hidden = fields.required("hidden_size")
    matrices = 3 if family.mlp == "gated" else 2
    total = matrices * hidden * width + family.mlp_extra
    if has_bias(fields, family.mlp_bias):
        total += (matrices - 1) * width + hidden
    return total + (width if family.has_inner_norms else 0)


def has_bias(fields: ModelFields, key: str) -> bool:
    """Return whether the model has the biases that a family describes by this key."""
    return key == "yes" or (key != "no" and fields.boolean(key))


def dense_width(fields: ModelFields, index: int) -> int:
    hidden = fields.required("hidden_size")
    if fields.is_list("intermediate_size"):
        return layer_value(fields, "intermediate_size", index)
    width = fields.integer("intermediate_size") or 4 * hidden
    if fields.model_type in _HALVED:
        return width // 2
    if fields.model_type == "lfm2":
        return _adjusted_width(fields, width)
    return width


def _adjusted_width(fields: ModelFields, width: int) -> int:
    """Return two thirds of the width, times a factor, up to a round number."""
    if not fields.boolean("block_auto_adjust_ff_dim", default=True):
        return width
    width = 2 * width // 3
    factor = fields.value("block_ffn_dim_multiplier")
    if isinstance(factor, (int, float)) and 0 < factor < _MAX_FACTOR:
        width = int(factor * width)
    multiple = fields.integer("block_multiple_of") or 256
    return -(-width // multiple) * multiple


def has_experts(fields: ModelFields, index: int) -> bool:
    """Return whether this layer has experts, where the model has some."""
    types = fields.texts("mlp_layer_types")
    if types is not None and index < len(types):
        return types[index] == "sparse"
    period = fields.integer("expert_layer_period", noted=False)
    if period is not None:
        return index % period == fields.number("expert_layer_offset", default=0)
    if index in (fields.integers("mlp_only_layers") or ()):
        return False
    step = fields.number("decoder_sparse_step", default=1)
    if step > 1 and (index + 1) % step:
        return False
    if fields.integer("moe_layer_start_index", minimum=0, noted=False) is not None:
        return _is_in_range(fields, index)
    if fields.is_list("moe_layer_freq"):
        return bool(layer_value(fields, "moe_layer_freq", index))
    first = 1 if fields.model_type in _FIRST_IS_DENSE else 0
    first = fields.number("num_dense_layers", default=first)
    return index >= fields.number("first_k_dense_replace", default=first)


def _is_in_range(fields: ModelFields, index: int) -> bool:
    first = fields.number("moe_layer_start_index", default=0)
    last = fields.value("moe_layer_end_index")
    interval = fields.integer("moe_layer_interval") or 1
    # A negative one says: to the end.
    is_before_end = not isinstance(last, int) or last < 0 or index <= last
    return (index + 1) % interval == 0 and index >= first and is_before_end


def expert_width(fields: ModelFields) -> int:
    # Files of this type have a list of widths that its code does not read.
    if fields.model_type == "hunyuan_v1_moe":
        return fields.required("intermediate_size")
    width = fields.integer("moe_intermediate_size", noted=False)
    return width or fields.required("intermediate_size")


def _experts(fields: ModelFields, family: Family, experts: int, width: int) -> int:
    hidden = fields.required("hidden_size")
    total = experts * hidden + experts * 3 * hidden * width
    if family.router_bias:
        # gpt-oss has a bias on its router and on both matrices of an expert.
        total += experts + experts * (2 * width + hidden)
    if family.is_router_corrected:
        total += experts
    shared = shared_width(fields, width)
    if shared:
        total += dense(fields, family, shared)
    return total + (hidden if family.is_shared_gated else 0)


def shared_width(fields: ModelFields, width: int) -> int:
    # Here one that is as wide as an expert is always there.
    if fields.model_type in ("hunyuan_v1_moe", "llama4_text"):
        return width
    counts = (fields.integer(key, minimum=0, noted=False) for key in _SHARED_COUNTS)
    count = next((number for number in counts if number is not None), 0)
    return count * width + sum(fields.number(key, default=0) for key in _SHARED_WIDTHS)


def _gemma4_experts(fields: ModelFields) -> int:
    """Return the experts beside the dense part, with a scale for each, and their three norms."""
    hidden, width = fields.required("hidden_size"), fields.required("moe_intermediate_size")
    experts = fields.required("num_local_experts")
    return experts * (hidden + 1 + 3 * hidden * width) + 4 * hidden


def _granite_hybrid(fields: ModelFields, family: Family, _index: int) -> int:
    shared = dense(fields, family, fields.number("shared_intermediate_size", default=0))
    experts = fields.integer("num_local_experts", minimum=0, noted=False) or 0
    hidden = fields.required("hidden_size")
    if not experts:
        return shared
    return shared + experts * hidden * (1 + 3 * fields.required("intermediate_size"))


def _llama4(fields: ModelFields, family: Family, index: int) -> int:
    chosen = fields.integers("moe_layers")
    step = fields.number("interleave_moe_layer_step", default=1)
    is_chosen = index in chosen if chosen is not None else step > 0 and (index + 1) % step == 0
    experts = fields.integer("num_local_experts", minimum=0, noted=False) or 0
    if experts and is_chosen:
        return _experts(fields, family, experts, expert_width(fields))
    return dense(fields, family, fields.required("intermediate_size_mlp"))


def nemotron_experts(fields: ModelFields, family: Family) -> int:
    """Return the parameters of a layer of plain experts, which may work on a narrower latent."""
    hidden, experts = fields.required("hidden_size"), fields.required("num_local_experts")
    latent = fields.integer("moe_latent_size")
    total = experts * hidden
    total += experts * 2 * (latent or hidden) * fields.required("moe_intermediate_size")
    total += dense(fields, family, fields.required("moe_shared_expert_intermediate_size"))
    if latent is not None:
        total += 2 * hidden * latent
        total += latent + hidden if has_bias(fields, family.mlp_bias) else 0
    return total


_OWN: Mapping[str, Callable[[ModelFields, Family, int], int]] = {
    "granitemoehybrid": _granite_hybrid,
    "llama4_text": _llama4,
}
