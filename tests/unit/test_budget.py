from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.budget import WHOLE_DEVICE, MemoryBudget, parse_budget
from reblock.errors import BudgetAboveDevice, InvalidBudget
from reblock.units import GIB, MIB, TIB


class FloatThatPrintsItself(float):
    def __repr__(self) -> str:
        return f"np.float64({float.__repr__(self)})"


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        (0.8, Fraction(4, 5)),
        (1.0, Fraction(1)),
        (1e-05, Fraction(1, 100_000)),
        (FloatThatPrintsItself(0.8), Fraction(4, 5)),
        ("0.8", Fraction(4, 5)),
        (".8", Fraction(4, 5)),
        ("1.0", Fraction(1)),
        ("80%", Fraction(4, 5)),
        ("80 %", Fraction(4, 5)),
        (" 80% ", Fraction(4, 5)),
        ("80.5%", Fraction(161, 200)),
        ("100%", Fraction(1)),
        (1, 1),
        ("1", 1),
        ("1B", 1),
        (1073741824, GIB),
        ("1073741824", GIB),
        ("10GB", 10 * GIB),
        ("10gb", 10 * GIB),
        ("10 GB", 10 * GIB),
        ("10GiB", 10 * GIB),
        ("1.5GB", 3 * GIB // 2),
        ("0.5TB", TIB // 2),
        ("512MB", 512 * MIB),
    ],
)
def test_parse_budget_reads_fractions_and_sizes(value: object, amount: Fraction | int) -> None:
    budget = parse_budget(value)
    assert budget.amount == amount
    assert type(budget.amount) is type(amount)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0, "less than one byte"),
        (-1, "less than one byte"),
        (0.0, "no share above 0"),
        (-0.5, "no share above 0"),
        (1.01, "a fraction above 1"),
        (2.0, "a fraction above 1"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        (float("-inf"), "not a finite number"),
        (True, "is a boolean"),
        (False, "is a boolean"),
        (None, "of the type NoneType"),
        (Fraction(1, 2), "of the type Fraction"),
        (b"80%", "of the type bytes"),
        ("", "is empty"),
        ("  ", "is empty"),
        ("0", "less than one byte"),
        ("0B", "less than one byte"),
        ("0.4B", "less than one byte"),
        ("0.0", "no share above 0"),
        ("0%", "no share above 0"),
        ("100.1%", "no share above 0 and up to 1"),
        ("1.1", "no share above 0 and up to 1"),
        ("-1", "is negative"),
        ("-80%", "is negative"),
        ("-1GB", "is negative"),
        ("%", "is no percentage"),
        ("8e1%", "is no percentage"),
        ("80%%", "is no percentage"),
        ("10GB%", "is no percentage"),
        ("10G", "unknown unit 'G'"),
        ("10 parsecs", "unknown unit 'parsecs'"),
        ("10,000MB", "is no size"),
        ("1e10", "is no size"),
        ("nan", "is no size"),
        ("inf", "is no size"),
        ("True", "is no size"),
        ('"0.8"', "is no size"),
        ("\N{ARABIC-INDIC DIGIT EIGHT}%", "is no percentage"),
        ("0.\N{ARABIC-INDIC DIGIT EIGHT}", "is no size"),
        ("\N{FULLWIDTH DIGIT ONE}GB", "is no size"),
        ("0." + "1" * 5000, "is too long"),
        ("9" * 5000, "is too long"),
    ],
)
def test_parse_budget_refuses_and_says_what_is_accepted(value: object, fault: str) -> None:
    with pytest.raises(InvalidBudget, match=fault) as caught:
        parse_budget(value)
    message = str(caught.value)
    assert "memory_budget" in message
    assert "accepted are a fraction" in message
    assert "'10GB'" in message
    assert len(message) < 500
    assert caught.value.exit_code == 2


def test_refused_budget_carries_the_value_as_given() -> None:
    with pytest.raises(InvalidBudget) as caught:
        parse_budget("10G")
    assert caught.value.budget == "10G"


def test_integer_one_is_a_byte_and_float_one_is_the_whole_device() -> None:
    assert parse_budget(1).resolve(1000) == 1
    assert parse_budget(1.0).resolve(1000) == 1000


def test_float_is_the_decimal_that_was_written() -> None:
    # 0.07 as a binary number is a little more than 7 hundredths, so 100 times it rounds up.
    assert parse_budget(0.07).resolve(100) == 7
    assert parse_budget(0.29).resolve(100) == 29


def test_fraction_is_rounded_down() -> None:
    assert parse_budget("33.33%").resolve(1000) == 333


def test_whole_device_is_all_that_is_available() -> None:
    assert WHOLE_DEVICE.resolve(16_877_879_296) == 16_877_879_296


def test_budget_of_all_the_available_bytes_is_accepted() -> None:
    assert parse_budget(1000).resolve(1000) == 1000


def test_budget_above_the_device_names_both_sizes() -> None:
    with pytest.raises(BudgetAboveDevice) as caught:
        parse_budget("16GB").resolve(16_877_879_296)
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.budget_bytes, error.available_bytes) == (16 * GIB, 16_877_879_296)
    message = str(error)
    assert "memory_budget='16GB'" in message
    assert "16.00 GiB (17,179,869,184 bytes)" in message
    assert "15.72 GiB (16,877,879,296 bytes)" in message
    assert "100%" in message


def test_memory_budget_checks_its_amount_however_it_is_made() -> None:
    with pytest.raises(InvalidBudget):
        MemoryBudget(amount=0, text="0")
    with pytest.raises(InvalidBudget):
        MemoryBudget(amount=Fraction(3, 2), text="150%")


@given(
    st.floats(min_value=0, max_value=1, exclude_min=True), st.integers(min_value=0, max_value=2**60)
)
def test_fraction_never_resolves_above_the_device(fraction: float, available: int) -> None:
    assert 0 <= parse_budget(fraction).resolve(available) <= available


@given(
    st.integers(min_value=1, max_value=10_000),
    st.integers(min_value=1, max_value=10_000),
    st.integers(min_value=0, max_value=2**60),
)
def test_larger_percentage_never_resolves_to_less(one: int, other: int, available: int) -> None:
    low, high = sorted((one, other))
    resolved = [parse_budget(f"{n // 100}.{n % 100:02}%").resolve(available) for n in (low, high)]
    assert resolved[0] <= resolved[1]


@given(st.integers(min_value=1, max_value=10**9))
def test_float_and_its_text_are_the_same_budget(billionths: int) -> None:
    text = f"{billionths // 10**9}.{billionths % 10**9:09}"
    assert parse_budget(float(text)).amount == parse_budget(text).amount
