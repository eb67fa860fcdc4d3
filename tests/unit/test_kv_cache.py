"""The cache of the torch backend: what a resize keeps, moves and takes."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from process_memory import resident_at  # noqa: E402
from reblock.backends.torch import kv_cache  # noqa: E402
from reblock.backends.torch.kv_cache import KVCache  # noqa: E402
from reblock.config import CacheMeta  # noqa: E402
from reblock.devices import read_cpu_device  # noqa: E402
from reblock.errors import DoesNotFit  # noqa: E402
from reblock.memory import TENSOR_ALIGNMENT_BYTES, align  # noqa: E402
from reblock.units import MIB  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.full

PAGE_BYTES = 4096
ONE_MIB_BLOCK = (4, 64, 1024)  # of float32


def make_metas(count: int = 2, block: tuple[int, ...] = (2, 4, 8)) -> list[CacheMeta]:
    """Caches of layers that see the whole past, and one of a layer with a window."""
    metas = [
        CacheMeta(
            name=f"past_key_values_{number}",
            layer_index=number // 2,
            shape=(1, *block),
            layer_type="full_attention",
            is_auto=True,
            dtype="float32",
        )
        for number in range(count)
    ]
    ring = CacheMeta(
        name="ring",
        layer_index=count,
        shape=(3, 2, 5, 8),
        layer_type="sliding_attention",
        is_auto=False,
        dtype="bfloat16",
    )
    return [*metas, ring]


def number_blocks(cache: KVCache) -> None:
    for tensor in cache.tensors.values():
        for block_id, block in enumerate(tensor):
            block.fill_(block_id + 1)


def numbers(tensor: Tensor) -> list[float]:
    """What every block was filled with."""
    assert all(bool((block == block.flatten()[0]).all()) for block in tensor)
    return [float(block.flatten()[0]) for block in tensor]


def resident_bytes(*tensors: Tensor) -> int:
    """The physical memory behind tensors."""
    return sum(
        resident_at(os.getpid(), t.data_ptr(), t.numel() * t.element_size()) for t in tensors
    )


def resident_memory() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


def test_a_new_cache_is_zeroed_aligned_and_has_all_of_its_memory() -> None:
    cache = KVCache(make_metas(block=ONE_MIB_BLOCK), 5)
    assert cache.num_bytes == 2 * 5 * MIB + 3 * 2 * 5 * 8 * 2
    assert cache.tensors["past_key_values_0"].shape == (5, *ONE_MIB_BLOCK)
    assert cache.tensors["ring"].dtype == torch.bfloat16
    for tensor in cache.tensors.values():
        assert tensor.data_ptr() % TENSOR_ALIGNMENT_BYTES == 0
        assert not tensor.any()
    pages = sum(-(-meta.bytes_at(5) // PAGE_BYTES) for meta in make_metas(block=ONE_MIB_BLOCK))
    assert resident_bytes(*cache.tensors.values()) == pages * PAGE_BYTES


def test_growing_keeps_every_block_and_adds_zeroed_ones_with_their_memory() -> None:
    cache = KVCache(make_metas(block=ONE_MIB_BLOCK), 2)
    number_blocks(cache)
    cache.resize(5, [])
    for name in ("past_key_values_0", "past_key_values_1"):
        assert numbers(cache.tensors[name]) == [1, 2, 0, 0, 0]
        assert cache.tensors[name].data_ptr() % TENSOR_ALIGNMENT_BYTES == 0
        assert resident_bytes(cache.tensors[name]) == 5 * MIB
    assert cache.num_blocks == 5
    assert cache.num_bytes == sum(t.numel() * t.element_size() for t in cache.tensors.values())


def test_shrinking_moves_blocks_and_keeps_those_that_stay() -> None:
    cache = KVCache(make_metas(), 6)
    number_blocks(cache)
    cache.resize(3, [(5, 0), (3, 2)])
    for name in ("past_key_values_0", "past_key_values_1"):
        assert numbers(cache.tensors[name]) == [6, 2, 4]
    assert cache.num_blocks == 3


def test_rings_are_left_alone() -> None:
    cache = KVCache(make_metas(), 2)
    number_blocks(cache)
    ring = cache.tensors["ring"]
    cache.resize(4, [])
    cache.resize(1, [(3, 0)])
    assert cache.tensors["ring"] is ring
    assert numbers(ring) == [1, 2, 3]


def test_a_resize_returns_the_memory_of_what_there_was_before() -> None:
    cache = KVCache(make_metas(4, ONE_MIB_BLOCK), 8)
    gc.collect()
    before = resident_memory()
    cache.resize(2, [])
    assert before - resident_memory() > 0.9 * 4 * 6 * MIB


def test_while_it_is_resized_no_more_than_one_tensor_is_there_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KVCache(make_metas(8, ONE_MIB_BLOCK), 8)
    seen: list[int] = []
    zero = torch.Tensor.zero_

    def watch(tensor: Tensor) -> Any:
        # Called when a new tensor is filled and the old one is still there.
        seen.append(resident_memory())
        return zero(tensor)

    before = resident_memory()
    monkeypatch.setattr(torch.Tensor, "zero_", watch)
    cache.resize(7, [])
    assert len(seen) == 8
    # Seven MiB of the new one, and two for what else happens in a process.
    assert max(seen) - before < 9 * MIB


def test_a_cache_that_the_system_has_no_addresses_for_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"takes .* not that much to give"):
        KVCache(make_metas(block=ONE_MIB_BLOCK), 2**31 - 1)


def test_a_resize_that_there_is_no_memory_for_is_refused_and_changes_nothing() -> None:
    cache = KVCache(make_metas(), 3)
    number_blocks(cache)
    tensors = dict(cache.tensors)
    with pytest.raises(DoesNotFit, match="beside the old one"):
        cache.resize(2**31 - 1, [])
    assert cache.num_blocks == 3
    assert all(cache.tensors[name] is tensor for name, tensor in tensors.items())
    assert numbers(cache.tensors["past_key_values_0"]) == [1, 2, 3]


@pytest.mark.parametrize(("num_blocks", "is_refused"), [(8, False), (9, False), (10, True)])
def test_growth_and_one_tensor_more_have_to_be_available(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, is_refused: bool
) -> None:
    block = 2 * 4 * 8 * 4
    # From 4 to 9 blocks: two caches grow by 5 blocks each, while one is there twice.
    monkeypatch.setattr(kv_cache, "_read_available_bytes", lambda: (2 * 5 + 9) * block)
    cache = KVCache(make_metas(), 4)
    if is_refused:
        with pytest.raises(DoesNotFit):
            cache.resize(num_blocks, [])
    else:
        cache.resize(num_blocks, [])
    assert cache.num_blocks == (4 if is_refused else num_blocks)


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # A container's limit just above what this process has.
    device = replace(read_cpu_device(), dram_bytes=resident_memory() + 8 * MIB)
    monkeypatch.setattr(kv_cache, "read_cpu_device", lambda: device)
    cache = KVCache(make_metas(block=ONE_MIB_BLOCK), 1)
    with pytest.raises(DoesNotFit, match="beside the old one"):
        cache.resize(20, [])


def test_a_system_that_does_not_say_what_is_left_is_believed_to_have_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_read_kib", lambda path, name: None)
    cache = KVCache(make_metas(), 1)
    cache.resize(20, [])
    assert cache.num_blocks == 20


def test_a_cache_can_be_made_smaller_though_nothing_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "_read_available_bytes", lambda: 0)
    cache = KVCache(make_metas(), 4)
    cache.resize(3, [])
    assert cache.num_blocks == 3


def test_huge_pages_take_no_memory_behind_the_end_of_a_cache() -> None:
    # Three MiB are one huge page and half of one, which would take as much as a whole one.
    tensor = KVCache(make_metas(1, ONE_MIB_BLOCK), 3).tensors["past_key_values_0"]
    assert align(3 * MIB) == 4 * MIB
    assert resident_at(os.getpid(), tensor.data_ptr(), 4 * MIB) == 3 * MIB
