"""What layers without a KV cache, or with more than one, keep of a sequence: a state of fixed size.

A state has two parts: the last inputs of a short convolution, and the recurrent state proper.
Counted is what transformers keeps: as many inputs as the convolution is wide, and the whole
recurrent state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reblock.model_spec.fields import ModelFields

__all__ = ["state_dtype_bytes", "state_elements"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def state_elements(fields: ModelFields) -> int | None:
    """Return the elements that one such layer keeps of a sequence; None where it is not known."""
    for read in (_delta_rule, _kimi_delta, _mamba, _convolution, _gated_recurrence, _lightning):
        elements = read(fields)
        if elements is not None:
            return elements
    return None


def state_dtype_bytes(fields: ModelFields) -> int | None:
    """Return the bytes of an element where the file fixes them; None: as the cache."""
    return _DTYPE_BYTES.get(fields.text("mamba_ssm_cache_dtype") or "")


def _delta_rule(fields: ModelFields) -> int | None:
    """Gated delta nets: a matrix for every value head, and a convolution over q, k and v."""
    value_heads = fields.integer("linear_num_value_heads", noted=False)
    key_heads = fields.integer("linear_num_key_heads", noted=False)
    key_dim = fields.integer("linear_key_head_dim", noted=False)
    value_dim = fields.integer("linear_value_head_dim", noted=False)
    if value_heads is None or key_heads is None or key_dim is None or value_dim is None:
        return None
    kernel = fields.number("linear_conv_kernel_dim", default=4)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return value_heads * key_dim * value_dim + channels * kernel


def _kimi_delta(fields: ModelFields) -> int | None:
    inner = fields.nested("linear_attn_config") or fields
    heads, dim = inner.integer("linear_heads"), inner.integer("linear_head_dim")
    is_known = fields.model_type in ("kimi_linear", "bailing_hybrid")
    if not is_known or heads is None or dim is None:
        return None
    kernel = inner.integer("linear_kernel") or fields.number("linear_conv_kernel_dim", default=4)
    return heads * dim * dim + 3 * heads * dim * kernel


def _mamba(fields: ModelFields) -> int | None:
    """Mamba 1 and 2: a state for every channel; Mamba 2 also convolves its B and C."""
    state = fields.integer("mamba_state", noted=False)
    kernel = fields.integer("mamba_kernel", noted=False)
    channels = mamba_channels(fields)
    if state is None or kernel is None or channels is None:
        return None
    groups = fields.integer("mamba_groups", noted=False)
    convolved = channels if groups is None else channels + 2 * groups * state
    return channels * state + convolved * kernel


def mamba_channels(fields: ModelFields) -> int | None:
    """Return the width of a Mamba layer, within."""
    channels = fields.integer("mamba_d_ssm", noted=False)
    if channels is not None:
        return channels
    if fields.model_type == "nemotron_h":
        heads = fields.integer("mamba_heads", noted=False)
        head_dim = fields.integer("mamba_head_dim", noted=False)
        return None if heads is None or head_dim is None else heads * head_dim
    expand = fields.integer("mamba_expand", noted=False)
    return None if expand is None else expand * fields.required("hidden_size")


def _convolution(fields: ModelFields) -> int | None:
    kernel = fields.integer("conv_L_cache", noted=False)
    return None if kernel is None else kernel * fields.required("hidden_size")


def _gated_recurrence(fields: ModelFields) -> int | None:
    kernel = fields.integer("conv1d_width", noted=False)
    if kernel is None:
        return None
    width = fields.integer("lru_width", noted=False) or fields.required("hidden_size")
    return width + width * (kernel - 1)


def _lightning(fields: ModelFields) -> int | None:
    if not fields.model_type.startswith("minimax"):
        return None
    heads = fields.required("num_attention_heads")
    dim = fields.integer("head_dim") or fields.required("hidden_size") // heads
    return heads * dim * dim
