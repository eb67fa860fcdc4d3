"""Pictures of plans, as SVG, PNG or a page of HTML, to be printed without colours.

plot_parts   the bars as values
plot_bars    draws them
plot_sweep   draws blocks and requests over the budget
plot_figure  puts the picture together
plot_html    puts a page around it

Those that draw need matplotlib, and are imported when there is something to draw.
"""

from __future__ import annotations

import os
import tempfile
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reblock.errors import EditFailed, InvalidOption, MissingDependency, UsageError
from reblock.planning.plot_html import describe, make_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reblock.planning.result import Plan, SharedPlan
    from reblock.planning.sweep import Sweep

__all__ = ["check_plot_path", "write_plot"]

_EXTENSIONS = (".svg", ".png", ".html")
_INSTALL = "pip install 'reblock[plot]'"


def check_plot_path(path: str) -> None:
    """Check that a picture can be written to `path`, before there is one.

    Raises:
        InvalidOption: Its ending is none of `.svg`, `.png` and `.html`.
        UsageError: Its directory is not there, or it is a directory itself.
        MissingDependency: matplotlib is not installed.
    """
    if _extension(path) not in _EXTENSIONS:
        raise InvalidOption(
            f"plot={path!r} must end in one of {', '.join(_EXTENSIONS)}, which says what is "
            "written",
            option="plot",
        )
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise UsageError(f"plot={path!r}: there is no directory {directory!r}; make it first")
    if os.path.isdir(path):
        raise UsageError(f"plot={path!r} is a directory; name a file")
    if find_spec("matplotlib") is None:
        raise _missing()


def write_plot(
    path: str, plans: Sequence[Plan], sweeps: Sequence[Sweep], shared: SharedPlan | None
) -> None:
    """Write a picture of plans to `path`, in place of what is there, in one step.

    Args:
        path: Its ending says what is written.
        plans: One or more; those of `shared` where it is given.
        sweeps: One for each plan, in the same order.
        shared: The plan of all of them on the same devices, None where each has its own.

    Raises:
        InvalidOption, UsageError, MissingDependency: As `check_plot_path`.
        EditFailed: The system refuses to write; what was there is unchanged.
    """
    check_plot_path(path)
    try:
        from reblock.planning.plot_figure import draw_png, draw_svg
    except ImportError as error:
        raise _missing() from error
    if _extension(path) == ".png":
        _replace(path, draw_png(plans, sweeps, shared))
        return
    svg = _with_description(draw_svg(plans, sweeps, shared).decode(), describe(plans, shared))
    if _extension(path) == ".html":
        svg = make_page(plans, shared, svg[svg.index("<svg") :].rstrip())
    _replace(path, svg.encode())


def _extension(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _missing() -> MissingDependency:
    return MissingDependency(
        f"a picture of a plan needs matplotlib, which is not installed: {_INSTALL}",
        package="matplotlib",
        install=_INSTALL,
    )


def _with_description(svg: str, text: str) -> str:
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(text)}" ', 1)


def _replace(path: str, content: bytes) -> None:
    """Write a file beside `path` and put it in its place, so that no reader sees a part of it."""
    try:
        with tempfile.TemporaryDirectory(
            prefix=".reblock-plot-", dir=os.path.dirname(path) or "."
        ) as staging:
            staged = os.path.join(staging, "plot")
            with open(staged, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, path)
    except OSError as error:
        raise EditFailed(f"{path} cannot be written: {error.strerror}", path=path) from error
