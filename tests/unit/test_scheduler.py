from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fakes import make_limits
from reblock.engine.request import SamplingParams, Sequence
from reblock.engine.scheduler import DecodeWork, PrefillWork, Scheduler
from reblock.errors import BelowMinimum, RequestTooLarge


def make_sequence(
    num_prompt: int, max_new_tokens: int, request_id: int = 0, *, first_token: int | None = None
) -> Sequence:
    """A request whose prompt nobody else has, or begins with `first_token`."""
    first = 1000 * request_id if first_token is None else first_token
    return Sequence(
        request_id=request_id,
        prompt_ids=list(range(first, first + num_prompt)),
        params=SamplingParams(max_new_tokens=max_new_tokens),
    )


def advance(scheduler: Scheduler) -> PrefillWork | DecodeWork:
    """One step of a model that answers with the same token for ever."""
    work = scheduler.schedule()
    assert work is not None
    scheduler.check_integrity()
    scheduler.advance(work)
    if isinstance(work, DecodeWork):
        for sequence in work.sequences:
            sequence.token_ids.append(7)
    elif work.is_last:
        work.sequence.token_ids.append(7)
    scheduler.check_integrity()
    return work


def finish(scheduler: Scheduler, *sequences: Sequence) -> list[int]:
    """Run all to their end; return the ids of the requests in the order in which they end."""
    ended: list[int] = []
    for _ in range(10_000):
        if len(ended) == len(sequences):
            return ended
        advance(scheduler)
        for sequence in sequences:
            if sequence.request_id not in ended and sequence.finish_reason(frozenset()):
                scheduler.release(sequence)
                ended.append(sequence.request_id)
    raise AssertionError(f"only {ended} have ended")


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"max_seq_len": 0},
        {"max_batch": 0},
        {"prefill_chunk_size": 0},
        {"decoder_batch_sizes": ()},
        {"decoder_batch_sizes": (1,)},
        {"decoder_batch_sizes": (4, 2)},
        {"decoder_batch_sizes": (2, 0)},
    ],
)
def test_limits_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_limits(**changes)


@pytest.mark.parametrize(
    ("num_rows", "rows_of_decoder"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)]
)
def test_the_smallest_decoder_that_fits_is_chosen(num_rows: int, rows_of_decoder: int) -> None:
    limits = make_limits(max_batch=8, decoder_batch_sizes=(8, 4, 2, 1))
    assert limits.decoder_for(num_rows) == rows_of_decoder


@pytest.mark.parametrize(
    ("max_new_tokens", "is_accepted"),
    # 9 prompt tokens; 4 blocks of 4 tokens store 16, and the last token is not stored
    [(7, True), (8, True), (9, False)],
)
def test_a_request_is_accepted_up_to_the_last_token_of_the_last_block(
    max_new_tokens: int, is_accepted: bool
) -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_seq_len=64))
    sequence = make_sequence(9, max_new_tokens)
    if is_accepted:
        scheduler.add(sequence)
        finish(scheduler, sequence)
        return
    with pytest.raises(RequestTooLarge, match=r"takes 5 blocks of 4 tokens.*has 4") as caught:
        scheduler.add(sequence)
    assert (caught.value.num_tokens, caught.value.max_tokens) == (18, 17)
    assert "lower max_new_tokens to 8" in str(caught.value)
    assert "at least 5 blocks" in str(caught.value)
    assert not scheduler.has_work


@pytest.mark.parametrize(("num_blocks", "is_accepted"), [(2, False), (3, True), (4, True)])
def test_a_request_of_three_blocks_needs_a_pool_of_three(
    num_blocks: int, is_accepted: bool
) -> None:
    scheduler = Scheduler(make_limits(num_blocks=num_blocks))
    if is_accepted:
        scheduler.add(make_sequence(9, 4))
        assert scheduler.schedule() is not None
    else:
        with pytest.raises(RequestTooLarge):
            scheduler.add(make_sequence(9, 4))


@pytest.mark.parametrize(("num_prompt", "is_accepted"), [(11, True), (12, True), (13, False)])
def test_prompt_and_answer_together_stay_within_max_seq_len(
    num_prompt: int, is_accepted: bool
) -> None:
    scheduler = Scheduler(make_limits(max_seq_len=16))
    if is_accepted:
        scheduler.add(make_sequence(num_prompt, 4))
        assert scheduler.num_waiting == 1
        return
    with pytest.raises(RequestTooLarge, match=r"together 17.*max_seq_len of 16") as caught:
        scheduler.add(make_sequence(num_prompt, 4))
    assert (caught.value.num_tokens, caught.value.max_tokens) == (17, 16)
    assert "lower max_new_tokens to 3" in str(caught.value)


@pytest.mark.parametrize("changes", [{"max_seq_len": 8}, {"num_blocks": 2, "max_seq_len": 99}])
def test_a_prompt_that_is_too_long_by_itself_is_told_how_long_it_may_be(
    changes: dict[str, Any],
) -> None:
    limits = make_limits(**changes)
    longest = limits.max_request_tokens - 1
    with pytest.raises(RequestTooLarge, match=f"shorten the prompt to at most {longest} tokens"):
        Scheduler(limits).add(make_sequence(longest + 1, 1))
    Scheduler(limits).add(make_sequence(longest, 1))


def test_a_request_takes_the_blocks_of_its_prompt_and_others_as_its_tokens_come() -> None:
    scheduler = Scheduler(make_limits())
    sequence = make_sequence(3, 8)  # 10 stored tokens, in blocks of 4
    scheduler.add(sequence)
    held = []
    while len(sequence.token_ids) < 11:
        advance(scheduler)
        held.append((sequence.num_computed, len(sequence.block_table)))
    assert held == [(3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 2), (9, 3), (10, 3)]
    assert scheduler.num_free_blocks == 5


@pytest.mark.parametrize(
    ("num_blocks", "num_running"),
    # The first has two blocks by then and may need a third. The second needs one at once, and
    # one to spare for either.
    [(4, 1), (5, 2), (6, 2)],
)
def test_a_request_is_admitted_only_where_a_block_is_left_for_all_that_may_need_one(
    num_blocks: int, num_running: int
) -> None:
    scheduler = Scheduler(make_limits(num_blocks=num_blocks, prefill_chunk_size=4))
    add(scheduler, make_sequence(4, 9, 0), make_sequence(4, 9, 1))
    for _ in range(3):
        advance(scheduler)
    assert scheduler.num_running == num_running
    assert scheduler.num_waiting == 2 - num_running


def test_no_block_is_left_for_requests_that_need_no_more() -> None:
    scheduler = Scheduler(make_limits(num_blocks=2, prefill_chunk_size=4))
    add(scheduler, make_sequence(2, 3, 0), make_sequence(2, 3, 1))  # one block each, and no more
    for _ in range(3):
        advance(scheduler)
    assert scheduler.num_running == 2


def test_the_next_request_is_admitted_when_the_one_before_has_been_read() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=2))
    add(scheduler, make_sequence(5, 3, 0), make_sequence(1, 3, 1))
    for _ in range(3):
        advance(scheduler)
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    advance(scheduler)  # a decoding step, as it is its turn
    advance(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)


def test_a_request_waits_for_a_slot_though_blocks_are_free() -> None:
    scheduler = Scheduler(make_limits(max_batch=1))
    first, second = make_sequence(1, 2, 0), make_sequence(1, 2, 1)
    scheduler.add(first)
    scheduler.add(second)
    advance(scheduler)
    assert (first.slot, second.slot) == (0, None)
    scheduler.release(first)
    advance(scheduler)
    assert (first.slot, second.slot) == (None, 0)


def test_a_small_request_does_not_overtake_a_large_one_that_waits() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_batch=3, prefill_chunk_size=12))
    first, large, small = make_sequence(8, 1, 0), make_sequence(12, 1, 1), make_sequence(1, 1, 2)
    add(scheduler, first, large, small)
    advance(scheduler)
    assert scheduler.num_running == 1
    scheduler.release(first)
    assert finish(scheduler, large, small) == [1, 2]


def test_a_prompt_is_read_in_chunks_and_the_last_one_is_marked() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=3))
    scheduler.add(make_sequence(7, 2))
    works = [advance(scheduler) for _ in range(3)]
    chunks = [(w.start, w.token_ids, w.is_last) for w in works if isinstance(w, PrefillWork)]
    assert chunks == [(0, [0, 1, 2], False), (3, [3, 4, 5], False), (6, [6], True)]
    assert isinstance(advance(scheduler), DecodeWork)


@pytest.mark.parametrize("num_prompt", [3, 6])
def test_a_prompt_of_whole_chunks_has_no_empty_chunk(num_prompt: int) -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=3))
    scheduler.add(make_sequence(num_prompt, 2))
    works = [advance(scheduler) for _ in range(num_prompt // 3 + 1)]
    assert [type(work) for work in works[:-1]] == [PrefillWork] * (num_prompt // 3)
    assert isinstance(works[-1], DecodeWork)


def test_reading_a_long_prompt_and_decoding_take_turns() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=2))
    scheduler.add(make_sequence(1, 9, 0))
    advance(scheduler)
    scheduler.add(make_sequence(6, 2, 1))
    kinds = [type(advance(scheduler)) for _ in range(6)]
    assert kinds == [DecodeWork, PrefillWork, DecodeWork, PrefillWork, DecodeWork, PrefillWork]


def test_work_that_was_not_done_is_asked_for_again() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=2))
    scheduler.add(make_sequence(1, 9, 0))
    advance(scheduler)
    scheduler.add(make_sequence(6, 2, 1))
    for _ in range(6):
        assert scheduler.schedule() == scheduler.schedule()
        advance(scheduler)


@pytest.mark.parametrize("num_prompts", [1, 5])
def test_a_running_answer_waits_for_one_chunk_at_most_however_much_there_is_to_read(
    num_prompts: int,
) -> None:
    limits = make_limits(num_blocks=99, max_seq_len=99, max_batch=6, prefill_chunk_size=2)
    scheduler = Scheduler(limits)
    scheduler.add(make_sequence(1, 90, 0))
    advance(scheduler)
    add(scheduler, *(make_sequence(17, 1, number) for number in range(1, 1 + num_prompts)))
    works = [advance(scheduler) for _ in range(2 * 9 * num_prompts)]
    kinds = [type(work) for work in works]
    assert kinds == [DecodeWork, PrefillWork] * (9 * num_prompts)


def test_decoding_takes_all_requests_whose_prompt_is_read() -> None:
    limits = make_limits(max_batch=4, decoder_batch_sizes=(4, 2, 1))
    scheduler = Scheduler(limits)
    sequences = [make_sequence(1, 4, request_id) for request_id in range(3)]
    add(scheduler, *sequences)
    works = [advance(scheduler) for _ in range(6)]
    assert [work.sequences for work in works if isinstance(work, DecodeWork)] == [
        tuple(sequences[:number]) for number in (1, 2, 3)
    ]


def test_without_blocks_the_newest_request_is_preempted_and_is_the_next_to_be_admitted() -> None:
    scheduler = Scheduler(make_limits(num_blocks=5, max_seq_len=99, prefill_chunk_size=4))
    old, new, waiting = (make_sequence(4, 13, number) for number in range(3))
    add(scheduler, old, new, waiting)
    while not scheduler.num_preemptions:
        advance(scheduler)
    assert (old.slot is None, new.slot is None) == (False, True)
    assert (new.block_table, new.num_computed, new.prefix) == ([], 0, None)
    assert len(old.block_table) == 3
    assert finish(scheduler, old, new, waiting) == [0, 1, 2]


def test_a_preempted_request_reads_prompt_and_answer_from_where_the_cache_ends() -> None:
    scheduler = Scheduler(make_limits(num_blocks=5, max_seq_len=99, prefill_chunk_size=9))
    old, new = make_sequence(4, 13, 0), make_sequence(4, 13, 1)
    add(scheduler, old, new)
    while not scheduler.num_preemptions:
        advance(scheduler)
    token_ids = list(new.token_ids)
    assert new.num_output > 1
    scheduler.release(old)
    work = advance(scheduler)
    assert isinstance(work, PrefillWork)
    assert work.sequence is new
    assert work.start == scheduler.num_reused_tokens == 8
    assert work.token_ids == token_ids[8:]
    assert work.is_last


def test_where_layers_have_rings_nothing_is_shared_and_all_is_read_again() -> None:
    limits = make_limits(num_blocks=5, max_seq_len=99, prefill_chunk_size=9, has_rings=True)
    scheduler = Scheduler(limits)
    old, new = make_sequence(4, 13, 0), make_sequence(4, 13, 1, first_token=0)
    add(scheduler, old, new)
    while not scheduler.num_preemptions:
        advance(scheduler)
    token_ids = list(new.token_ids)
    scheduler.release(old)
    assert scheduler.num_free_blocks == 5
    work = advance(scheduler)
    assert isinstance(work, PrefillWork)
    assert (work.start, work.token_ids) == (0, token_ids)
    assert scheduler.num_reused_tokens == 0


def test_the_oldest_request_is_never_preempted() -> None:
    scheduler = Scheduler(make_limits(num_blocks=5, max_seq_len=99, max_batch=4))
    oldest, *others = [make_sequence(2, 16, number) for number in range(4)]
    add(scheduler, oldest, *others)
    while not oldest.finish_reason(frozenset()):
        advance(scheduler)
        assert oldest.slot is not None
    assert scheduler.num_preemptions > 0
    scheduler.release(oldest)
    assert finish(scheduler, *others) == [1, 2, 3]


def test_requests_preempted_together_come_back_in_the_order_in_which_they_came() -> None:
    scheduler = Scheduler(make_limits(num_blocks=12, max_seq_len=99, max_batch=3))
    sequences = [make_sequence(4, 9, number) for number in range(3)]
    add(scheduler, *sequences)
    while scheduler.num_running < 3:
        advance(scheduler)
    scheduler.resize(3, scheduler.plan_resize(3))
    assert list(scheduler._waiting) == sequences[1:]
    assert finish(scheduler, *sequences) == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_prompt", "start"),
    # The last token is always read, as there are no logits after it otherwise.
    [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)],
)
def test_full_blocks_of_a_known_beginning_are_not_read_again(num_prompt: int, start: int) -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=12))
    first = make_sequence(12, 1, 0)
    scheduler.add(first)
    advance(scheduler)
    scheduler.release(first)
    again = make_sequence(num_prompt, 2, 1, first_token=0)
    scheduler.add(again)
    work = advance(scheduler)
    assert isinstance(work, PrefillWork)
    assert (work.start, work.token_ids) == (start, list(range(start, num_prompt)))


def test_the_end_of_a_known_beginning_is_evicted_before_the_rest_of_it() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, prefill_chunk_size=12))
    first, other = make_sequence(12, 1, 0), make_sequence(7, 1, 1)  # 3 blocks, then 2
    add(scheduler, first, other)
    assert finish(scheduler, first, other) == [0, 1]
    again = make_sequence(12, 1, 2, first_token=0)
    scheduler.add(again)
    work = advance(scheduler)
    assert isinstance(work, PrefillWork)
    assert work.start == 8


def test_requests_of_one_prompt_share_its_blocks_while_they_run() -> None:
    scheduler = Scheduler(make_limits(max_batch=4, prefill_chunk_size=12))
    sequences = [make_sequence(9, 3, number, first_token=0) for number in range(4)]
    add(scheduler, *sequences)
    while scheduler.num_running < 4:
        advance(scheduler)
    assert {tuple(sequence.block_table[:2]) for sequence in sequences} == {(0, 1)}
    assert len({sequence.block_table[2] for sequence in sequences}) == 4
    assert scheduler.num_free_blocks == 8 - 2 - 4
    finish(scheduler, *sequences)


def test_a_request_needs_room_only_for_what_it_does_not_share() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, prefill_chunk_size=12))
    first, second = make_sequence(9, 3, 0), make_sequence(9, 3, 1, first_token=0)
    add(scheduler, first, second)
    while scheduler.num_running < 2:
        advance(scheduler)
    assert scheduler.num_free_blocks == 0


def test_a_refused_admission_leaves_shared_blocks_as_they_were() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_seq_len=99, prefill_chunk_size=12))
    first, second = make_sequence(9, 3, 0), make_sequence(16, 1, 1, first_token=0)
    add(scheduler, first, second)
    for _ in range(3):
        advance(scheduler)
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


@pytest.mark.parametrize(("num_blocks", "is_refused"), [(3, True), (4, False), (5, False)])
def test_a_cache_is_not_made_smaller_than_a_live_request_may_need(
    num_blocks: int, is_refused: bool
) -> None:
    scheduler = Scheduler(make_limits(max_batch=1))
    running, waiting = make_sequence(4, 3, 0), make_sequence(9, 5, 1)  # 13 tokens, 4 blocks
    add(scheduler, running, waiting)
    advance(scheduler)
    if is_refused:
        with pytest.raises(BelowMinimum, match=r"cannot have 3 blocks now: request 1") as caught:
            scheduler.plan_resize(num_blocks)
        assert (caught.value.num_blocks, caught.value.num_min_blocks) == (3, 4)
        assert "ask for at least 4" in str(caught.value)
        assert scheduler.limits.num_blocks == 8
    else:
        scheduler.resize(num_blocks, scheduler.plan_resize(num_blocks))
        assert scheduler.limits.num_blocks == num_blocks
    assert finish(scheduler, running, waiting) == [0, 1]


def test_a_smaller_cache_moves_blocks_and_preempts_nobody_where_there_is_room() -> None:
    scheduler = Scheduler(make_limits(num_blocks=9, prefill_chunk_size=12, max_batch=3))
    sequences = [make_sequence(6, 6, number) for number in range(3)]
    add(scheduler, *sequences)
    while scheduler.num_running < 3:
        advance(scheduler)
    scheduler.release(sequences[0])
    before = [list(sequence.block_table) for sequence in sequences[1:]]
    num_used = len({block_id for table in before for block_id in table})
    moves = scheduler.plan_resize(num_used)
    scheduler.resize(num_used, moves)
    scheduler.check_integrity()
    assert moves
    assert scheduler.num_preemptions == 0
    new_ids = dict(moves)
    assert [sequence.block_table for sequence in sequences[1:]] == [
        [new_ids.get(block_id, block_id) for block_id in table] for table in before
    ]
    assert (scheduler.num_free_blocks, scheduler.num_cached_blocks) == (0, 0)


def test_what_a_cache_holds_of_former_requests_is_moved_too_where_there_is_room() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=12))
    first, second = make_sequence(12, 1, 0), make_sequence(8, 1, 1)
    add(scheduler, first, second)
    assert finish(scheduler, first, second) == [0, 1]
    assert scheduler.num_cached_blocks == 5
    scheduler.resize(4, scheduler.plan_resize(4))
    assert scheduler.num_cached_blocks == 4
    again = make_sequence(8, 1, 2, first_token=1000)
    scheduler.add(again)
    work = advance(scheduler)
    assert isinstance(work, PrefillWork)
    assert work.start == 4


def test_a_larger_cache_lets_in_requests_that_were_too_large_before() -> None:
    scheduler = Scheduler(make_limits(num_blocks=2, max_seq_len=99))
    with pytest.raises(RequestTooLarge):
        scheduler.add(make_sequence(9, 3))
    scheduler.resize(3, scheduler.plan_resize(3))
    sequence = make_sequence(9, 3)
    scheduler.add(sequence)
    assert finish(scheduler, sequence) == [0]


def test_releasing_a_waiting_request_takes_it_out_of_the_queue() -> None:
    scheduler = Scheduler(make_limits())
    sequence = make_sequence(1, 1)
    scheduler.add(sequence)
    scheduler.release(sequence)
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def test_releasing_a_running_request_frees_its_blocks_and_its_slot() -> None:
    scheduler = Scheduler(make_limits())
    sequence = make_sequence(4, 4)
    scheduler.add(sequence)
    advance(scheduler)
    scheduler.release(sequence)
    scheduler.check_integrity()
    assert (scheduler.num_free_blocks, scheduler.num_cached_blocks) == (8, 0)
    assert (sequence.block_table, sequence.slot) == ([], None)


def test_releasing_a_request_twice_raises() -> None:
    scheduler = Scheduler(make_limits())
    sequence = make_sequence(4, 4)
    scheduler.add(sequence)
    scheduler.release(sequence)
    with pytest.raises(RuntimeError, match="request 0 is not with the scheduler"):
        scheduler.release(sequence)


def test_integrity_check_finds_a_block_held_twice() -> None:
    scheduler = Scheduler(make_limits())
    sequence = make_sequence(4, 4)
    scheduler.add(sequence)
    advance(scheduler)
    sequence.block_table.append(sequence.block_table[0])
    with pytest.raises(RuntimeError, match="hold 2 blocks, 1 different ones"):
        scheduler.check_integrity()


def test_integrity_check_finds_a_block_that_is_written_while_others_may_read_it() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=12))
    sequence = make_sequence(6, 4)
    scheduler.add(sequence)
    advance(scheduler)
    sequence.num_computed -= 4
    with pytest.raises(RuntimeError, match="request 0 would write blocks"):
        scheduler.check_integrity()


def test_integrity_check_finds_a_kept_block_that_nobody_could_find() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk_size=12))
    sequence = make_sequence(6, 4)
    scheduler.add(sequence)
    advance(scheduler)
    scheduler._tables._prefixes.forget(sequence.block_table[0])
    with pytest.raises(RuntimeError, match=r"prefix cache knows blocks \[\] but the pool keeps"):
        scheduler.check_integrity()


def test_integrity_check_finds_a_lost_slot() -> None:
    scheduler = Scheduler(make_limits())
    scheduler._free_slots.pop()
    with pytest.raises(RuntimeError, match=r"slots 0 to 1 have become \[1\]"):
        scheduler.check_integrity()


def test_a_broken_pool_is_reported_instead_of_waiting_for_ever() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence(1, 1))
    scheduler._free_slots.clear()
    with pytest.raises(RuntimeError, match="request 0 was not admitted"):
        scheduler.schedule()


def test_a_request_that_runs_alone_and_finds_no_block_is_reported() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, prefill_chunk_size=4))
    scheduler.add(make_sequence(4, 4))
    advance(scheduler)
    scheduler._tables.pool.allocate(3)  # lost
    with pytest.raises(RuntimeError, match="runs alone and finds no block"):
        scheduler.schedule()


def test_work_cannot_be_changed_by_the_engine() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence(1, 1))
    work = scheduler.schedule()
    assert isinstance(work, PrefillWork)
    with pytest.raises(dataclasses.FrozenInstanceError):
        work.start = 1  # type: ignore[misc]
