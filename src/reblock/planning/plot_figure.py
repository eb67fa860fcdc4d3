"""Puts the picture of plans together; imported only where matplotlib is there."""

from __future__ import annotations

import io
import textwrap
import warnings
from typing import TYPE_CHECKING

import matplotlib.style
from matplotlib.figure import Figure

from reblock.planning.plot_bars import draw_bars, draw_parts_legend, fit_labels, num_rows
from reblock.planning.plot_parts import make_groups, printable, shorten
from reblock.planning.plot_sweep import draw_one, draw_several, draw_sweep_legend, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from matplotlib.axes import Axes

    from reblock.planning.result import Plan, SharedPlan
    from reblock.planning.sweep import Sweep

__all__ = ["draw_png", "draw_svg"]

_DPI = 150
_WIDTH_INCHES = 10
_TITLE_WIDTH = 106
_MOST_TITLE_LINES = 3
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and has any script
    "svg.hashsalt": "reblock",  # so that the same plan gives the same bytes
    "text.parse_math": False,  # names have $ and _ in them
    "hatch.linewidth": 0.7,
    "font.size": 9.0,
    "axes.linewidth": 0.8,
}


def draw_png(plans: Sequence[Plan], sweeps: Sequence[Sweep], shared: SharedPlan | None) -> bytes:
    """Return the picture as PNG."""
    return _draw(plans, sweeps, shared, format="png", dpi=_DPI, metadata={"Software": None})


def draw_svg(plans: Sequence[Plan], sweeps: Sequence[Sweep], shared: SharedPlan | None) -> bytes:
    """Return the picture as SVG, a document of its own."""
    metadata = {"Date": None, "Creator": "reblock"}
    return _draw(plans, sweeps, shared, format="svg", metadata=metadata)


def _draw(
    plans: Sequence[Plan], sweeps: Sequence[Sweep], shared: SharedPlan | None, **options: Any
) -> bytes:
    file = io.BytesIO()
    # Whatever the user's settings are; they are back afterwards.
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        # A font without the script of a name shows boxes, which is no reason to show nothing.
        warnings.filterwarnings("ignore", message=r"Glyph |Matplotlib currently does not support")
        _make_figure(plans, sweeps, shared).savefig(file, **options)
    return file.getvalue()


def _make_figure(
    plans: Sequence[Plan], sweeps: Sequence[Sweep], shared: SharedPlan | None
) -> Figure:
    groups = make_groups(plans, shared)
    title = _title(plans, shared)
    num_entries = len({(p.name, p.style) for g in groups for b in g.bars for p in b.parts}) + 1
    heights = [
        0.35 + 0.48 * num_rows(groups),
        0.1 + 0.24 * -(-num_entries // 4),
        3.2 if any(sweep.points for sweep in sweeps) else 0.5,
        0.25 if len(plans) == 1 else 0.1 + 0.19 * len(plans),
    ]
    height = sum(heights) + 1.4 + 0.2 * title.count("\n")
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    figure.suptitle(title, fontsize=10)
    grid = figure.add_gridspec(4, 2, height_ratios=heights)
    labels = draw_bars(figure.add_subplot(grid[0, :]), groups, _unit(plans))
    draw_parts_legend(figure.add_subplot(grid[1, :]), groups)
    if len(plans) == 1:
        entries = draw_one(figure.add_subplot(grid[2, :]), plans[0], sweeps[0])
    else:
        panels: list[Axes] = [figure.add_subplot(grid[2, column]) for column in range(2)]
        entries = draw_several(panels[0], panels[1], plans, sweeps)
    columns = max(1, len(entries)) if len(plans) == 1 else 1
    draw_sweep_legend(figure.add_subplot(grid[3, :]), entries, columns)
    fit_labels(figure, labels)
    return figure


def _unit(plans: Sequence[Plan]) -> str:
    return "chiplet" if plans[0].target.device.num_chiplets > 1 else "device"


def _title(plans: Sequence[Plan], shared: SharedPlan | None) -> str:
    devices = ", ".join(dict.fromkeys(printable(plan.target.text) for plan in plans))
    if shared is not None:
        lines = [f"{len(plans)} together on {devices}", printable(shared.explanation)]
    elif len(plans) > 1:
        lines = [f"{len(plans)} plans for {devices}"]
    else:
        name = shorten(printable(plans[0].name), 2 * _TITLE_WIDTH)
        lines = [f"{name} on {devices}", summarise(plans[0])]
    return "\n".join(wrapped for line in lines for wrapped in _wrap(line))


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(
        line, width=_TITLE_WIDTH, max_lines=_MOST_TITLE_LINES, placeholder="..."
    ) or [""]
