"""Attention that reads and writes a paged KV cache, in place of a Hugging Face model's own.

transformers looks up the attention of a model by name. `register` adds the name `reblock_paged`
to its tables, so that any model that asks that table runs on our caches with no code of its own.
The function it finds hands over to whatever `attending` has put in force: while a model is
examined that is a recorder of shapes, while a layer is exported it is one of the caches below.

Shapes: B rows, T tokens a row, H query heads, K key-value heads, D head size, N blocks, P tokens a
block, W blocks a row's table names, R tokens a sliding window keeps.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from reblock.backends.torch.native import ops
from reblock.backends.torch.refusal import NotCompilable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ATTENTION_NAME",
    "AttentionCall",
    "AttentionTarget",
    "PagedCache",
    "SlidingCache",
    "Storing",
    "attending",
    "read_call",
    "register",
]

ATTENTION_NAME = "reblock_paged"

# Arguments that some models pass along and that change nothing here: positions are already in the
# rotated queries and keys, and dropout is zero when a model is evaluated.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "head_mask",
        "is_causal",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_bias",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer asks of its attention, besides the tensors."""

    scaling: float
    softcap: float | None
    window: int | None
    sinks: Tensor | None


class AttentionTarget(Protocol):
    """What the attention of a model is handed to while it is in force."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
    ) -> Tensor:
        """Return the output [B, T, H, D] for query [B, H, T, D] and key, value [B, K, T, D]."""
        ...


# Which target is in force. A context variable, because the call comes out of a model's own code,
# which passes nothing of ours along in every architecture.
_TARGET: ContextVar[AttentionTarget | None] = ContextVar("reblock_attention_target", default=None)


@contextmanager
def attending(target: AttentionTarget) -> Iterator[None]:
    """Hand every attention call of a registered model to `target` inside the block."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def read_call(
    query: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> AttentionCall:
    """Read the keyword arguments of a transformers attention call.

    Raises:
        NotCompilable: one of them asks for something these caches do not do.
    """
    for name, value in others.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            raise NotCompilable(
                f"the model's attention passes {name!r}, which the paged attention does not know; "
                "ignoring it could change the model's answers"
            )
    if others.get("is_causal") is False:
        raise NotCompilable("the model's attention is not causal; a KV cache holds the past only")
    return AttentionCall(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        window=sliding_window,
        sinks=s_aux,
    )


def _hand_over(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    target = _TARGET.get()
    if target is None:
        raise RuntimeError(f"{ATTENTION_NAME!r} was called with no cache in force")
    if attention_mask is not None:
        raise NotCompilable(
            "the model builds an attention mask of its own, past the mask interface"
        )
    if getattr(module, "is_causal", True) is False:
        raise NotCompilable("its attention is not causal; a KV cache holds the past only")
    return target.attend(query, key, value, read_call(query, **arguments)), None


def register() -> None:
    """Make `reblock_paged` known to transformers; calling it again changes nothing.

    It is not made known to the mask interface. transformers builds no mask for an attention that
    is missing there, and needs none: the caches mask by position.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _hand_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """Where the rows of one program call stand; shared by both kinds of cache.

    Rows past `num_rows` and tokens past `num_tokens` are padding: they write nothing, and their
    output is zero.
    """

    key_cache: Tensor  # paged [N, K, P, D], sliding [max batch, K, R, D]
    value_cache: Tensor
    start: Tensor  # [B] position of each row's first token
    num_tokens: Tensor  # [B] real tokens in each row, at least 1
    num_rows: Tensor  # [1] real rows, at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache(_Cache):
    """A cache of blocks that any row may own: layers that see the whole past."""

    block_tables: Tensor  # [B, W] block ids

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
    ) -> Tensor:
        """Write the new tokens into the rows' blocks, then attend to all of them."""
        return ops.paged_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.start,
            self.num_tokens,
            self.num_rows,
            call.scaling,
            call.softcap or 0.0,
            0,
            _exact(call.sinks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingCache(_Cache):
    """A ring of the last R tokens for each running request: layers that see a window."""

    slots: Tensor  # [B] which ring is whose

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
    ) -> Tensor:
        """Attend to the ring and to the new tokens, then write those over the oldest."""
        return ops.ring_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            self.key_cache,
            self.value_cache,
            self.slots,
            self.start,
            self.num_tokens,
            self.num_rows,
            call.scaling,
            call.softcap or 0.0,
            _exact(call.sinks),
        )


@dataclass(frozen=True, slots=True)
class Storing:
    """Stores new tokens in a cache and attends to nothing: the output is zero."""

    cache: PagedCache | SlidingCache

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
    ) -> Tensor:
        """Write the new tokens into the cache."""
        # Of the keys: of the queries, the compiler would have to compute them.
        no_heads = key[:, :0]
        self.cache.attend(no_heads, key, value, replace(call, sinks=None))
        batch, heads, tokens, _ = query.shape
        return query.new_zeros((batch, tokens, heads, value.shape[3]))


def _exact(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.to(torch.float32)
