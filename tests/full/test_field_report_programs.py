"""What users of comparable systems reported of compiled programs, on a real artifact.

Every test names the report that it is of; docs/field-reports.md lists them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from installed import generate, reblock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

# The model knows no digits, so each of them is a token. Its windows are of 64 tokens, a sequence
# has 2,048 at most, and that is 16 blocks of the 17 that are the fewest.
NUM_MIN_BLOCKS = 17


@pytest.fixture
def smallest(artifact: Path) -> Path:
    result = reblock("set", artifact, NUM_MIN_BLOCKS)
    assert result.returncode == 0, result.stderr
    return artifact


def test_a_prompt_longer_than_the_window_is_served_in_full(smallest: Path) -> None:
    # Report 45: caches of all layers were as long as the window, and 750 tokens failed.
    report = generate(smallest, ["7" * 750], "--raw", "--max-new-tokens", 8)
    (result,) = report["results"]
    assert result["num_prompt_tokens"] == 750
    assert len(result["token_ids"]) == 8


def test_requests_of_the_greatest_length_take_turns_on_the_smallest_cache_and_all_end(
    smallest: Path,
) -> None:
    # Reports 17, 19 and 22: requests that filled the pool to its last block waited for ever.
    prompts = [digit * 2_040 for digit in "123"]
    report = generate(smallest, prompts, "--raw", "--max-new-tokens", 8)
    assert report["kvcache_num_blocks"] == NUM_MIN_BLOCKS
    assert report["most_running"] == 1
    for result in report["results"]:
        assert result["num_prompt_tokens"] + len(result["token_ids"]) == 2_048
        assert result["finish_reason"] == "length"


def test_short_requests_share_the_smallest_cache_side_by_side(smallest: Path) -> None:
    # Report 29: a minimum of the batch times the full length would have forced a batch of 1.
    report = generate(smallest, ["1", "2", "3", "4"], "--raw", "--max-new-tokens", 100)
    assert report["most_running"] == 4
    assert [len(result["token_ids"]) for result in report["results"]] == [100] * 4
