"""Draws the bars of memory; imported only where matplotlib is there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from reblock.planning.plot_parts import shorten
from reblock.units import GIB, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from reblock.planning.plot_parts import Bar, BarGroup, Part, Style

__all__ = ["Label", "draw_bars", "draw_parts_legend", "fit_labels", "num_rows"]

FONT_SIZE = 8
_BAR_HEIGHT = 0.62
_TITLE_LENGTH = 100
# A label gets its own white ground, so that no hatch runs through it.
_GROUND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
# Narrower parts are left without a label before anything is measured.
_LEAST_LABELLED = 1 / 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A text that is to lie within a part of a bar, in wordings from long to short.

    `room` is its own or the larger side of a limit that goes through it, from left to right.
    """

    text: Text
    axes: Axes
    room: tuple[float, float]
    wordings: tuple[str, ...]


def num_rows(groups: Sequence[BarGroup]) -> int:
    """Return the rows that all bars take, with titles."""
    return sum(len(g.bars) + bool(g.title) + bool(g.num_hidden) for g in groups)


def draw_bars(axes: Axes, groups: Sequence[BarGroup], unit: str) -> list[Label]:
    """Draw all bars below each other and return the labels that are still to be fitted in."""
    end = max(max(bar.used_bytes, bar.memory_bytes) for g in groups for bar in g.bars) / GIB
    ticks: list[tuple[int, str]] = []
    labels: list[Label] = []
    row = 0
    for group in groups:
        if group.title:
            _draw_line(axes, row, shorten(group.title, _TITLE_LENGTH))
            row += 1
        for bar in group.bars:
            ticks.append((row, bar.label))
            labels += _draw_bar(axes, row, bar, end)
            row += 1
        if group.num_hidden:
            _draw_line(axes, row, f"and {group.num_hidden:,} chiplets with more room")
            row += 1
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.set_ylim(row - 0.35, -0.65)
    axes.set_xlim(0, end * 1.005)
    axes.set_xlabel(f"GiB of one {unit}")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return labels


def _draw_line(axes: Axes, row: int, text: str) -> None:
    axes.text(0, row + 0.2, text, va="center", ha="left", fontsize=FONT_SIZE + 1, weight="bold")


def _draw_bar(axes: Axes, row: int, bar: Bar, end: float) -> list[Label]:
    labels, start, tenant = [], 0.0, None
    limits = (bar.budget_bytes / GIB, bar.memory_bytes / GIB)
    for part in bar.parts:
        width = part.num_bytes / GIB
        axes.add_patch(_patch(part, (start, row - _BAR_HEIGHT / 2), width, _BAR_HEIGHT))
        room = _largest_room(start, start + width, limits)
        if room[1] - room[0] > end * _LEAST_LABELLED:
            labels.append(_label(axes, row, part, room))
        if part.tenant is not None and part.tenant != tenant:
            tenant = part.tenant
            _mark_tenant(axes, row, start, tenant)
        start += width
    _draw_limits(axes, row, bar)
    return labels


def _patch(part: Part, corner: tuple[float, float], width: float, height: float) -> Rectangle:
    return Rectangle(
        corner,
        width,
        height,
        facecolor=str(part.style.grey),
        edgecolor="black",
        hatch=part.style.hatch or None,
        linewidth=0.6,
    )


def _largest_room(start: float, end: float, limits: Sequence[float]) -> tuple[float, float]:
    """Return the longest stretch that no limit goes through."""
    edges = [start, *sorted(limit for limit in limits if start < limit < end), end]
    return max(pairwise(edges), key=lambda room: room[1] - room[0])


def _label(axes: Axes, row: int, part: Part, room: tuple[float, float]) -> Label:
    size = format_gib(part.num_bytes)
    text = axes.text(
        sum(room) / 2,
        row,
        "",
        ha="center",
        va="center",
        fontsize=FONT_SIZE,
        linespacing=1.05,
        bbox=_GROUND,
    )
    text.set_in_layout(False)
    wordings = (f"{part.name} {size}", f"{part.name}\n{size}", size)
    return Label(text=text, axes=axes, room=room, wordings=wordings)


def _mark_tenant(axes: Axes, row: int, start: float, tenant: int) -> None:
    """Draw where the parts of a tenant begin, with its number."""
    top = row - _BAR_HEIGHT / 2
    axes.plot([start, start], [top - 0.14, row + _BAR_HEIGHT / 2], color="black", linewidth=2)
    axes.annotate(
        str(tenant + 1),
        (start, top),
        xytext=(3, 1),
        textcoords="offset points",
        fontsize=FONT_SIZE,
        weight="bold",
    )


def _draw_limits(axes: Axes, row: int, bar: Bar) -> None:
    budget, used = bar.budget_bytes / GIB, bar.used_bytes / GIB
    half = _BAR_HEIGHT / 2
    axes.plot([budget, budget], [row - half - 0.12, row + half + 0.12], **_BUDGET_LINE)
    if not bar.overflow_bytes:
        return
    if bar.used_bytes > bar.memory_bytes:
        memory = bar.memory_bytes / GIB
        axes.plot([memory, memory], [row - half - 0.12, row + half + 0.12], **_MEMORY_LINE)
    axes.add_patch(
        Rectangle((budget, row - half), used - budget, 2 * half, fill=False, linewidth=2.5)
    )
    axes.text(
        used,
        row + half + 0.03,
        f"{format_gib(bar.overflow_bytes)} too much",
        ha="right",
        va="top",
        fontsize=FONT_SIZE,
        weight="bold",
    )


_BUDGET_LINE: dict[str, Any] = {"color": "black", "linewidth": 2.0, "linestyle": (0, (2, 1))}
_MEMORY_LINE: dict[str, Any] = {"color": "black", "linewidth": 4.0, "solid_capstyle": "butt"}


def fit_labels(figure: Figure, labels: Iterable[Label]) -> None:
    """Give every label the longest wording that lies within its part, or take it away."""
    figure.draw_without_rendering()
    # Nothing that follows moves anything, and the layout is most of the work.
    figure.set_layout_engine("none")
    for label in labels:
        edges = [(label.room[0], 0), (label.room[1], _BAR_HEIGHT)]
        (left, upper), (right, lower) = label.axes.transData.transform(edges)
        for wording in label.wordings:
            label.text.set_text(wording)
            extent = label.text.get_window_extent()
            if extent.width + 6 <= right - left and extent.height <= upper - lower:
                break
        else:
            label.text.remove()


def draw_parts_legend(axes: Axes, groups: Sequence[BarGroup]) -> None:
    """Draw what every grey and hatch means, with the sizes where all bars have the same."""
    bars = [bar for group in groups for bar in group.bars]
    # By name and style, as an artifact may call a part of its own as one of ours is called.
    found: dict[tuple[str, Style], list[int]] = {}
    handles: list[Rectangle | Line2D] = []
    for part in (part for bar in bars for part in bar.parts):
        if (part.name, part.style) not in found:
            handles.append(_patch(part, (0, 0), 1, 1))
        found.setdefault((part.name, part.style), []).append(part.num_bytes)
    texts = [_legend_text(name, sizes, len(bars)) for (name, _), sizes in found.items()]
    handles.append(Line2D([], [], **_BUDGET_LINE))
    texts.append(_legend_text("budget", [bar.budget_bytes for bar in bars], len(bars)))
    if any(bar.used_bytes > bar.memory_bytes for bar in bars):
        handles.append(Line2D([], [], **_MEMORY_LINE))
        texts.append(_legend_text("memory", [bar.memory_bytes for bar in bars], len(bars)))
    axes.set_axis_off()
    legend = axes.legend(
        handles,
        ["-"] * len(handles),
        loc="center",
        ncols=min(4, len(handles)),
        fontsize=FONT_SIZE,
        frameon=False,
        handlelength=3.2,
        handleheight=1.5,
    )
    # Set afterwards, as a label that begins with an underscore would be left out.
    for entry, text in zip(legend.get_texts(), texts, strict=True):
        entry.set_text(text)


def _legend_text(name: str, sizes: Sequence[int], num_bars: int) -> str:
    text = shorten(name, 32)
    is_common = len(set(sizes)) == 1 and len(sizes) <= num_bars
    return f"{text} {format_gib(sizes[0])}" if is_common else text
