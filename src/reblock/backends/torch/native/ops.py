"""The native operators as torch knows them: names, arguments and shapes of results.

    linear           x [..., K] times a packed weight [N, K] -> [..., N], in x's type
    linears          the same for several weights of one type -> a tensor for each
    embedding        rows of a packed weight [N, K] for ids [...] -> [..., K]
    paged_attention  writes new tokens into blocks and attends -> [B, T, H, E]
    ring_attention   the same on rings, whose length is the window

Importing this module is enough to export a model; to run one takes the library that is built from
`ops.cpp` (see library.py). Shapes are those of attention.py: query [B, H, T, D], key [B, K, T, D],
value [B, K, T, E]; rows past `num_rows` and tokens past `num_tokens` write nothing and give zeros.
`softcap` and `window` are 0 where there is none. A query without heads only stores the new tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "NAMESPACE",
    "SCHEMAS",
    "embedding",
    "linear",
    "linears",
    "paged_attention",
    "ring_attention",
]

NAMESPACE = "reblock"

SCHEMAS = {
    "linear": (
        "(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int out_features) -> Tensor"
    ),
    "linears": (
        "(Tensor x, Tensor[] packed, Tensor?[] scales, Tensor?[] bias, int[] out_features) "
        "-> Tensor[]"
    ),
    "embedding": (
        "(Tensor ids, Tensor packed, Tensor? scales, int num_embeddings, int embedding_dim, "
        "ScalarType dtype) -> Tensor"
    ),
    "paged_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor block_tables, Tensor start, Tensor num_tokens, Tensor num_rows, float scale, "
        "float softcap, int window, Tensor? sinks) -> Tensor"
    ),
    "ring_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slots, Tensor start, Tensor num_tokens, Tensor num_rows, float scale, "
        "float softcap, Tensor? sinks) -> Tensor"
    ),
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema)

linear = torch.ops.reblock.linear.default
linears = torch.ops.reblock.linears.default
embedding = torch.ops.reblock.embedding.default
paged_attention = torch.ops.reblock.paged_attention.default
ring_attention = torch.ops.reblock.ring_attention.default


def _linear_shape(x: Tensor, *others: Any) -> Tensor:
    outputs = others[-1]
    return x.new_empty((*x.shape[:-1], outputs))


def _linears_shape(x: Tensor, *others: Any) -> list[Tensor]:
    return [_linear_shape(x, outputs) for outputs in others[-1]]


def _embedding_shape(ids: Tensor, *others: Any) -> Tensor:
    *_, size, dtype = others
    return ids.new_empty((*ids.shape, size), dtype=dtype)


def _attention_shape(query: Tensor, _key: Tensor, value: Tensor, *_others: Any) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty((batch, tokens, heads, value.shape[3]))


torch.library.register_fake(f"{NAMESPACE}::linear", _linear_shape)
torch.library.register_fake(f"{NAMESPACE}::linears", _linears_shape)
torch.library.register_fake(f"{NAMESPACE}::embedding", _embedding_shape)
torch.library.register_fake(f"{NAMESPACE}::paged_attention", _attention_shape)
torch.library.register_fake(f"{NAMESPACE}::ring_attention", _attention_shape)
