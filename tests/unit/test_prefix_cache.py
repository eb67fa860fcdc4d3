from __future__ import annotations

import gc
import weakref

import pytest

from reblock.engine.prefix_cache import Prefix, PrefixCache

# Python gives both the same hash.
TWINS = (0, 2**61 - 1)


def store(cache: PrefixCache, token_ids: list[int], block_ids: list[int]) -> list[Prefix]:
    """Put full blocks of two tokens into a cache, as a request that fills them does."""
    prefixes = [cache.root]
    for index, block_id in enumerate(block_ids):
        prefixes.append(cache.follow(prefixes[-1], token_ids[2 * index : 2 * index + 2]))
        cache.put(prefixes[-1], block_id)
    cache.check_integrity()
    return prefixes[1:]


def found(cache: PrefixCache, token_ids: list[int], max_tokens: int | None = None) -> list[int]:
    limit = len(token_ids) if max_tokens is None else max_tokens
    return [p.block_id for p in cache.match(token_ids, limit) if p.block_id is not None]


def test_the_longest_known_beginning_is_found_in_order() -> None:
    cache = PrefixCache(2)
    store(cache, [1, 2, 3, 4, 5, 6], [7, 3, 9])
    assert found(cache, [1, 2, 3, 4, 5, 6, 8]) == [7, 3, 9]
    assert found(cache, [1, 2, 3, 4, 6, 6]) == [7, 3]
    assert found(cache, [3, 4]) == []
    assert found(cache, [1]) == []


@pytest.mark.parametrize(("max_tokens", "num_found"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_no_more_than_the_tokens_asked_for_are_matched(max_tokens: int, num_found: int) -> None:
    cache = PrefixCache(2)
    store(cache, [1, 2, 3, 4], [0, 1])
    assert len(found(cache, [1, 2, 3, 4], max_tokens)) == num_found


def test_the_same_tokens_behind_other_tokens_are_another_block() -> None:
    cache = PrefixCache(2)
    store(cache, [1, 2, 5, 5], [0, 1])
    store(cache, [3, 4, 5, 5], [2, 3])
    assert found(cache, [1, 2, 5, 5]) == [0, 1]
    assert found(cache, [3, 4, 5, 5]) == [2, 3]
    assert found(cache, [5, 5]) == []


def test_contents_of_one_hash_are_told_apart() -> None:
    assert hash(TWINS[0]) == hash(TWINS[1])
    assert hash((TWINS[0], 1)) == hash((TWINS[1], 1))
    cache = PrefixCache(2)
    store(cache, [TWINS[0], 1], [5])
    assert found(cache, [TWINS[1], 1]) == []
    store(cache, [TWINS[1], 1], [6])
    assert found(cache, [TWINS[0], 1]) == [5]
    assert found(cache, [TWINS[1], 1]) == [6]


def test_the_first_block_of_a_content_stays_the_one_that_is_found() -> None:
    cache = PrefixCache(2)
    (prefix,) = store(cache, [1, 2], [4])
    assert not cache.put(prefix, 5)
    assert found(cache, [1, 2]) == [4]
    assert cache.block_ids == {4}


def test_a_forgotten_block_ends_what_is_found_until_it_is_computed_again() -> None:
    cache = PrefixCache(2)
    held = store(cache, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    cache.forget(1)
    assert found(cache, [1, 2, 3, 4, 5, 6]) == [0]
    assert cache.block_ids == {0, 2}
    cache.check_integrity()
    del held
    # The third block has kept the way to it.
    store(cache, [1, 2, 3, 4], [0, 8])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == [0, 8, 2]


def test_moved_blocks_are_found_where_they_are() -> None:
    cache = PrefixCache(2)
    store(cache, [1, 2, 3, 4], [5, 6])
    cache.rename([(6, 0), (9, 1)])
    assert found(cache, [1, 2, 3, 4]) == [5, 0]
    assert cache.block_ids == {0, 5}
    cache.check_integrity()


def test_what_nothing_needs_any_more_is_given_up() -> None:
    cache = PrefixCache(2)
    held = store(cache, [1, 2, 3, 4], [0, 1])
    nodes = [weakref.ref(prefix) for prefix in held]
    del held
    gc.collect()
    cache.forget(0)
    assert [node() is None for node in nodes] == [False, False], "the second is behind the first"
    cache.forget(1)
    gc.collect()
    assert [node() is None for node in nodes] == [True, True]
    assert len(cache.root.children) == 0


def test_a_very_long_chain_is_given_up_at_once() -> None:
    cache = PrefixCache(1)
    prefix = cache.root
    for token_id in range(100_000):
        prefix = cache.follow(prefix, [token_id])
    cache.put(prefix, 0)
    del prefix
    cache.forget(0)
    assert len(cache.root.children) == 0


def test_integrity_check_finds_a_block_that_is_known_as_another_one() -> None:
    cache = PrefixCache(2)
    (prefix,) = store(cache, [1, 2], [4])
    prefix.block_id = 5
    with pytest.raises(RuntimeError, match="block 4 is in the prefix cache as block 5, found"):
        cache.check_integrity()


def test_integrity_check_finds_a_block_that_no_request_could_find() -> None:
    cache = PrefixCache(2)
    store(cache, [1, 2], [4])
    cache.root.children.clear()
    with pytest.raises(RuntimeError, match="as block 4, lost"):
        cache.check_integrity()
