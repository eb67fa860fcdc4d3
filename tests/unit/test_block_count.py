from __future__ import annotations

import pytest

from reblock.block_count import MAX_NUM_BLOCKS, parse_block_count
from reblock.errors import InvalidBlockCount


@pytest.mark.parametrize(
    ("value", "count"),
    [(1, 1), ("1", 1), ("007", 7), (128, 128), (str(MAX_NUM_BLOCKS), MAX_NUM_BLOCKS)],
)
def test_parse_block_count_reads_whole_numbers(value: object, count: int) -> None:
    assert parse_block_count(value) == count


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        "0",
        "-1",
        "+1",
        "",
        " 1",
        "1.0",
        1.0,
        "1e3",
        "1_0",
        True,
        None,
        "\N{ARABIC-INDIC DIGIT THREE}",
        "\N{SUPERSCRIPT TWO}",
        MAX_NUM_BLOCKS + 1,
        str(MAX_NUM_BLOCKS + 1),
        "9" * 64,
        "9" * 5000,
        pytest.param(10**5000, id="huge"),
    ],
)
def test_parse_block_count_refuses_everything_else(value: object) -> None:
    with pytest.raises(InvalidBlockCount, match="must be a whole number from 1 to") as caught:
        parse_block_count(value)
    assert caught.value.num_blocks is value
