"""Sizes in bytes: reading them from text and writing them for people.

Units are binary however they are written: `10GB` is 10 * 2**30 bytes, as `10GiB` is.
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_bytes", "format_gib", "parse_size"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = {
    "": 1,
    "b": 1,
    "kb": KIB,
    "kib": KIB,
    "mb": MIB,
    "mib": MIB,
    "gb": GIB,
    "gib": GIB,
    "tb": TIB,
    "tib": TIB,
}

# ASCII, because int() reads the digits of every script and the Kelvin sign lowers to "k".
_SIZE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+)[ \t]*([a-z]*)", re.ASCII | re.IGNORECASE)

# No size needs more, and converting endless digits is slow.
_MAX_LENGTH = 64


def parse_size(text: str) -> int:
    """Return how many bytes `text` names, rounded down to a whole byte.

    Args:
        text: A number and one of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB in any case, spaces
            between and around them allowed. A whole number may stand alone: it is bytes.

    Raises:
        ValueError: `text` is not such a size.

    >>> parse_size("1.5 GB")
    1610612736
    """
    match = _SIZE.fullmatch(text.strip(" \t")) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise ValueError(f"{_shorten(text)} is no size; write a number and a unit, as in '10GB'")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}; known are B, KB, MB, GB and TB")
    if not unit and "." in number:
        raise ValueError(f"{text!r} has no unit; write one, as in '{number}GB'")
    return int(Fraction(number) * factor)


def format_gib(num_bytes: int) -> str:
    """Return a size with two decimals, in GiB or in the smaller unit that suits it.

    >>> format_gib(12_079_595_520), format_gib(536_870_912), format_gib(100)
    ('11.25 GiB', '512.00 MiB', '100 bytes')
    """
    if num_bytes < KIB:
        return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB")):  # noqa: B007 - read below
        hundredths = (num_bytes * 100 + unit // 2) // unit
        # Decided after rounding, so that nothing is ever shown as 1024.00 MiB.
        if hundredths < 1024 * 100:
            break
    return f"{hundredths // 100:,}.{hundredths % 100:02} {name}"


def format_bytes(num_bytes: int) -> str:
    """Return a size as `format_gib` does, with the exact number of bytes behind it.

    >>> format_bytes(12_079_595_520)
    '11.25 GiB (12,079,595,520 bytes)'
    """
    if num_bytes < KIB:
        return format_gib(num_bytes)
    return f"{format_gib(num_bytes)} ({num_bytes:,} bytes)"


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]!r}..."
