"""Weights in the layout that the native operators read.

A weight [N, K] of a linear layer is packed as [ceil(N / 16), ceil(K / V), 16, V], where V = 1, 2
or 4 values of float32, bfloat16 or int8 make a word of 32 bits. Sixteen outputs lie side by side,
so that a vector of them is one load, and a thread reads its part of a weight in one go. What is
missing to whole words and to sixteen outputs is filled up with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "PANEL",
    "Quantized",
    "dequantize",
    "is_packed",
    "pack",
    "packed_shape",
    "quantize",
    "unpack",
]

# As kPanel in vector.h.
PANEL = 16


class Quantized(NamedTuple):
    """A weight in int8 and what to multiply each of its rows by, float32."""

    weight: Tensor
    scales: Tensor


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the shape of a packed weight [outputs, inputs]."""
    of_word = 4 // dtype.itemsize
    return -(-outputs // PANEL), -(-inputs // of_word), PANEL, of_word


def pack(weight: Tensor) -> Tensor:
    """Return a weight [N, K], packed, in its own type."""
    panels, words, panel, of_word = packed_shape(weight.shape[0], weight.shape[1], weight.dtype)
    missing = (0, words * of_word - weight.shape[1], 0, panels * panel - weight.shape[0])
    if any(missing):
        weight = torch.nn.functional.pad(weight, missing)
    return weight.reshape(panels, panel, words, of_word).transpose(1, 2).contiguous()


def is_packed(tensor: Tensor) -> bool:
    """Return whether a tensor of a model is a weight of a linear layer, packed."""
    return tensor.dim() == 4 and tensor.shape[2:] == packed_shape(1, 1, tensor.dtype)[2:]


def unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the weight [outputs, inputs] that `packed` was made of."""
    panels, words, panel, of_word = packed.shape
    whole = packed.transpose(1, 2).reshape(panels * panel, words * of_word)
    return whole[:outputs, :inputs].contiguous()


def quantize(weight: Tensor) -> Quantized:
    """Return a weight [N, K] in int8, symmetric, with a scale for each row.

    The error of an element is half a scale at most, which is 1/254 of the largest in its row.
    """
    exact = weight.to(torch.float32)
    scales = exact.abs().amax(dim=1) / 127
    # A row of zeros has nothing to scale. One with a NaN stays NaN, to be noticed.
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    levels = torch.round(exact / scales[:, None]).clamp(-127, 127)
    return Quantized(levels.to(torch.int8), scales)


def dequantize(quantized: Quantized) -> Tensor:
    """Return the weight [N, K] that the operators compute with, float32."""
    return quantized.weight.to(torch.float32) * quantized.scales[:, None]
