from __future__ import annotations

import pytest
from hypothesis import given
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
    pool._used.remove(1)
    with pytest.raises(RuntimeError, match="has 3 blocks but accounts for 2"):
        pool.check_integrity()


def test_integrity_check_finds_a_block_that_is_free_and_used() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.free([0, 1])
    pool._returned[0] = 2
    with pytest.raises(RuntimeError, match="knows of 2 different ones"):
        pool.check_integrity()


@given(num_blocks=st.integers(1, 12), actions=st.lists(st.integers(-6, 6), max_size=40))
def test_any_order_of_taking_and_returning_keeps_the_pool_whole(
    num_blocks: int, actions: list[int]
) -> None:
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []
    for action in actions:
        if action >= 0:
            num_free = pool.num_free
            block_ids = pool.allocate(action)
            assert (block_ids is None) == (action > num_free)
            if block_ids is not None:
                held.append(block_ids)
        elif held:
            pool.free(held.pop(action % len(held)))
        pool.check_integrity()
        taken = [block_id for block_ids in held for block_id in block_ids]
        assert len(set(taken)) == len(taken) == pool.num_used
        assert set(taken) <= set(range(num_blocks))
