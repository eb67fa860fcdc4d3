from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reblock.engine.block_pool import BlockPool


def test_every_block_can_be_allocated_and_is_handed_out_once() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)


@pytest.mark.parametrize(("num_wanted", "fits"), [(2, True), (3, True), (4, False)])
def test_allocation_gives_all_blocks_or_none(num_wanted: int, fits: bool) -> None:
    pool = BlockPool(3)
    block_ids = pool.allocate(num_wanted)
    assert (block_ids is not None) == fits
    assert pool.num_used == (num_wanted if fits else 0)


def test_allocating_nothing_gives_an_empty_list_even_when_the_pool_is_empty() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_the_block_returned_last_is_handed_out_first() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.free([1])
    pool.free([0])
    assert pool.allocate(3) == [0, 1, 3]


@pytest.mark.parametrize("block_ids", [[0, 0], [0, 2], [-1], [3], [0, 1, 99]])
def test_a_wrong_return_raises_and_returns_nothing(block_ids: list[int]) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="blocks are returned"):
        pool.free(block_ids)
    assert pool.num_used == 2
    pool.check_integrity()


def test_returning_a_block_twice_raises() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.free([0])
    with pytest.raises(RuntimeError, match=r"not handed out: \[0\]"):
        pool.free([0])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(num_blocks)


def test_a_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(1).allocate(-1)


def test_a_pool_of_the_largest_count_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(2**31 - 1)
    assert pool.allocate(2) == [0, 1]
    pool.check_integrity()


def test_integrity_check_finds_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    del pool._holders[1]
    with pytest.raises(RuntimeError, match="has 3 blocks but accounts for 2"):
        pool.check_integrity()


def test_integrity_check_finds_a_block_that_is_free_and_used() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.free([0, 1])
    pool._returned[0] = 2
    with pytest.raises(RuntimeError, match="knows of 2 different ones"):
        pool.check_integrity()


def test_integrity_check_finds_a_kept_block_that_is_free() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.keep(1)
    pool.free([0])
    pool._kept.add(0)
    with pytest.raises(RuntimeError, match=r"keeps blocks \[0, 1\]"):
        pool.check_integrity()


def test_integrity_check_finds_a_used_block_without_a_holder() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool._holders[1] = 0
    with pytest.raises(RuntimeError, match="without a holder"):
        pool.check_integrity()


def cached_pool(num_blocks: int, num_cached: int) -> tuple[BlockPool, list[int]]:
    """A pool whose blocks 0, 1, ... are cached in this order, and the list of those evicted."""
    evicted: list[int] = []
    pool = BlockPool(num_blocks, on_evict=evicted.append)
    block_ids = pool.allocate(num_cached)
    assert block_ids is not None
    for block_id in block_ids:
        pool.keep(block_id)
    pool.free(block_ids)
    return pool, evicted


def test_a_kept_block_is_cached_when_it_is_returned_and_others_are_free() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.keep(1)
    pool.free([0, 1])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 1)
    assert pool.num_available == 3
    assert pool.kept == {1}
    pool.check_integrity()


def test_free_blocks_are_handed_out_before_cached_ones_are_evicted() -> None:
    pool, evicted = cached_pool(4, 2)
    assert pool.allocate(2) == [2, 3]
    assert evicted == []
    assert pool.allocate(1) == [0]
    assert evicted == [0]
    assert pool.kept == {1}


def test_cached_blocks_are_evicted_in_the_order_in_which_they_were_last_used() -> None:
    pool, evicted = cached_pool(4, 4)
    pool.share([1, 0])
    pool.free([1])
    pool.free([0])
    assert pool.allocate(4) == [2, 3, 1, 0]
    assert evicted == [2, 3, 1, 0]
    pool.check_integrity()


def test_a_shared_block_is_cached_only_after_its_last_holder_returns_it() -> None:
    pool, _ = cached_pool(2, 1)
    pool.share([0])
    pool.share([0])
    assert pool.num_holders(0) == 2
    pool.free([0])
    assert (pool.num_holders(0), pool.num_cached) == (1, 0)
    pool.free([0])
    assert (pool.num_holders(0), pool.num_cached) == (0, 1)
    pool.check_integrity()


def test_a_cached_block_that_is_shared_again_cannot_be_evicted() -> None:
    pool, evicted = cached_pool(2, 2)
    pool.share([0])
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [1]
    assert evicted == [1]


@pytest.mark.parametrize("block_ids", [[2], [0, 2], [9], [0, 9]])
def test_sharing_a_block_that_is_free_raises_and_shares_none(block_ids: list[int]) -> None:
    pool, _ = cached_pool(3, 2)
    with pytest.raises(RuntimeError, match="that are free"):
        pool.share(block_ids)
    assert pool.num_used == 0


def test_keeping_a_block_that_nobody_holds_raises() -> None:
    with pytest.raises(RuntimeError, match="block 0 is to be kept"):
        BlockPool(1).keep(0)


def test_growing_adds_free_blocks_and_moves_none() -> None:
    pool, _ = cached_pool(2, 1)
    pool.allocate(1)
    assert pool.plan_resize(5) == []
    pool.resize(5, [])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 1, 1)
    assert pool.allocate(3) == [2, 3, 4]
    pool.check_integrity()


def test_shrinking_moves_what_lies_above_into_what_is_free_below() -> None:
    pool = BlockPool(8)
    pool.allocate(8)
    pool.free([1, 3, 4, 6])
    moves = pool.plan_resize(4)
    assert moves == [(5, 1), (7, 3)]
    pool.resize(4, moves)
    assert (pool.num_blocks, pool.num_used, pool.num_free) == (4, 4, 0)
    assert [pool.num_holders(block_id) for block_id in range(4)] == [1, 1, 1, 1]
    pool.check_integrity()


@pytest.mark.parametrize(("num_blocks", "is_refused"), [(2, True), (3, False), (4, False)])
def test_a_pool_does_not_shrink_below_what_is_used(num_blocks: int, is_refused: bool) -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    pool.free([0, 1, 2])
    if is_refused:
        with pytest.raises(RuntimeError, match="3 blocks are used, so 2 cannot hold them"):
            pool.plan_resize(num_blocks)
        return
    pool.resize(num_blocks, pool.plan_resize(num_blocks))
    assert (pool.num_used, pool.num_free) == (3, num_blocks - 3)
    pool.check_integrity()


def test_shrinking_evicts_the_oldest_cached_blocks_and_keeps_the_order_of_the_others() -> None:
    pool, evicted = cached_pool(6, 6)
    moves = pool.plan_resize(3)
    assert evicted == [0, 1, 2]
    assert moves == [(3, 0), (4, 1), (5, 2)]
    pool.resize(3, moves)
    pool.check_integrity()
    assert pool.kept == {0, 1, 2}
    assert pool.allocate(3) == [0, 1, 2]


@settings(deadline=None)
@given(data=st.data(), num_blocks=st.integers(1, 12))
def test_any_order_of_taking_sharing_returning_and_resizing_keeps_the_pool_whole(
    data: st.DataObject, num_blocks: int
) -> None:
    kept: set[int] = set()
    pool = BlockPool(num_blocks, on_evict=kept.remove)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["take", "return", "keep", "share", "resize"]))
        if action == "take":
            num_wanted, num_available = data.draw(st.integers(0, 6)), pool.num_available
            block_ids = pool.allocate(num_wanted)
            assert (block_ids is None) == (num_wanted > num_available)
            held += [] if block_ids is None else [block_ids]
        elif action == "return" and held:
            pool.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "keep" and any(held):
            block_id = data.draw(st.sampled_from([b for block_ids in held for b in block_ids]))
            pool.keep(block_id)
            kept.add(block_id)
        elif action == "share" and kept:
            block_ids = [data.draw(st.sampled_from(sorted(kept)))]
            pool.share(block_ids)
            held.append(block_ids)
        elif action == "resize":
            count = data.draw(st.integers(max(1, pool.num_used), 14))
            moves = pool.plan_resize(count)
            pool.resize(count, moves)
            new_ids = dict(moves)
            held = [[new_ids.get(b, b) for b in block_ids] for block_ids in held]
            # in place, as the pool reports to this very set
            renamed = {new_ids.get(b, b) for b in kept}
            kept.clear()
            kept.update(renamed)
        pool.check_integrity()
        taken = Counter(block_id for block_ids in held for block_id in block_ids)
        assert pool.num_used == len(taken)
        assert all(pool.num_holders(block_id) == count for block_id, count in taken.items())
        assert pool.kept == kept
        assert all(0 <= block_id < pool.num_blocks for block_id in {*taken, *kept})
        assert pool.num_cached == len(kept.difference(taken))
