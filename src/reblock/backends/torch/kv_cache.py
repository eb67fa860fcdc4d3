"""The KV cache of a running artifact: one region of memory for each tensor, to be resized alone."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from reblock.backends.torch.source import TORCH_DTYPES
from reblock.devices import read_cpu_device
from reblock.errors import DoesNotFit
from reblock.memory import TENSOR_ALIGNMENT_BYTES, align
from reblock.units import KIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from reblock.config import CacheMeta

__all__ = ["KVCache"]


class KVCache:
    """The cache tensors by name.

    All of their memory is taken from the system at once and not with the first token: what does
    not fit fails at start. A resize replaces one tensor after the other, so that at no time there
    is more than one of them twice.
    """

    def __init__(self, metas: Sequence[CacheMeta], num_blocks: int) -> None:
        """Take the memory of zeroed caches.

        Raises:
            DoesNotFit: the system has not that much memory to give.
        """
        self._metas = tuple(metas)
        self._tensors: dict[str, Tensor] = {}
        self.num_blocks = num_blocks
        for meta, tensor in zip(metas, _reserve(metas, num_blocks), strict=True):
            self._tensors[meta.name] = tensor.zero_()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of now: whoever keeps one of them keeps its memory, whatever is resized."""
        return self._tensors

    @property
    def num_bytes(self) -> int:
        """What the tensors hold, without what lies between them."""
        return sum(meta.bytes_at(self.num_blocks) for meta in self._metas)

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have `num_blocks` blocks; see `reblock.engine.Runner`.

        Raises:
            DoesNotFit: the system has not that much memory to give. Nothing has changed.
        """
        metas = [meta for meta in self._metas if meta.is_resizable]
        _check_memory(metas, self.num_blocks, num_blocks)
        # Addresses only, which are had or not; the memory behind them is taken when it is written.
        reserved = dict(zip(metas, _reserve(metas, num_blocks), strict=True))
        num_kept = min(self.num_blocks, num_blocks)
        for meta in metas:
            old, new = self._tensors[meta.name], reserved.pop(meta)
            new[:num_kept] = old[:num_kept]
            new[num_kept:].zero_()
            for source, destination in moves:
                new[destination] = old[source]
            self._tensors[meta.name] = new
            del old  # returns its memory before more is taken
        self.num_blocks = num_blocks


def _reserve(metas: Sequence[CacheMeta], num_blocks: int) -> list[Tensor]:
    """Return a tensor for each cache, whose memory is not taken before it is written."""
    try:
        return [_reserve_tensor(meta, num_blocks) for meta in metas]
    except OSError as error:
        raise _does_not_fit(metas, num_blocks, f"to give ({error.strerror})") from error


def _reserve_tensor(meta: CacheMeta, num_blocks: int) -> Tensor:
    num_bytes = meta.bytes_at(num_blocks)
    region = mmap.mmap(
        -1,
        align(num_bytes) + TENSOR_ALIGNMENT_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,  # shared memory has no huge pages
    )
    base = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    offset = align(base) - base
    # Whole huge pages only, so that a cache takes no more than it holds.
    if huge_bytes := num_bytes // TENSOR_ALIGNMENT_BYTES * TENSOR_ALIGNMENT_BYTES:
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE, offset, huge_bytes)
    first = num_blocks if meta.is_resizable else meta.shape[0]
    shape = (first, *meta.shape[1:])
    flat = torch.frombuffer(
        region, dtype=TORCH_DTYPES[meta.dtype], count=math.prod(shape), offset=offset
    )
    return flat.view(shape)


def _check_memory(metas: Sequence[CacheMeta], old_blocks: int, new_blocks: int) -> None:
    """Raise DoesNotFit where a resize would have the system end processes for want of memory."""
    growth = [meta.bytes_at(new_blocks) - meta.bytes_at(old_blocks) for meta in metas]
    largest = max((meta.bytes_at(max(old_blocks, new_blocks)) for meta in metas), default=0)
    available = _read_available_bytes()
    if sum(growth) > 0 and available is not None and sum(growth) + largest > available:
        raise _does_not_fit(
            metas, new_blocks, f"beside the old one: {format_bytes(max(0, available))} are left"
        )


def _does_not_fit(metas: Sequence[CacheMeta], num_blocks: int, reason: str) -> DoesNotFit:
    num_bytes = sum(meta.bytes_at(num_blocks) for meta in metas)
    return DoesNotFit(
        f"the KV cache of {num_blocks} blocks takes {format_bytes(num_bytes)}, and the system has "
        f"not that much {reason}; ask for fewer blocks (an artifact's are set by `reblock set`)"
    )


def _read_available_bytes() -> int | None:
    """Return what this process could have more of, or None where the system does not say.

    That is what the system could give, and what the limits of its control groups leave.
    """
    available = _read_kib("/proc/meminfo", "MemAvailable")
    resident = _read_kib("/proc/self/status", "VmRSS")
    if available is None or resident is None:
        return None
    return min(available, read_cpu_device().dram_bytes - resident)


def _read_kib(path: str, name: str) -> int | None:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * KIB
    return None
