from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.units import GIB, KIB, MIB, TIB, format_bytes, format_gib, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("10GB", 10 * GIB),
        ("10gb", 10 * GIB),
        ("10 GB", 10 * GIB),
        ("10\tGB", 10 * GIB),
        ("  10 GB ", 10 * GIB),
        ("10GiB", 10 * GIB),
        ("10gIb", 10 * GIB),
        ("1.5GB", 3 * GIB // 2),
        (".5GB", GIB // 2),
        ("0.5TB", TIB // 2),
        ("2TiB", 2 * TIB),
        ("512MB", 512 * MIB),
        ("512MiB", 512 * MIB),
        ("3KB", 3 * KIB),
        ("3KiB", 3 * KIB),
        ("7B", 7),
        ("7b", 7),
        ("1073741824", GIB),
        ("0", 0),
        ("0.3B", 0),
        ("0.1KB", 102),
        ("007B", 7),
    ],
)
def test_parse_size_reads_binary_units_however_they_are_written(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_parse_size_is_exact_where_a_float_is_not() -> None:
    assert parse_size("9007199254740993B") == 9_007_199_254_740_993
    assert parse_size("0.1TB") == TIB // 10


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is no size"),
        ("GB", "is no size"),
        ("10G", "unknown unit 'G'"),
        ("10PB", "unknown unit 'PB'"),
        ("1.5", "has no unit"),
        ("1.GB", "is no size"),
        ("-1GB", "is no size"),
        ("+1GB", "is no size"),
        ("1e10", "is no size"),
        ("10,000MB", "is no size"),
        ("1_000MB", "is no size"),
        ("10\nGB", "is no size"),
        ("10GB 5MB", "is no size"),
        ("nan", "is no size"),
        ("\N{ARABIC-INDIC DIGIT THREE}GB", "is no size"),
        ("\N{FULLWIDTH DIGIT ONE}GB", "is no size"),
        ("5\N{KELVIN SIGN}B", "is no size"),
        ("1" * 65, "is no size"),
        ("1" * 5000 + "GB", "is no size"),
    ],
)
def test_parse_size_refuses_what_is_no_size(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_size(text)


def test_parse_size_does_not_repeat_endless_text_in_its_message() -> None:
    with pytest.raises(ValueError, match="is no size") as caught:
        parse_size("9" * 100_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (KIB, "1.00 KiB"),
        (MIB - 1, "1.00 MiB"),
        (512 * MIB, "512.00 MiB"),
        (GIB - 1, "1.00 GiB"),
        (GIB, "1.00 GiB"),
        (12_079_595_520, "11.25 GiB"),
        (16_877_879_296, "15.72 GiB"),
        (2000 * TIB, "2,048,000.00 GiB"),
    ],
)
def test_format_gib_shows_two_decimals_of_the_unit_that_suits(num_bytes: int, text: str) -> None:
    assert format_gib(num_bytes) == text


def test_format_bytes_adds_the_exact_number() -> None:
    assert format_bytes(12_079_595_520) == "11.25 GiB (12,079,595,520 bytes)"
    assert format_bytes(7) == "7 bytes"


@given(st.integers(min_value=0, max_value=2**70))
def test_format_gib_is_off_by_less_than_a_hundredth_of_its_unit(num_bytes: int) -> None:
    number, unit = format_gib(num_bytes).replace(",", "").split()
    size = {"byte": 1, "bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}[unit]
    whole, _, decimals = number.partition(".")
    shown = int(whole) * 100 + int(decimals or 0)
    assert abs(num_bytes * 100 - shown * size) <= size // 2
