"""The parameters of what some models have in place of plain attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.model_spec.states import mamba_channels

if TYPE_CHECKING:
    from reblock.model_spec.fields import ModelFields

__all__ = ["latent_attention", "recurrent_mixer"]


def latent_attention(fields: ModelFields) -> int:
    """Return the parameters of one layer's latent attention."""
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    rank, rotary = fields.required("kv_lora_rank"), fields.required("qk_rope_head_dim")
    query_dim = fields.required("qk_nope_head_dim") + rotary
    value_dim = fields.required("v_head_dim")
    has_bias = fields.boolean("attention_bias")
    query_rank = fields.integer("q_lora_rank", noted=False)
    if query_rank is None:
        total = hidden * heads * query_dim
    else:
        total = hidden * query_rank + query_rank + query_rank * heads * query_dim
        total += query_rank if has_bias else 0
    total += hidden * (rank + rotary) + rank
    total += rank * heads * (query_dim - rotary + value_dim)
    total += heads * value_dim * hidden
    return total + (rank + rotary + hidden if has_bias else 0)


def recurrent_mixer(fields: ModelFields) -> int:
    """Return the parameters of one layer that keeps a state in place of keys."""
    if fields.integer("linear_num_value_heads", noted=False) is not None:
        return _delta_rule(fields)
    if fields.model_type in ("jamba", "mamba"):
        return _mamba_1(fields)
    return _mamba_2(fields)


def _delta_rule(fields: ModelFields) -> int:
    hidden = fields.required("hidden_size")
    value_heads = fields.required("linear_num_value_heads")
    value_dim = fields.required("linear_value_head_dim")
    keys = fields.required("linear_num_key_heads") * fields.required("linear_key_head_dim")
    values = value_heads * value_dim
    convolution = (2 * keys + values) * fields.number("linear_conv_kernel_dim", default=4)
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return projections + convolution + 2 * value_heads + value_dim


def _mamba_1(fields: ModelFields) -> int:
    hidden, channels = fields.required("hidden_size"), mamba_channels(fields) or 0
    state, kernel = fields.required("mamba_state"), fields.required("mamba_kernel")
    names = ("mamba_dt_rank", "time_step_rank")
    given = (fields.integer(name) for name in names if isinstance(fields.value(name), int))
    rank = next(given, None) or -(-hidden // 16)
    total = hidden * 2 * channels + channels * hidden
    total += 2 * channels + hidden if _projects_with_bias(fields) else 0
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
    total = hidden * projected + channels * hidden
    total += projected + hidden if _projects_with_bias(fields) else 0
    total += convolved * kernel + (convolved if _convolves_with_bias(fields) else 0)
    return total + 3 * heads + channels


def _projects_with_bias(fields: ModelFields) -> bool:
    return fields.boolean("mamba_proj_bias") or fields.boolean("use_bias")


def _convolves_with_bias(fields: ModelFields) -> bool:
    return fields.boolean("mamba_conv_bias", default=True) and fields.boolean(
        "use_conv_bias", default=True
    )
