from __future__ import annotations

import math
from typing import Any

import pytest

from reblock.engine.request import SamplingParams, Sequence, parse_token_ids
from reblock.errors import InvalidOption, UsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 1),
        ("max_new_tokens", 2**31 - 1),
        ("ignore_eos", True),
        ("temperature", 0),
        ("temperature", 1e-5),
        ("temperature", 2),
        ("top_k", 1),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("stop", ()),
        ("stop", ("a", "\n\n")),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
)
def test_values_in_range_are_accepted(name: str, value: Any) -> None:
    params = SamplingParams(**{"max_new_tokens": 5, name: value})
    assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", None),
        ("max_new_tokens", 2**31),
        ("temperature", -0.1),
        ("temperature", 1e-6),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("repetition_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", "a"),
        ("stop", ["a"]),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("ignore_eos", None),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=name) as caught:
        SamplingParams(**{"max_new_tokens": 5, name: value})
    assert caught.value.option == name
    assert str(caught.value).endswith(f"not {value!r}")


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), pytest.param(10**5000, id="huge"), pytest.param(-(10**5000), id="-huge")],
)
@pytest.mark.parametrize(
    "name",
    ["max_new_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed", "logprobs"],
)
def test_numbers_of_hundreds_of_digits_are_refused_in_a_short_message(
    name: str, value: int
) -> None:
    with pytest.raises(InvalidOption, match=f"{name} must be") as caught:
        SamplingParams(**{"max_new_tokens": 5, name: value})
    assert len(str(caught.value)) < 160


def test_a_stop_string_that_is_no_text_is_refused_though_it_cannot_be_printed() -> None:
    stop: Any = (10**5000,)
    with pytest.raises(InvalidOption, match="stop must be"):
        SamplingParams(max_new_tokens=1, stop=stop)


class Whole:
    """A whole number of another kind, as those of arrays and tensors are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Array:
    """Hands out whole numbers of its own kind one by one, and plain ones all at once."""

    def tolist(self) -> list[int]:
        return [3, 0, 9]


@pytest.mark.parametrize(
    "prompt_ids", [[3, 0, 9], (3, 0, 9), iter([3, 0, 9]), list(map(Whole, (3, 0, 9))), Array()]
)
def test_token_ids_of_any_kind_become_plain_numbers(prompt_ids: Any) -> None:
    token_ids = parse_token_ids(prompt_ids, 10)
    assert token_ids == [3, 0, 9]
    assert {type(token_id) for token_id in token_ids} == {int}


@pytest.mark.parametrize("token_id", [10, -1, 2**63, -(2**63), pytest.param(10**5000, id="huge")])
def test_a_token_that_the_model_does_not_know_is_refused(token_id: int) -> None:
    with pytest.raises(UsageError, match="the model knows those from 0 to 9;") as caught:
        parse_token_ids([1, token_id, 2], 10)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize(
    ("prompt_ids", "named"),
    [
        (None, "None"),
        (5, "5"),
        ("abc", "'a'"),
        ([1, "7"], "'7'"),
        ([1.0], "1.0"),
        ([math.nan], "nan"),
        ([None], "None"),
        ([True], "True"),
        ([[1]], "[1]"),
    ],
)
def test_what_is_no_token_id_is_refused_by_name(prompt_ids: Any, named: str) -> None:
    with pytest.raises(UsageError, match="token ids") as caught:
        parse_token_ids(prompt_ids, 10)
    assert str(caught.value).endswith(f"not {named}")


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [(None, 3, None), (7, 0, 7), (7, 3, 10), (2**63 - 1, 0, 2**63 - 1), (2**63 - 1, 2, 1)],
)
def test_the_seeds_of_several_answers_count_on_from_the_first(
    seed: int | None, index: int, expected: int | None
) -> None:
    params = SamplingParams(max_new_tokens=5, seed=seed, temperature=1.5)
    assert params.for_answer(index) == SamplingParams(
        max_new_tokens=5, seed=expected, temperature=1.5
    )


def _sequence(num_prompt: int, max_new_tokens: int, *, ignore_eos: bool = False) -> Sequence:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    return Sequence(request_id=0, prompt_ids=list(range(num_prompt)), params=params)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        _sequence(0, 1)


@pytest.mark.parametrize(("num_prompt", "num_new", "num_stored"), [(1, 1, 1), (4, 1, 4), (4, 3, 6)])
def test_the_last_token_is_not_stored(num_prompt: int, num_new: int, num_stored: int) -> None:
    assert _sequence(num_prompt, num_new).num_stored_tokens == num_stored


def test_a_sequence_is_prefilled_when_all_that_it_has_to_read_is_computed() -> None:
    sequence = _sequence(3, 1)
    sequence.num_to_read = 3
    sequence.num_computed = 2
    assert not sequence.is_prefilled
    sequence.num_computed = 3
    assert sequence.is_prefilled


def test_a_waiting_sequence_has_no_running_slot() -> None:
    with pytest.raises(RuntimeError, match="has no slot"):
        _ = _sequence(1, 1).running_slot


@pytest.mark.parametrize(
    ("output_ids", "ignore_eos", "reason"),
    [
        ([], False, None),
        ([5], False, None),
        ([7], False, "stop"),
        ([5, 7], False, "stop"),
        ([5, 6], False, "length"),
        ([7], True, None),
        ([5, 7], True, "length"),
    ],
)
def test_a_sequence_ends_at_eos_or_at_its_length(
    output_ids: list[int], ignore_eos: bool, reason: str | None
) -> None:
    sequence = _sequence(1, 2, ignore_eos=ignore_eos)
    sequence.token_ids += output_ids
    assert sequence.num_output == len(output_ids)
    assert sequence.finish_reason(frozenset({7})) == reason
