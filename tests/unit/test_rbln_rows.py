from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeRunner, continue_alone, make_limits
from reblock.engine.block_pool import BlockPool
from reblock.errors import RequestTooLarge
from reblock.rbln.rows import Rows


def start(num_tokens: list[int], **changes: Any) -> tuple[Rows, FakeRunner, BlockPool]:
    runner = FakeRunner(make_limits(**changes))
    pool = BlockPool(runner.limits.num_blocks)
    return Rows(runner, pool, num_tokens), runner, pool


def best(logits: Any) -> int:
    return max(range(len(logits)), key=logits.__getitem__)


def test_rows_of_different_lengths_answer_as_each_would_alone() -> None:
    prompts, new = [[1, 2, 3, 4, 5, 6, 7], [9]], 6
    rows, runner, pool = start([len(prompt) + new for prompt in prompts])
    assert len(rows) == 2
    assert not rows.has_started
    tokens = [best(logits) for logits in rows.prefill(prompts)]
    assert rows.has_started
    answers = [[token] for token in tokens]
    for _ in range(new - 1):
        tokens = [best(logits) for logits in rows.decode(tokens)]
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    assert answers == [continue_alone(prompt, new) for prompt in prompts]
    assert [call for call in runner.calls if call[0] == "prefill"] == [
        ("prefill", 0),
        ("prefill", 3),
        ("prefill", 6),
        ("prefill", 0),
    ]
    rows.release()
    assert pool.num_used == 0
    pool.check_integrity()


def test_blocks_are_taken_for_all_but_the_last_token_and_given_back_once() -> None:
    rows, _, pool = start([9, 10])  # blocks of 4: 8 tokens are read of the first, 9 of the other
    assert pool.num_used == 2 + 3
    rows.release()
    rows.release()
    assert pool.num_used == 0


def test_a_whole_cache_and_a_whole_sequence_are_accepted() -> None:
    _, _, pool = start([16, 16], num_blocks=8)
    assert pool.num_free == 0


@pytest.mark.parametrize(
    ("num_tokens", "fragments", "numbers"),
    [
        ([2, 2, 2], ["3 sequences", "batch_size=2"], (6, 32)),
        ([17], ["17 tokens", "max_seq_len=16"], (17, 16)),
        ([16, 16], ["need 8 blocks of 4", "kvcache_num_blocks=7", "reblock set DIR 8"], (32, 28)),
    ],
)
def test_what_has_no_room_is_refused_with_the_numbers_and_takes_nothing(
    num_tokens: list[int], fragments: list[str], numbers: tuple[int, int]
) -> None:
    runner = FakeRunner(make_limits(num_blocks=7))
    pool = BlockPool(7)
    with pytest.raises(RequestTooLarge) as caught:
        Rows(runner, pool, num_tokens)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert (caught.value.num_tokens, caught.value.max_tokens) == numbers
    assert pool.num_used == 0
    assert runner.calls == []
