"""The parameters of layers that keep a state in place of keys, or beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.model_spec.states import mamba_channels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reblock.model_spec.fields import ModelFields

__all__ = ["RECURRENT", "recurrent_mixer"]

# The keys that say whether the way into a Mamba layer has a bias, and the way out.
_USUAL_PROJECTION_BIASES = ("mamba_proj_bias", "mamba_proj_bias")
_PROJECTION_BIASES: Mapping[str, tuple[str, str]] = {
    "falcon_h1": ("mamba_proj_bias", "projectors_bias"),
    "falcon_mamba": ("use_bias", "use_bias"),
    "mamba": ("use_bias", "use_bias"),
    "mamba2": ("use_bias", "use_bias"),
    "nemotron_h": ("use_bias", "use_bias"),
    "zamba2": ("add_bias_linear", "add_bias_linear"),
}


def recurrent_mixer(fields: ModelFields) -> int:
    """Return the parameters of one layer's recurrence; its model type must be in `RECURRENT`."""
    return RECURRENT[fields.model_type](fields)


def _delta_rule(fields: ModelFields) -> int:
    hidden = fields.required("hidden_size")
    value_heads = fields.required("linear_num_value_heads")
    value_dim = fields.required("linear_value_head_dim")
    keys = fields.required("linear_num_key_heads") * fields.required("linear_key_head_dim")
    values = value_heads * value_dim
    convolution = (2 * keys + values) * fields.number("linear_conv_kernel_dim", default=4)
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return projections + convolution + 2 * value_heads + value_dim


def _kimi_delta(fields: ModelFields) -> int:
    """Count a delta rule whose forget gate and output gate are products of two narrow matrices."""
    hidden = fields.required("hidden_size")
    inner = fields.nested("linear_attn_config") or fields
    heads, dim = inner.required("linear_heads"), inner.required("linear_head_dim")
    kernel = inner.integer("linear_kernel") or fields.number("linear_conv_kernel_dim", default=4)
    width = heads * dim
    gates = 2 * (hidden * dim + dim * width) + hidden * heads
    return 4 * hidden * width + 3 * width * kernel + gates + width + heads + dim


def _mamba_1(fields: ModelFields) -> int:
    hidden, channels = fields.required("hidden_size"), mamba_channels(fields) or 0
    state, kernel = fields.required("mamba_state"), fields.required("mamba_kernel")
    names = ("mamba_dt_rank", "time_step_rank")
    given = (fields.integer(name) for name in names if isinstance(fields.value(name), int))
    rank = next(given, None) or -(-hidden // 16)
    total = hidden * 2 * channels + channels * hidden + _projection_biases(fields, 2 * channels)
    total += channels * kernel + (channels if _convolves_with_bias(fields) else 0)
    total += channels * (rank + 2 * state) + rank * channels + channels
    total += channels * state + channels
    # Jamba has norms on the step and on B and C.
    return total + (rank + 2 * state if fields.model_type == "jamba" else 0)


def _mamba_2(fields: ModelFields) -> int:
    hidden, channels = fields.required("hidden_size"), mamba_channels(fields) or 0
    state, kernel = fields.required("mamba_state"), fields.required("mamba_kernel")
    heads = fields.required("mamba_heads")
    convolved = channels + 2 * fields.required("mamba_groups") * state
    projected = channels + convolved + heads
    total = hidden * projected + channels * hidden + _projection_biases(fields, projected)
    total += convolved * kernel + (convolved if _convolves_with_bias(fields) else 0)
    has_norm = fields.model_type != "falcon_h1" or fields.boolean("mamba_rms_norm")
    return total + 3 * heads + (channels if has_norm else 0)


def _projection_biases(fields: ModelFields, projected: int) -> int:
    way_in, way_out = _PROJECTION_BIASES.get(fields.model_type, _USUAL_PROJECTION_BIASES)
    total = projected if fields.boolean(way_in) else 0
    return total + (fields.required("hidden_size") if fields.boolean(way_out) else 0)


def _convolves_with_bias(fields: ModelFields) -> bool:
    return fields.model_type == "zamba2" or (
        fields.boolean("mamba_conv_bias", default=True)
        and fields.boolean("use_conv_bias", default=True)
    )


def _short_convolution(fields: ModelFields) -> int:
    hidden, kernel = fields.required("hidden_size"), fields.required("conv_L_cache")
    total = hidden * kernel + hidden * 3 * hidden + hidden * hidden
    return total + (hidden + 3 * hidden + hidden if fields.boolean("conv_bias") else 0)


def _lightning(fields: ModelFields) -> int:
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    width = heads * (fields.integer("head_dim") or hidden // heads)
    # Queries, keys, values, the gate of the output and the output; a norm within.
    return 5 * hidden * width + width


def _gated_recurrence(fields: ModelFields) -> int:
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    width = fields.integer("lru_width", noted=False) or hidden
    total = 3 * hidden * width + 2 * width + hidden
    total += width * fields.required("conv1d_width") + width
    # The gates are of blocks, one for every head.
    block = width // heads
    return total + width + 2 * (heads * block * block + heads * block)


RECURRENT: Mapping[str, Callable[[ModelFields], int]] = {
    "bamba": _mamba_2,
    "falcon_h1": _mamba_2,
    "falcon_mamba": _mamba_1,
    "granitemoehybrid": _mamba_2,
    "jamba": _mamba_1,
    "kimi_linear": _kimi_delta,
    "lara_mini": _delta_rule,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "mamba": _mamba_1,
    "mamba2": _mamba_2,
    "minimax": _lightning,
    "minimax_text_01": _lightning,
    "nemotron_h": _mamba_2,
    "olmo_hybrid": _delta_rule,
    "qwen3_5_moe_text": _delta_rule,
    "qwen3_5_text": _delta_rule,
    "qwen3_next": _delta_rule,
    "recurrent_gemma": _gated_recurrence,
    "zamba": _mamba_1,
    "zamba2": _mamba_2,
}
