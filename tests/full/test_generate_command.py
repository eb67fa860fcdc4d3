"""`reblock generate` on a real artifact: who is served, what is printed, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from installed import generate, reblock, refused

if TYPE_CHECKING:
    from installed import Compiled

pytestmark = pytest.mark.full

PROMPT = "The cache holds the keys"
SAMPLING = ("--max-new-tokens", 24, "--temperature", 1.5, "--top-k", 100, "--top-p", 0.95)


def test_prompts_beyond_the_batch_wait_and_all_finish_with_their_own_answers(
    compiled: Compiled,
) -> None:
    prompts = [f"{number} {PROMPT}" for number in range(7)]
    prompts[3] *= 20  # longer than a chunk
    report = generate(compiled.artifact, prompts, "--max-new-tokens", 16)
    assert report["most_running"] == 4
    assert [result["prompt"] for result in report["results"]] == prompts
    assert report["num_new_tokens"] == 16 * 7
    assert report["results"][3]["num_prompt_tokens"] > 128
    for result in report["results"]:
        assert len(result["token_ids"]) == 16
        assert result["finish_reason"] == "length"
    # In other company and in another slot, a prompt has the same answer.
    again = generate(compiled.artifact, [prompts[6], prompts[3]], "--max-new-tokens", 16)
    assert again["most_running"] == 2
    assert again["results"] == [report["results"][6], report["results"][3]]
    assert report["kvcache_num_blocks"] == 64
    assert report["kvcache_block_size"] == 128


def test_one_prompt_streams_the_text_that_is_printed_whole_otherwise(compiled: Compiled) -> None:
    arguments = ("generate", compiled.artifact, "--prompt", PROMPT, "--max-new-tokens", 20)
    streamed, whole = reblock(*arguments), reblock(*arguments, "--no-stream")
    assert (streamed.returncode, whole.returncode) == (0, 0), streamed.stderr
    assert streamed.stdout == whole.stdout
    assert streamed.stdout.endswith("\n")
    assert len(streamed.stdout) > 10
    for talk in (streamed.stderr, whole.stderr):
        assert talk.startswith("20 tokens in ")
        assert "64 blocks of 128 tokens" in talk


def test_several_prompts_are_printed_in_order_under_their_headings(compiled: Compiled) -> None:
    prompts = ("--prompt", "first", "--prompt", "second")
    result = reblock("generate", compiled.artifact, *prompts, "--max-new-tokens", 4)
    assert result.returncode == 0, result.stderr
    headings = [line for line in result.stdout.splitlines() if line.startswith("--- ")]
    assert headings == ["--- 1 of 2: first", "--- 2 of 2: second"]


def test_sampling_with_a_seed_is_repeatable_and_without_it_varies_with_the_seed(
    compiled: Compiled,
) -> None:
    once = generate(compiled.artifact, [PROMPT, PROMPT], *SAMPLING, "--seed", 7)
    again = generate(compiled.artifact, [PROMPT], *SAMPLING, "--seed", 7)
    other = generate(compiled.artifact, [PROMPT], *SAMPLING, "--seed", 8)
    seven = once["results"][0]["token_ids"]
    # Every request draws for itself: what runs beside it changes nothing.
    assert once["results"][1]["token_ids"] == seven
    assert again["results"][0]["token_ids"] == seven
    assert other["results"][0]["token_ids"] != seven


def test_the_chat_template_is_used_unless_the_prompt_is_raw(compiled: Compiled) -> None:
    chat = generate(compiled.artifact, [PROMPT], "--max-new-tokens", 8)["results"][0]
    raw = generate(compiled.artifact, [PROMPT], "--max-new-tokens", 8, "--raw")["results"][0]
    # <user> before it and <model> behind it are one token each.
    assert chat["num_prompt_tokens"] == raw["num_prompt_tokens"] + 2
    assert chat["token_ids"] != raw["token_ids"]


def test_a_request_that_never_fits_is_refused_with_the_numbers_before_any_answer(
    compiled: Compiled,
) -> None:
    prompts = ("--prompt", "short", "--prompt", PROMPT)
    result = reblock("generate", compiled.artifact, *prompts, "--max-new-tokens", 5000)
    refused(result, 3, "5,000", "2,048")


def test_a_prompt_longer_than_a_sequence_is_refused_with_the_numbers(compiled: Compiled) -> None:
    result = reblock("generate", compiled.artifact, "--prompt", "7" * 3000, "--raw")
    refused(result, 3, "3,000", "2,048")
