"""The memory of a device as one line of characters, in proportion and readable without colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.cli.tables import NO_BREAK, WIDTH, can_print, paragraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reblock.planning.result import Waterfall

__all__ = ["bar", "memory_bar", "shares"]

# Between two brackets; the last column stays free, as some terminals wrap there.
_BAR_WIDTH = WIDTH - 4
_CACHE_TERMS = ("fixed KV cache", "KV cache blocks", "alignment")

# What is drawn, in this order: its name, and the character for it where the encoding has it.
_RESERVE = ("reserve", "x", "x")
_WEIGHTS = ("weights", "W", "\N{FULL BLOCK}")
_PROGRAMS = ("runtime and workspace", "o", "\N{DARK SHADE}")
_CACHE = ("KV cache", "#", "\N{LIGHT SHADE}")
_MISSING = ("does not fit", "!", "!")
_UNUSED = ("unused", ".", ".")
_OUTSIDE = ("outside the budget", "-", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    name: str
    character: str
    num_bytes: int


def memory_bar(waterfall: Waterfall) -> str:
    """Return the bar of a device and, below it, what its characters stand for."""
    parts = [part for part in _parts(waterfall) if part.num_bytes]
    widths = shares([part.num_bytes for part in parts], _BAR_WIDTH)
    legend = [f"{part.character} {part.name}".replace(" ", NO_BREAK) for part in parts]
    drawn = bar([part.character for part in parts], widths)
    return f"{drawn}\n{paragraph(', '.join(legend), first=' ', indent=1)}"


def bar(characters: Sequence[str], widths: Sequence[int]) -> str:
    """Return a bar in brackets, every character as often as its width says."""
    drawn = "".join(character * width for character, width in zip(characters, widths, strict=True))
    return f" [{drawn}]"


def shares(amounts: Sequence[int], width: int) -> list[int]:
    """Return whole numbers in proportion to `amounts`, which add up to `width`.

    Every amount, none of which is zero, gets one at least.
    """
    total = sum(amounts)
    widths = [max(1, amount * width // total) for amount in amounts]
    while (rest := width - sum(widths)) != 0:
        # One at a time goes where it brings the width nearest to its exact share.
        step = 1 if rest > 0 else -1
        index = max(
            (index for index, each in enumerate(widths) if each + step > 0),
            key=lambda index: step * (amounts[index] * width - widths[index] * total),
        )
        widths[index] += step
    return widths


def _parts(waterfall: Waterfall) -> list[_Part]:
    sizes = {_WEIGHTS: 0, _PROGRAMS: 0, _CACHE: 0}
    for term in waterfall.terms:
        kind = _PROGRAMS
        if term.name == "Weight":
            kind = _WEIGHTS
        elif term.name in _CACHE_TERMS:
            kind = _CACHE
        sizes[kind] += term.num_bytes
    # What does not fit is cut off at the end of the budget, and drawn as that.
    room = waterfall.budget_bytes
    for kind, num_bytes in sizes.items():
        sizes[kind] = min(num_bytes, room)
        room -= sizes[kind]
    drawn = {
        _RESERVE: waterfall.reserve_bytes,
        **sizes,
        _MISSING: max(0, -waterfall.unused_bytes),
        _UNUSED: max(0, waterfall.unused_bytes),
        _OUTSIDE: waterfall.outside_budget_bytes,
    }
    has_all = can_print("".join(shaded for _, _, shaded in drawn))
    return [
        _Part(name=name, character=shaded if has_all else plain, num_bytes=num_bytes)
        for (name, plain, shaded), num_bytes in drawn.items()
    ]
