"""The native operators against sums in float64, for tests and for a process of their own.

    python tests/native_checks.py LIBRARY

loads the library and checks every case; a process has only one set of operators, so other builds
than the one that the tests loaded are checked this way.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reblock.backends.torch.native import load, ops
from reblock.backends.torch.native.pack import pack, quantize

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 128, 300)
SHAPES = ((48, 64), (5, 37), (1, 1), (100, 301), (33, 2817), (256, 1024))
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
FLOATS = (torch.float32, torch.bfloat16)

# Of |x| |w|, past which a sum is wrong. In float32 rounding reaches 2e-7; a result in bfloat16 is
# off by 2^-9 of itself, and so of its bound by less.
LINEAR_ERROR = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
# Of outputs that are means of values of a normal distribution.
ATTENTION_ERROR = {torch.float32: 5e-6, torch.bfloat16: 2.0**-6}


def packed_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a weight packed in `dtype`, its scales, and what exactly it stands for, in float64."""
    if dtype == torch.int8:
        levels, scales = quantize(weight)
        return pack(levels), scales, levels.double() * scales.double()[:, None]
    return pack(weight.to(dtype)), None, weight.to(dtype).double()


def check_linear(
    rows: int, shape: tuple[int, int], x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(rows * 7919 + outputs)
    x = torch.randn(rows, inputs, generator=generator).to(x_dtype)
    bias = torch.randn(outputs, generator=generator)
    packed, scales, exact = packed_weight(torch.randn(shape, generator=generator), weight_dtype)
    y = ops.linear(x, packed, scales, bias, outputs)
    assert y.dtype == x_dtype
    assert y.shape == (rows, outputs)
    expected = x.double() @ exact.T + bias.double()
    bound = x.double().norm(dim=1)[:, None] * exact.norm(dim=1)[None] + bias.double().abs()
    error = ((y.double() - expected).abs() / bound).max()
    assert error <= LINEAR_ERROR[x_dtype], f"{rows} rows, {shape}, {x_dtype}, {weight_dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A call of one of the attention operators."""

    kv_heads: int = 2
    groups: int = 4
    key_size: int = 64
    value_size: int | None = None  # None: as large as a key
    tokens: int = 1  # that a row has room for
    start: tuple[int, ...] = (0, 37, 300)
    num_tokens: tuple[int, ...] = (1, 1, 1)
    num_rows: int = 3
    length: int = 16  # of a block, or of a ring
    is_ring: bool = False
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32


CHUNK = Attention(tokens=33, num_tokens=(33, 7, 20))
ATTENTIONS = (
    *(Attention(groups=groups) for groups in (1, 2, 3, 4, 7, 8, 16)),
    *(replace(CHUNK, groups=groups) for groups in (1, 2, 3, 8, 140)),
    *(replace(each, key_size=d) for d in (20, 80, 96, 128, 256) for each in (Attention(), CHUNK)),
    *(replace(each, value_size=72) for each in (Attention(), CHUNK)),
    # Ranges of keys that two threads share, and one that ends with a range.
    Attention(start=(2000, 511, 255), length=128),
    replace(CHUNK, start=(2000, 0, 64), length=128),
    replace(CHUNK, tokens=512, num_tokens=(512, 200, 1), length=64, key_size=32),
    *(replace(each, window=w) for w in (1, 30, 1000) for each in (Attention(), CHUNK)),
    *(replace(each, softcap=3.0) for each in (Attention(), CHUNK)),
    *(replace(each, has_sinks=True, softcap=2.0) for each in (Attention(), CHUNK)),
    *(replace(each, num_rows=1) for each in (Attention(), CHUNK)),
    Attention(tokens=2, num_tokens=(1, 2, 1), groups=3),
    *(replace(each, length=n) for n in (7, 100) for each in (Attention(), CHUNK)),
    *(
        replace(each, is_ring=True, length=n, has_sinks=n == 24)
        for n in (5, 24, 64, 512)
        for each in (Attention(), CHUNK, replace(CHUNK, num_rows=2))
    ),
    *(
        replace(each, dtype=dtype, cache_dtype=cache, is_ring=is_ring)
        for dtype, cache in itertools.product(FLOATS, FLOATS)
        for is_ring in (False, True)
        for each in (Attention(), CHUNK)
    ),
)


@dataclass(slots=True, kw_only=True)
class Tensors:
    """The tensors of a call, with values."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    where: Tensor
    sinks: Tensor | None


def make_tensors(case: Attention) -> Tensors:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, heads = len(case.start), case.kv_heads * case.groups
    value_size = case.value_size or case.key_size
    width = -(-(max(case.start) + case.tokens) // case.length)
    count = rows + 1 if case.is_ring else rows * width
    places = torch.randperm(count, generator=generator)
    return Tensors(
        # As a model gives them: heads and tokens exchanged, without a copy.
        query=random(rows, case.tokens, heads, case.key_size).transpose(1, 2),
        key=random(rows, case.tokens, case.kv_heads, case.key_size).transpose(1, 2),
        value=random(rows, case.kv_heads, case.tokens, value_size),
        key_cache=random(count, case.kv_heads, case.length, case.key_size, dtype=case.cache_dtype),
        value_cache=random(count, case.kv_heads, case.length, value_size, dtype=case.cache_dtype),
        where=places[:rows] if case.is_ring else places.reshape(rows, width),
        sinks=random(heads, dtype=torch.float32) if case.has_sinks else None,
    )


def run(case: Attention, tensors: Tensors) -> Tensor:
    arguments = (
        tensors.query,
        tensors.key,
        tensors.value,
        tensors.key_cache,
        tensors.value_cache,
        tensors.where,
        torch.tensor(case.start),
        torch.tensor(case.num_tokens),
        torch.tensor([case.num_rows]),
        case.key_size**-0.5,
        case.softcap,
    )
    if case.is_ring:
        return ops.ring_attention(*arguments, tensors.sinks)
    return ops.paged_attention(*arguments, case.window, tensors.sinks)


def reference(case: Attention, tensors: Tensors) -> Tensor:
    """Do the same token by token in float64; the caches are written as well."""
    rows, heads, tokens, _ = tensors.query.shape
    out = torch.zeros(rows, tokens, heads, tensors.value.shape[3], dtype=torch.float64)
    window = case.length if case.is_ring else case.window
    for row in range(case.num_rows):
        start, real = case.start[row], case.num_tokens[row]
        end = start + real
        place, offset = _places(case, tensors.where[row], torch.arange(end))
        seen = []
        for cache, new in (
            (tensors.key_cache, tensors.key),
            (tensors.value_cache, tensors.value),
        ):
            past = cache[place, :, offset].clone()  # [end, K, size]
            past[start:] = new[row, :, :real].transpose(0, 1).to(cache.dtype)
            kept = max(start, end - window) if case.is_ring else start
            cache[place[kept:], :, offset[kept:]] = past[kept:]
            seen.append(past.double().repeat_interleave(case.groups, dim=1))
        keys, values = seen
        scores = torch.einsum("htd,shd->hts", tensors.query[row, :, :real].double(), keys)
        scores = scores * case.key_size**-0.5
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        distance = torch.arange(start, end)[:, None] - torch.arange(end)[None, :]
        hidden = (distance < 0) | ((distance >= window) if window else torch.tensor(False))
        scores = scores.masked_fill(hidden, float("-inf"))
        if tensors.sinks is not None:
            column = tensors.sinks.double()[:, None, None].expand(heads, real, 1)
            scores = torch.cat([scores, column], dim=2)
        weights = torch.softmax(scores, dim=2)[:, :, :end]
        out[row, :real] = torch.einsum("hts,shd->thd", weights, values)
    return out


def _places(case: Attention, where: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    offset = positions % case.length
    if case.is_ring:
        return where.expand(len(positions)), offset
    return where[positions // case.length], offset


def check_attention(case: Attention) -> None:
    tensors = make_tensors(case)
    expected_tensors = replace(
        tensors, key_cache=tensors.key_cache.clone(), value_cache=tensors.value_cache.clone()
    )
    expected = reference(case, expected_tensors)
    out = run(case, tensors)
    assert out.dtype == case.dtype
    error = (out.double() - expected).abs().max()
    assert error <= ATTENTION_ERROR[case.dtype], f"{case}: off by {error}"
    # To the bit, padding included: what is no new token stays as it was.
    assert torch.equal(tensors.key_cache, expected_tensors.key_cache), case
    assert torch.equal(tensors.value_cache, expected_tensors.value_cache), case


def main() -> None:
    load(sys.argv[1])
    for rows, shape, x_dtype, weight_dtype in itertools.product(
        ROWS, SHAPES, FLOATS, WEIGHT_DTYPES
    ):
        check_linear(rows, shape, x_dtype, weight_dtype)
    for case in ATTENTIONS:
        check_attention(case)


if __name__ == "__main__":
    main()
