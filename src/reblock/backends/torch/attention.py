"""Attention that reads and writes a paged KV cache, in place of a Hugging Face model's own.

transformers looks up the attention of a model by name. `register` adds the name `reblock_paged`
to its tables, so that any model that asks that table runs on our caches with no code of its own.
The function it finds hands over to whatever `attending` has put in force: while a model is
examined that is a recorder of shapes, while a layer is exported it is one of the caches below.

Shapes: B rows, T tokens a row, H query heads, K key-value heads, G = H / K, D head size,
N blocks, P tokens a block, W blocks a row's table names, R tokens a sliding window keeps,
S keys that a query sees.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from reblock.backends.torch.refusal import NotCompilable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ATTENTION_NAME",
    "AttentionCall",
    "AttentionTarget",
    "PagedCache",
    "SlidingCache",
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


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, call: AttentionCall) -> Tensor:
    """Return the output [B, T, H, D]; key and value are [B, K, S, D], the mask is [B, 1, T, S]."""
    if call.softcap is None and call.sinks is None:
        out_BHTD = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=call.scaling, enable_gqa=True
        )
        return _copy(out_BHTD.transpose(1, 2))
    batch, heads, tokens, size = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    # Heads that share keys become rows of one product, so the keys are not repeated.
    query = _reshape(query, batch * kv_heads, groups * tokens, size)
    key = _reshape(key, batch * kv_heads, num_keys, size)
    value = _reshape(value, batch * kv_heads, num_keys, value.shape[3])
    scores = torch.bmm(query, key.transpose(1, 2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = _reshape(scores, batch, heads, tokens, num_keys).masked_fill(~mask, float("-inf"))
    weights = _softmax(scores, call.sinks).to(value.dtype)
    weights = _reshape(weights, batch * kv_heads, groups * tokens, num_keys)
    out = _reshape(torch.bmm(weights, value), batch, heads, tokens, value.shape[2])
    return _copy(out.transpose(1, 2))


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return softmax over the last dimension, float32; `sinks` [H] take part and are left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    batch, heads, tokens, num_keys = scores.shape
    column = sinks.to(scores.dtype)[None, :, None, None].expand(batch, heads, tokens, 1)
    both = torch.cat([scores, column], dim=-1)
    return torch.softmax(both, dim=-1, dtype=torch.float32).narrow(3, 0, num_keys)


def _copy(tensor: Tensor) -> Tensor:
    # Not `contiguous()`, which looks whether it has anything to do. The answer is baked into the
    # graph, and it can differ once the compiler has taken an operator apart.
    return tensor.clone(memory_format=torch.contiguous_format)


def _reshape(tensor: Tensor, *shape: int) -> Tensor:
    """Return a copy in another shape, whose strides are spelled out.

    `view` would derive them as minima of products of dynamic dimensions, which the exporter
    cannot prove to be what they always are, and so refuses.
    """
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    return _copy(tensor).as_strided(shape, strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """Where the rows of one program call stand; shared by both kinds of cache.

    Rows past `num_rows` are padding. They compute what the last real row computes and write the
    very bytes that it writes, so padding needs no block of its own.
    """

    key_cache: Tensor  # paged [N, K, P, D], sliding [max batch, K, R, D]
    value_cache: Tensor
    start: Tensor  # [B] position of each row's first token
    num_tokens: Tensor  # [B] real tokens in each row, at least 1
    num_rows: Tensor  # [1] real rows, at least 1

    def _rows(self) -> Tensor:
        """Return [B]: for each row the real row whose keys it writes."""
        batch = self.start.shape[0]
        return torch.minimum(torch.arange(batch), self.num_rows - 1)

    def _write(self, cache: Tensor, at: tuple[Tensor, Tensor], new: Tensor, source: Tensor) -> None:
        """Put `new` [B, K, T, D] into `cache`: its tokens `source` [M] of B * T go to `at` [M]."""
        batch, heads, tokens, size = new.shape
        flat = new.transpose(1, 2).reshape(batch * tokens, heads, size)
        cache[at[0], :, at[1]] = flat[source].to(cache.dtype)


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
        _batch, _, tokens, _ = query.shape
        block_size = self.key_cache.shape[2]
        last_B1 = (self.num_tokens - 1)[:, None]
        # Padding tokens stand where the last real token stands: in range, and written alike.
        token_BT = torch.minimum(torch.arange(tokens)[None, :], last_B1)
        position_BT = self.start[:, None] + token_BT

        rows = self._rows()
        written_BT = position_BT[rows]
        block_BT = torch.gather(self.block_tables[rows], 1, written_BT // block_size)
        at = (block_BT.reshape(-1), (written_BT % block_size).reshape(-1))
        source = (rows[:, None] * tokens + token_BT[rows]).reshape(-1)
        self._write(self.key_cache, at, key, source)
        self._write(self.value_cache, at, value, source)

        num_keys = self.block_tables.shape[1] * block_size
        mask = torch.arange(num_keys)[None, None, None, :] <= position_BT[:, None, :, None]
        return _attend(
            query, self._pages(self.key_cache), self._pages(self.value_cache), mask, call
        )

    def _pages(self, cache: Tensor) -> Tensor:
        """Return [B, K, W * P, D]: every row's blocks side by side."""
        batch, width = self.block_tables.shape
        _, heads, block_size, size = cache.shape
        pages_BWKPD = cache[self.block_tables]
        return pages_BWKPD.transpose(1, 2).reshape(batch, heads, width * block_size, size)


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
        tokens = query.shape[2]
        window = self.key_cache.shape[2]
        old_key, old_value = (
            self.key_cache[self.slots],
            self.value_cache[self.slots],
        )  # [B, K, R, D]
        mask = self._mask(tokens, window)
        out = _attend(
            query,
            torch.cat([old_key, key.to(old_key.dtype)], dim=2),
            torch.cat([old_value, value.to(old_value.dtype)], dim=2),
            mask,
            call,
        )
        self._push(key, value, tokens, window)
        return out

    def _mask(self, tokens: int, window: int) -> Tensor:
        """Return [B, 1, T, R + T]: which tokens of the ring, then of the new ones, are seen."""
        token_T = torch.arange(tokens)
        position_BT = self.start[:, None] + token_T[None, :]
        # Ring entry r holds the newest position before `start` that is r modulo R.
        newest_B1 = (self.start - 1)[:, None]
        held_BR = newest_B1 - torch.remainder(newest_B1 - torch.arange(window)[None, :], window)
        in_ring = (held_BR[:, None, :] >= 0) & (
            held_BR[:, None, :] > position_BT[:, :, None] - window
        )
        distance_TT = token_T[:, None] - token_T[None, :]
        in_new = (distance_TT >= 0) & (distance_TT < window)
        in_new_BTT = in_new[None, :, :].expand(self.start.shape[0], tokens, tokens)
        return torch.cat([in_ring, in_new_BTT], dim=2)[:, None]

    def _push(self, key: Tensor, value: Tensor, tokens: int, window: int) -> None:
        """Write the last M = min(T, R) real tokens of each row into its ring."""
        rows = self._rows()
        kept = torch.sym_min(tokens, window)  # min() would settle which is less
        # N = B * M, counted out: to bring [B, M] into one dimension, export asks whether M is 1
        # where there is one row.
        place_N = torch.arange(rows.shape[0] * kept)
        row_N = rows[torch.div(place_N, kept, rounding_mode="floor")]
        # From the newest back; where a row has fewer tokens its first one is written again.
        token_N = torch.clamp((self.num_tokens - 1)[row_N] - torch.remainder(place_N, kept), min=0)
        at = (self.slots[row_N], torch.remainder(self.start[row_N] + token_N, window))
        source = row_N * tokens + token_N
        self._write(self.key_cache, at, key, source)
        self._write(self.value_cache, at, value, source)
