from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fakes import make_limits
from reblock.engine.request import SamplingParams, Sequence
from reblock.engine.scheduler import DecodeWork, PrefillWork, Scheduler
from reblock.errors import RequestTooLarge


def make_sequence(num_prompt: int, max_new_tokens: int, request_id: int = 0) -> Sequence:
    return Sequence(
        request_id=request_id,
        prompt_ids=list(range(num_prompt)),
        params=SamplingParams(max_new_tokens=max_new_tokens),
    )


def advance(scheduler: Scheduler) -> PrefillWork | DecodeWork:
    """One step of a model that never ends a request."""
    work = scheduler.schedule()
    assert work is not None
    if isinstance(work, PrefillWork):
        work.sequence.num_computed += len(work.token_ids)
    else:
        for sequence in work.sequences:
            sequence.num_computed += 1
    scheduler.check_integrity()
    return work


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
        assert isinstance(scheduler.schedule(), PrefillWork)
        assert len(sequence.block_table) == 4
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


def test_all_blocks_of_a_request_are_reserved_when_it_is_admitted() -> None:
    scheduler = Scheduler(make_limits())
    sequence = make_sequence(3, 8)  # 10 stored tokens
    scheduler.add(sequence)
    scheduler.schedule()
    assert len(sequence.block_table) == 3
    assert scheduler.num_free_blocks == 5


@pytest.mark.parametrize(("num_blocks", "num_running"), [(3, 1), (4, 2), (5, 2)])
def test_a_request_waits_until_its_blocks_are_free(num_blocks: int, num_running: int) -> None:
    scheduler = Scheduler(make_limits(num_blocks=num_blocks))
    for request_id in range(2):
        scheduler.add(make_sequence(4, 5, request_id))  # 2 blocks each
    advance(scheduler)
    assert scheduler.num_running == num_running
    assert scheduler.num_waiting == 2 - num_running


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
    scheduler = Scheduler(make_limits(num_blocks=4, max_batch=3))
    first, large, small = make_sequence(8, 1, 0), make_sequence(12, 1, 1), make_sequence(1, 1, 2)
    for sequence in (first, large, small):
        scheduler.add(sequence)
    advance(scheduler)
    assert scheduler.num_running == 1
    scheduler.release(first)
    advance(scheduler)
    assert large.slot is not None
    assert small.slot is not None


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


def test_decoding_takes_all_requests_whose_prompt_is_read() -> None:
    limits = make_limits(max_batch=4, decoder_batch_sizes=(4, 2, 1))
    scheduler = Scheduler(limits)
    sequences = [make_sequence(1, 4, request_id) for request_id in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    works = [advance(scheduler) for _ in range(6)]
    last = works[-1]
    assert isinstance(last, DecodeWork)
    assert list(last.sequences) == sequences


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
    assert scheduler.num_free_blocks == 8
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
    with pytest.raises(RuntimeError, match="hold 3 blocks, 2 different ones"):
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


def test_work_cannot_be_changed_by_the_engine() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_sequence(1, 1))
    work = scheduler.schedule()
    assert isinstance(work, PrefillWork)
    with pytest.raises(dataclasses.FrozenInstanceError):
        work.start = 1  # type: ignore[misc]
