"""Draws blocks and requests over the budget; imported only where matplotlib is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from reblock.planning.plot_parts import printable, shorten
from reblock.units import GIB, format_gib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from matplotlib.axes import Axes

    from reblock.planning.result import Plan
    from reblock.planning.sweep import Sweep

__all__ = ["LegendEntry", "draw_one", "draw_several", "draw_sweep_legend", "summarise"]

FONT_SIZE = 8
_NAME_LENGTH = 60
_BLOCKS, _REQUESTS = "blocks", "requests of the full length"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_THIN: dict[str, Any] = {"color": "black", "linewidth": 1.5}
_BROAD: dict[str, Any] = {"color": "0.75", "linewidth": 5, "solid_capstyle": "butt"}
_BUDGET_LINE: dict[str, Any] = {"color": "black", "linewidth": 1.2, "linestyle": (0, (2, 1))}
_POINT: dict[str, Any] = {
    "color": "black",
    "linestyle": "",
    "markersize": 8,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
}
_GROUND: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.5", "linewidth": 0.6, "pad": 3.0}
# Where the last step comes early, the budgets above it are cut off.
_MOST_AFTER_LAST_STEP = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """A line as it is drawn, and what it stands for."""

    handle: Line2D
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curves:
    """The answers over the budget, in GiB, as steps."""

    budgets: tuple[float, ...]
    blocks: tuple[int, ...]
    requests: tuple[int, ...]


def _curves(plan: Plan, sweep: Sweep) -> _Curves:
    steps = {point.budget_bytes: (point.num_blocks, point.num_requests) for point in sweep.points}
    if plan.num_blocks is not None and plan.capacity is not None and plan.num_blocks_asked is None:
        # Not every step is among the points, but that of the answer should be.
        answer = (plan.num_blocks, plan.capacity.num_full_sequences)
        steps.setdefault(plan.needed_bytes, answer)
    budgets = sorted(steps)
    return _Curves(
        budgets=tuple(budget / GIB for budget in budgets),
        blocks=tuple(steps[budget][0] for budget in budgets),
        requests=tuple(steps[budget][1] for budget in budgets),
    )


def draw_one(blocks_axes: Axes, plan: Plan, sweep: Sweep) -> list[LegendEntry]:
    """Draw blocks, and requests on a second axis in proportion, so that full requests meet."""
    if not sweep.points:
        _draw_nothing(blocks_axes, plan)
        return []
    requests_axes = blocks_axes.twinx()
    curves = _curves(plan, sweep)
    # Requests as a broad grey line that the blocks, where they are the same, run along.
    requests_axes.step(curves.budgets, curves.requests, where="post", **_BROAD)
    blocks_axes.step(curves.budgets, curves.blocks, where="post", **_THIN)
    blocks_axes.set_zorder(requests_axes.get_zorder() + 1)
    blocks_axes.patch.set_visible(False)
    top = 1.15 * max([*curves.blocks, plan.num_blocks or 0, 1])
    blocks_axes.set_ylim(0, top)
    requests_axes.set_ylim(0, top / _blocks_per_request(plan))
    for axes, text in ((blocks_axes, _BLOCKS), (requests_axes, _REQUESTS)):
        _count_on(axes, text)
        axes.spines["top"].set_visible(False)
    _set_budgets(blocks_axes, [plan], [sweep])
    return [
        LegendEntry(handle=Line2D([], [], **_THIN), text=f"{_BLOCKS} (left)"),
        LegendEntry(handle=Line2D([], [], **_BROAD), text=f"{_REQUESTS} (right)"),
        *_draw_answer(blocks_axes, plan),
    ]


def _count_on(axes: Axes, text: str) -> None:
    axes.set_ylabel(text)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_nothing(axes: Axes, plan: Plan) -> None:
    text = (
        f"No budget works: {format_gib(plan.budgets.smallest_bytes)} of a device are needed, and "
        f"{format_gib(plan.budgets.available_bytes)} are available."
    )
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10)


def _blocks_per_request(plan: Plan) -> int:
    return 1 if plan.limited_by == "fixed" else -(-plan.max_seq_len // plan.kvcache_block_size)


def _draw_answer(axes: Axes, plan: Plan) -> list[LegendEntry]:
    entries = []
    budget, (first, last) = plan.budget_bytes / GIB, axes.get_xlim()
    if first <= budget <= last:
        axes.axvline(budget, **_BUDGET_LINE)
        entries.append(LegendEntry(handle=Line2D([], [], **_BUDGET_LINE), text="budget"))
    text = summarise(plan).replace("; ", "\n")
    point = None
    if plan.num_blocks is None:
        text = f"does not fit: the smallest budget is {format_gib(plan.budgets.smallest_bytes)}"
    else:
        point = (plan.needed_bytes / GIB, plan.num_blocks)
        axes.plot([point[0]], [point[1]], marker="o", zorder=5, **_POINT)
        entries.append(LegendEntry(handle=Line2D([], [], marker="o", **_POINT), text="answer"))
    # Lines only rise, so there is always room below their ends.
    axes.annotate(
        text,
        point or (0, 0),
        xytext=(0.95, 0.08),
        textcoords="axes fraction",
        ha="right",
        va="bottom",
        fontsize=FONT_SIZE + 1,
        bbox=_GROUND,
        arrowprops=None if point is None else {"arrowstyle": "-", "shrinkB": 5, "linewidth": 0.8},
        annotation_clip=False,
        zorder=4,
    )
    return entries


def summarise(plan: Plan) -> str:
    """Return the answer of a plan in a line; what semicolons part may stand below each other."""
    if plan.num_blocks is None or plan.capacity is None:
        return (
            f"does not fit; the budget is {format_gib(plan.budget_bytes)}, and "
            f"{format_gib(plan.needed_bytes)} are needed"
        )
    return (
        f"{plan.num_blocks:,} blocks, {plan.capacity.num_full_sequences:,} requests of "
        f"{plan.max_seq_len:,} tokens; need {format_gib(plan.needed_bytes)} of the budget of "
        f"{format_gib(plan.budget_bytes)}"
    )


def draw_several(
    blocks_axes: Axes, requests_axes: Axes, plans: Sequence[Plan], sweeps: Sequence[Sweep]
) -> list[LegendEntry]:
    """Draw blocks of all plans and requests of all plans side by side."""
    entries = []
    for index, (plan, sweep) in enumerate(zip(plans, sweeps, strict=True)):
        line, marker = _line_style(index), _MARKERS[index % len(_MARKERS)]
        curves = _curves(plan, sweep)
        blocks_axes.step(curves.budgets, curves.blocks, where="post", **line)
        requests_axes.step(curves.budgets, curves.requests, where="post", **line)
        if plan.num_blocks is not None and plan.capacity is not None:
            needed, point = [plan.needed_bytes / GIB], {"marker": marker, "zorder": 5, **_POINT}
            blocks_axes.plot(needed, [plan.num_blocks], **point)
            requests_axes.plot(needed, [plan.capacity.num_full_sequences], **point)
        handle = Line2D([], [], marker=marker, **{**_POINT, **line})
        name = shorten(printable(plan.name), _NAME_LENGTH)
        entries.append(LegendEntry(handle=handle, text=f"{index + 1}  {name}: {summarise(plan)}"))
    for axes, text in ((blocks_axes, _BLOCKS), (requests_axes, _REQUESTS)):
        _count_on(axes, text)
        axes.set_ylim(0, 1.1 * max(axes.get_ylim()[1], 1))
        axes.spines[["top", "right"]].set_visible(False)
        _set_budgets(axes, plans, sweeps)
    return entries


def _line_style(index: int) -> dict[str, Any]:
    return {
        "color": "black" if index % 2 == 0 else "0.5",
        "linestyle": _LINES[index % len(_LINES)],
        "linewidth": 1.6,
    }


def _set_budgets(axes: Axes, plans: Sequence[Plan], sweeps: Sequence[Sweep]) -> None:
    """Show the budgets where something happens."""
    shown = [plan.needed_bytes for plan in plans if plan.fits]
    shown += [plan.budget_bytes for plan in plans if not plan.fits]
    for sweep in sweeps:
        top = max((point.num_blocks for point in sweep.points), default=0)
        shown += [point.budget_bytes for point in sweep.points[:1]]
        shown += [next(p.budget_bytes for p in sweep.points if p.num_blocks == top)] if top else []
    first, last, available = min(shown), max(shown), max(s.available_bytes for s in sweeps)
    # A single step is nothing to look at closely.
    room = max(last - first, available // 16) if last > first else available
    if available - last <= room * 2:
        last = max(last, available)
    else:
        last += int(room * _MOST_AFTER_LAST_STEP)
    margin = max(last - first, last // 20) * 0.03
    axes.set_xlim(max(0, first - margin) / GIB, (last + margin) / GIB)
    axes.set_xlabel("budget of one device, GiB")
    axes.grid(visible=True, color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_sweep_legend(axes: Axes, entries: Sequence[LegendEntry], num_columns: int) -> None:
    """Draw which line is what."""
    axes.set_axis_off()
    axes.legend(
        [entry.handle for entry in entries],
        [entry.text for entry in entries],
        loc="center",
        ncols=num_columns,
        fontsize=FONT_SIZE,
        frameon=False,
        handlelength=4.5,
    )
