"""Tables as commands print them: 80 columns, without colours, in any encoding."""

from __future__ import annotations

import re
import sys
import textwrap
from io import StringIO
from typing import TYPE_CHECKING

from reblock.units import format_gib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.box import Box
    from rich.table import Table

__all__ = [
    "WIDTH",
    "add_size",
    "can_print",
    "labelled",
    "make_table",
    "paragraph",
    "render",
    "size",
]

WIDTH = 80

# A number stays with its unit.
_SIZE = re.compile(r"([0-9]) ([KMG]iB|bytes?|tokens?|blocks?|requests?)\b")
# In a text that is wrapped: a space that no line ends at. No name and no path has this character.
NO_BREAK = "\0"
_LINE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"


def render(*tables: Table) -> str:
    """Return tables as text, one below the other.

    Paths and names in them are shown as they are: no markup is obeyed.
    """
    from rich.console import Console

    # Into a text first: rich would end the process itself where the reader of stdout is gone.
    console = Console(file=StringIO(), width=WIDTH, markup=False, highlight=False)
    with console.capture() as captured:
        for each in tables:
            console.print(each)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def make_table(title: str | None, *columns: str, gap: int = 2) -> Table:
    """Return a table whose first column is text and whose others are numbers.

    `gap` is the spaces before a column, besides the one that its box puts there.
    """
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=_box(),
        show_header=any(columns),
        pad_edge=False,
        padding=(0, gap // 2, 0, gap - gap // 2),
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _box() -> Box:
    from rich.box import SIMPLE_HEAD, Box

    if can_print(_LINE):
        return SIMPLE_HEAD
    return Box(str(SIMPLE_HEAD).replace(_LINE, "-"), ascii=True)


def can_print(text: str) -> bool:
    """Return whether the encoding of stdout has every character of `text`."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def add_size(table: Table, name: str, num_bytes: int, *more: str) -> None:
    """Add a row with a size, for people and exact, and what else stands in it."""
    table.add_row(name, size(num_bytes), f"{num_bytes:,}", *more)


def size(num_bytes: int) -> str:
    """Return a size for people, which may be negative."""
    return format_gib(num_bytes) if num_bytes >= 0 else f"-{format_gib(-num_bytes)}"


def labelled(rows: Sequence[tuple[str, str]], *, whole: Iterable[str] = ()) -> str:
    """Return labels and texts, side by side.

    A text is wrapped, save those of the labels in `whole`: what is to be copied stays on one line.
    """
    width = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, text in rows:
        if label in whole:
            lines.append(f"{label:{width}}{text}")
        else:
            lines.append(paragraph(text, first=f"{label:{width}}", indent=width))
    return "\n".join(lines)


def paragraph(text: str, *, first: str = "", indent: int = 0) -> str:
    """Return a text wrapped, with `first` in front of it and its other lines indented."""
    filled = textwrap.fill(
        _SIZE.sub(rf"\1{NO_BREAK}\2", text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(NO_BREAK, " ")
