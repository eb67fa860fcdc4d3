"""A memory budget: how much of one device's available memory an artifact may use.

The budget covers all of it: weights, workspace and KV cache together. Available is what the
device has after the reserve of every chiplet, and a fraction is a fraction of that.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from reblock.errors import BudgetAboveDevice, InvalidBudget
from reblock.units import format_bytes, parse_size

__all__ = ["WHOLE_DEVICE", "MemoryBudget", "parse_budget"]

_ACCEPTED = (
    "accepted are a fraction of the available memory above 0 and up to 1, such as 0.8 or '80%', "
    "and a size, such as '10GB', '512MB' or 10737418240 (bytes)"
)

_NUMBER = re.compile(r"[0-9]+|[0-9]*\.[0-9]+", re.ASCII)

_MAX_BYTES = 2**80

# No budget needs more, and converting endless digits is slow.
_MAX_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A budget that has been read.

    `amount` is a share of the available memory where it is a Fraction, and bytes where it is an
    int. `text` is the budget as it was given, for messages.
    """

    amount: Fraction | int
    text: str

    def __post_init__(self) -> None:
        if isinstance(self.amount, int):
            if self.amount < 1:
                raise _refuse(self.text, "is less than one byte")
        elif not 0 < self.amount <= 1:
            raise _refuse(self.text, "is no share above 0 and up to 1")

    @property
    def meant(self) -> str | None:
        """What was probably meant, where a bare number of bytes is one of percent or the whole."""
        if not isinstance(self.amount, int) or self.text != str(self.amount) or self.amount > 100:
            return None
        return "1.0 or 100% for the whole device" if self.amount == 1 else f"{self.text}%"

    def resolve(self, available_bytes: int) -> int:
        """Return the budget in bytes of one device that has `available_bytes`, rounded down.

        Raises:
            BudgetAboveDevice: The budget is more than that.
        """
        if isinstance(self.amount, Fraction):
            return int(self.amount * available_bytes)
        if self.amount > available_bytes:
            raise BudgetAboveDevice(
                f"memory_budget={self.text!r} is {format_bytes(self.amount)}, but the device "
                f"has {format_bytes(available_bytes)} available after its reserve; lower "
                "memory_budget to that, or write '100%' for the whole device",
                budget_bytes=self.amount,
                available_bytes=available_bytes,
            )
        return self.amount


def parse_budget(value: object) -> MemoryBudget:
    """Return the memory budget that a user wrote, from Python or from a command line.

    Args:
        value: A float above 0 and up to 1 (a fraction), an int (bytes), or text: a percentage
            (`"80%"`), a fraction (`"0.8"`, `"1.0"`), a size with a unit (`"10GB"`) or bytes
            (`"1073741824"`). So `1.0` is the whole device, and `1` is one byte.

    Raises:
        InvalidBudget: It is none of these.

    >>> parse_budget("80%").resolve(1000)
    800
    """
    # A bool is an int, and True would be one byte.
    if isinstance(value, bool):
        raise _refuse(value, "is a boolean")
    if isinstance(value, int):
        if abs(value) >= _MAX_BYTES:
            # Not shown: printing endless digits is slow, and refused at last.
            raise _refuse("a whole number of many digits", "is no amount of memory")
        return MemoryBudget(amount=value, text=str(value))
    if isinstance(value, float):
        return _from_float(value)
    if isinstance(value, str):
        return _from_text(value)
    raise _refuse(value, f"is of the type {type(value).__name__}")


def _from_float(value: float) -> MemoryBudget:
    if not math.isfinite(value):
        raise _refuse(value, "is not a finite number")
    # 0.8 means eight tenths, not the binary number next to it. float.__repr__, because
    # subclasses (numpy's) print themselves in other ways.
    text = float.__repr__(value)
    if value > 1:
        raise _refuse(value, "is a fraction above 1 (bytes are written as a whole number)")
    return MemoryBudget(amount=Fraction(text), text=text)


def _from_text(value: str) -> MemoryBudget:
    text = value.strip(" \t")
    if not text:
        raise _refuse(value, "is empty")
    if len(text) > _MAX_LENGTH:
        raise _refuse(text[:_MAX_LENGTH] + "...", "is too long")
    if text.startswith("-"):
        raise _refuse(value, "is negative")
    if text.endswith("%"):
        percent = text[:-1].rstrip(" \t")
        if not _NUMBER.fullmatch(percent):
            raise _refuse(value, "is no percentage")
        return MemoryBudget(amount=Fraction(percent) / 100, text=text)
    if "." in text and _NUMBER.fullmatch(text):
        return MemoryBudget(amount=Fraction(text), text=text)
    try:
        num_bytes = parse_size(text)
    except ValueError as error:
        raise InvalidBudget(f"memory_budget: {error}; {_ACCEPTED}", budget=value) from error
    return MemoryBudget(amount=num_bytes, text=text)


def _refuse(value: object, fault: str) -> InvalidBudget:
    return InvalidBudget(f"memory_budget={value!r} {fault}; {_ACCEPTED}", budget=value)


WHOLE_DEVICE = parse_budget("100%")
