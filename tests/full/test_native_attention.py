"""Attention on a cache is the softmax that it stands for, and writes the new tokens alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from native_checks import ATTENTIONS, CHUNK, Attention, check_attention, make_tensors, run

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("native_operators")]


@pytest.mark.parametrize("case", ATTENTIONS, ids=range(len(ATTENTIONS)))
def test_attention_is_the_softmax_in_float64(case: Attention) -> None:
    check_attention(case)


@pytest.mark.parametrize("case", [Attention(), CHUNK])
def test_padding_gives_zeros_and_reads_no_block(case: Attention) -> None:
    case = replace(case, num_rows=1)
    tensors = make_tensors(case)
    tensors.where[1:] = -1
    tensors.query[1:] = float("nan")
    out = run(case, tensors)
    assert (out[1:] == 0).all()
    assert (out[0, case.num_tokens[0] :] == 0).all()
    assert (out[0, : case.num_tokens[0]] != 0).any()


def test_a_row_answers_the_same_whatever_else_is_in_the_batch() -> None:
    case = Attention(start=(700, 3, 1500), length=64)
    tensors = make_tensors(case)
    together = run(case, tensors)
    alone = run(replace(case, num_rows=1), tensors)
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("case", [Attention(start=(700, 3, 1500), length=64), CHUNK])
def test_attention_answers_the_same_with_any_number_of_threads(
    case: Attention, num_threads: int
) -> None:
    before = torch.get_num_threads()
    expected = run(case, make_tensors(case))
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(run(case, make_tensors(case)), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", [Attention(), CHUNK])
def test_scores_far_apart_overflow_nowhere(case: Attention) -> None:
    tensors = make_tensors(case)
    tensors.query *= 1e4
    out = run(case, tensors)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 0}, "0 real rows of 3"),
        ({"num_rows": 4}, "4 real rows of 3"),
        ({"num_tokens": (1, 0, 1)}, "row 1 has 0 of 1 tokens"),
        ({"num_tokens": (2, 1, 1)}, "row 0 has 2 of 1 tokens"),
        ({"start": (0, -1, 300)}, "row 1 has"),
        # The next four positions, or their number of blocks, are no integers of 64 bits.
        ({"start": (0, 2**63 - 1, 300)}, "row 1 starts at 9223372036854775807, past"),
        ({"start": (0, 37, 2**63 - 4)}, "row 2 starts at 9223372036854775804, past"),
    ],
)
def test_places_that_cannot_be_are_refused(
    change: dict[str, object], message: str, is_ring: bool
) -> None:
    case = Attention(is_ring=is_ring)
    tensors = make_tensors(case)
    with pytest.raises(RuntimeError, match=message):
        run(replace(case, **change), tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("place", [-1, 10**6])
def test_a_block_or_ring_that_is_not_there_is_refused(place: int, is_ring: bool) -> None:
    case = Attention(is_ring=is_ring)
    tensors = make_tensors(case)
    tensors.where[2] = place
    with pytest.raises(RuntimeError, match=f"there is no place {place}"):
        run(case, tensors)


def test_a_sequence_past_the_end_of_its_table_is_refused() -> None:
    case = Attention()
    tensors = make_tensors(case)
    with pytest.raises(RuntimeError, match="row 2 needs 21 blocks of 19"):
        run(replace(case, start=(0, 37, 320)), tensors)


def test_a_cache_of_another_head_size_is_refused() -> None:
    tensors = make_tensors(Attention())
    tensors.key_cache = tensors.key_cache[..., :32].contiguous()
    with pytest.raises(RuntimeError, match="not one of such keys"):
        run(Attention(), tensors)


def test_a_start_that_no_table_reaches_is_refused() -> None:
    case = Attention()
    tensors = make_tensors(case)
    with pytest.raises(RuntimeError, match=f"row 2 needs {2**58} blocks of 19"):
        run(replace(case, start=(0, 37, 2**62 - 1)), tensors)


@pytest.mark.parametrize("is_ring", [False, True])
def test_no_heads_of_keys_and_blocks_without_positions_are_refused(is_ring: bool) -> None:
    case = Attention(is_ring=is_ring)
    tensors = make_tensors(case)
    headless = replace(
        tensors,
        key=tensors.key[:, :0],
        value=tensors.value[:, :0],
        key_cache=tensors.key_cache[:, :0].contiguous(),
        value_cache=tensors.value_cache[:, :0].contiguous(),
    )
    with pytest.raises(RuntimeError, match="0 heads of keys and 16 positions"):
        run(case, headless)
    empty = replace(
        tensors,
        key_cache=tensors.key_cache[:, :, :0].contiguous(),
        value_cache=tensors.value_cache[:, :, :0].contiguous(),
    )
    with pytest.raises(RuntimeError, match="2 heads of keys and 0 positions"):
        run(case, empty)


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("case", [Attention(), CHUNK])
def test_a_query_without_heads_only_stores_the_new_tokens(case: Attention, is_ring: bool) -> None:
    case = replace(case, is_ring=is_ring)
    expected, tensors = make_tensors(case), make_tensors(case)
    run(case, expected)
    tensors.query = tensors.key[:, :0]
    assert run(case, tensors).numel() == 0
    assert torch.equal(tensors.key_cache, expected.key_cache)
    assert torch.equal(tensors.value_cache, expected.value_cache)
