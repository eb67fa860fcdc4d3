"""Mixture-of-experts layers that export: every expert runs, the router's weights choose.

A model's own expert loop asks the data which experts were hit, which a compiled graph cannot.
Running all of them reads each expert's weights once a step and copies none. At prefill that is
what happens anyway (a chunk hits nearly every expert); a decode step of few rows pays for experts
that it does not need, `num_experts / top_k` times the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reblock.backends.torch.refusal import NotCompilable

__all__ = ["EXPERTS_NAME", "register"]

EXPERTS_NAME = "reblock_dense"


def _dense_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return [S, hidden size] for hidden [S, hidden size], index and weights [S, top_k]."""
    if module.has_post_expert_norm:
        raise NotCompilable("experts with a norm of their own behind them are not supported")
    rows = hidden.shape[0]
    up_weight = module.gate_up_proj if module.has_gate else module.up_proj
    num_experts = up_weight.shape[0]
    weights_SE = top_k_weights.new_zeros(rows, num_experts)
    weights_SE = weights_SE.scatter_add(1, top_k_index, top_k_weights)

    def linear(states: Tensor, weight: Tensor, bias_name: str) -> Tensor:
        product = torch.bmm(states, weight if module.is_transposed else weight.transpose(1, 2))
        return product + getattr(module, bias_name)[:, None, :] if module.has_bias else product

    states = hidden[None].expand(num_experts, rows, hidden.shape[1])
    if module.has_gate:
        states = module._apply_gate(linear(states, up_weight, "gate_up_proj_bias"))
    else:
        states = module.act_fn(linear(states, up_weight, "up_proj_bias"))
    states = linear(states, module.down_proj, "down_proj_bias")
    return (states * weights_SE.t()[:, :, None]).sum(dim=0).to(hidden.dtype)


def register() -> None:
    """Make `reblock_dense` known to transformers; calling it again changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _dense_experts)
