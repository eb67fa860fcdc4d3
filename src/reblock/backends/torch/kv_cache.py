"""The KV cache of a running artifact: one region of memory, cut into aligned tensors."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reblock.backends.torch.source import TORCH_DTYPES
from reblock.errors import DoesNotFit
from reblock.memory import TENSOR_ALIGNMENT_BYTES, align
from reblock.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from reblock.config import CacheMeta

__all__ = ["KVCache", "allocate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The cache tensors by name; `num_bytes` is what they hold, without what lies between them.

    `address` and `reserved_bytes` are of the region of virtual memory that they lie in.
    """

    tensors: Mapping[str, Tensor]
    num_bytes: int
    address: int
    reserved_bytes: int


def allocate(metas: Sequence[CacheMeta], num_blocks: int) -> KVCache:
    """Return zeroed caches of `num_blocks` blocks, all of their memory taken from the system.

    Memory is taken now and not with the first token: what does not fit fails at start.

    Raises:
        DoesNotFit: the system has not that much memory to give.
    """
    sizes = [meta.bytes_at(num_blocks) for meta in metas]
    length = sum(map(align, sizes)) + TENSOR_ALIGNMENT_BYTES
    try:
        region = mmap.mmap(-1, length)
    except OSError as error:
        raise DoesNotFit(
            f"the KV cache of {num_blocks} blocks takes {format_bytes(sum(sizes))}, and the system "
            f"has not that much to give ({error.strerror}); set fewer blocks with `reblock set`"
        ) from error
    base = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    offset = align(base) - base
    tensors = {}
    for meta, num_bytes in zip(metas, sizes, strict=True):
        first = num_blocks if meta.is_resizable else meta.shape[0]
        shape = (first, *meta.shape[1:])
        flat = torch.frombuffer(
            region, dtype=TORCH_DTYPES[meta.dtype], count=math.prod(shape), offset=offset
        )
        flat.zero_()
        tensors[meta.name] = flat.view(shape)
        offset += align(num_bytes)
    return KVCache(tensors=tensors, num_bytes=sum(sizes), address=base, reserved_bytes=length)
