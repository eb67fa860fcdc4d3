"""How fast the machine reads memory: the sum over as many bytes as the weights have."""

from __future__ import annotations

import mmap
import time
from typing import Any

import torch

__all__ = ["Engine"]


class Engine:
    """Not an engine, but measured in turn with them."""

    def load(self, *, num_bytes: int, threads: int, **_: Any) -> None:
        torch.set_num_threads(threads)
        # Large pages, as caches have them and files of weights may have.
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(region, dtype=torch.float32).fill_(1)

    def read(self, *, times: int) -> list[float]:
        """Return the bytes per second of each of so many sums."""
        rates = []
        for _ in range(times):
            started = time.perf_counter()
            self._buffer.sum()
            rates.append(self._buffer.numel() * 4 / (time.perf_counter() - started))
        return rates
