"""Pictures of plans: what they show, that they can be read, and how they are written."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from plans_to_draw import make, make_shared, make_source, with_terms

from reblock.errors import EditFailed, InvalidOption, MissingDependency, UsageError
from reblock.planning.plot import check_plot_path, write_plot
from reblock.planning.plot_html import make_page
from reblock.planning.plot_parts import make_groups, printable, shorten
from reblock.units import GIB, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    from reblock.planning import Plan, SharedPlan
    from reblock.planning.sweep import Sweep

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE_NAMES = (
    "a$b_{c}$",
    "$\\frac{1}{",
    "_underscore",
    "<script>alert(1)</script>&\"'-->]]>",
    "한국어 모델/日本語 العربية 😀",
    "\x00\x1b[31mred\nline\u202e\udcff\ufffe",
    "long/" + "name_without_spaces_" * 40,
    "%s {0} \\n",
)


def write(
    path: Path, made: tuple[Plan, Sweep] | None = None, shared: SharedPlan | None = None
) -> bytes:
    pytest.importorskip("matplotlib")
    plan, sweep = made or make()
    write_plot(str(path), [plan], [sweep], shared)
    return path.read_bytes()


def parse(svg: bytes) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - of our own making


def texts_of(svg: bytes) -> list[str]:
    return ["".join(element.itertext()) for element in parse(svg).iter(f"{SVG}text")]


class Page(HTMLParser):
    """Collects the text and the tags of a page, and that every tag is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", ["plan.svg", "plan.png", "plan.html", "PLAN.SVG", "a.b.Png"])
def test_check_plot_path_takes_the_three_endings_in_any_case(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    check_plot_path(str(tmp_path / name))


@pytest.mark.parametrize("name", ["plan", "plan.pdf", "plan.svg.gz", ".svg", "svg", "plan.htm"])
def test_check_plot_path_refuses_other_endings(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOption, match=r"must end in one of \.svg, \.png, \.html"):
        check_plot_path(str(tmp_path / name))


def test_check_plot_path_refuses_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        check_plot_path(str(tmp_path / "absent" / "plan.svg"))


def test_check_plot_path_refuses_a_directory_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.svg").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        check_plot_path(str(tmp_path / "plan.svg"))


def test_check_plot_path_takes_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("plan.svg"))
    assert (tmp_path / "plan.svg").exists()


def test_missing_matplotlib_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sweep = make()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "plan.svg"
    with pytest.raises(MissingDependency, match=r"pip install 'reblock\[plot\]'") as caught:
        write_plot(str(path), [plan], [sweep], None)
    assert caught.value.package == "matplotlib"
    with pytest.raises(MissingDependency):
        check_plot_path(str(path))
    assert os.listdir(tmp_path) == []


def test_broken_matplotlib_is_a_missing_dependency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    plan, sweep = make()
    monkeypatch.setitem(sys.modules, "reblock.planning.plot_figure", None)
    with pytest.raises(MissingDependency):
        write_plot(str(tmp_path / "plan.svg"), [plan], [sweep], None)


SCRIPT = """
import sys
from reblock.planning import PlanSettings, make_plan, open_subject, parse_target
from reblock.planning.plot import check_plot_path, write_plot
from reblock.planning.sweep import sweep_budgets
from reblock.budget import WHOLE_DEVICE
check_plot_path("plan.svg")
assert not {"matplotlib", "numpy"} & sys.modules.keys()
model, target = open_subject(sys.argv[1]), parse_target("RBLN-CA25")
plan = make_plan(model, PlanSettings(max_seq_len=4096), target, WHOLE_DEVICE)
sweep = sweep_budgets(model, PlanSettings(max_seq_len=4096), target)
import matplotlib
def settings():
    # To ask for the backend is to choose one, which imports pyplot.
    params = matplotlib.rcParams
    return {name: params[name] for name in params if name != "backend"}
before = settings()
write_plot("plan.svg", [plan], [sweep], None)
write_plot("plan.png", [plan], [sweep], None)
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""


def test_plot_is_light_until_it_draws_and_changes_nothing_global(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = Path(__file__).parents[1] / "data" / "model_configs" / "Qwen3-0.6B"
    subprocess.run([sys.executable, "-c", SCRIPT, str(model)], cwd=tmp_path, check=True)


def test_svg_is_well_formed_and_has_the_numbers(tmp_path: Path) -> None:
    plan, _ = made = make(budget="80%", batch_size=4)
    svg = write(tmp_path / "plan.svg", made)
    texts = texts_of(svg)
    assert plan.capacity is not None
    answer = f"{plan.num_blocks} blocks, {plan.capacity.num_full_sequences} requests"
    assert sum(answer in text for text in texts) == 2
    assert f"models/small on {plan.target.text}" in texts
    joined = "\n".join(texts)
    for part in make_groups([plan], None)[0].bars[0].parts:
        assert f"{part.name} {format_gib(part.num_bytes)}" in joined
    assert f"budget {format_gib(plan.budget_bytes)}" in joined
    root = parse(svg)
    assert root.get("role") == "img"
    assert answer in str(root.get("aria-label"))


def test_png_has_its_signature_and_150_dots_an_inch(tmp_path: Path) -> None:
    png = write(tmp_path / "plan.png")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1500
    assert 500 < height < 1500
    place = png.index(b"pHYs")
    assert struct.unpack(">II", png[place + 4 : place + 12]) == (5906, 5906)


def test_html_is_one_page_with_the_picture_and_the_numbers(tmp_path: Path) -> None:
    plan, _ = made = make(budget="80%", batch_size=4)
    text = write(tmp_path / "plan.html", made).decode()
    assert text.startswith("<!DOCTYPE html>\n")
    page = Page(text)
    assert page.open == []
    assert ("html", "lang", "en") in page.attributes
    assert ("meta", "charset", "utf-8") in page.attributes
    assert ("svg", "role", "img") in page.attributes
    assert plan.capacity is not None
    for number in (
        f"{plan.num_blocks:,}",
        f"{plan.capacity.num_full_sequences:,}",
        f"{plan.capacity.num_tokens:,}",
        plan.explanation,
        f"{plan.budget_bytes:,}",
        f"{plan.waterfall.unused_bytes:,}",
        *(f"{term.num_bytes:,}" for term in plan.waterfall.terms),
    ):
        assert number in page.texts
    joined = "".join(page.texts)
    for term in plan.waterfall.terms:
        assert term.source in joined


def test_html_fetches_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page = Page(write(tmp_path / "plan.html").decode())
    tags = {tag for tag, _, _ in page.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "base"}
    for _, name, value in page.attributes:
        assert name not in ("src", "href", "action")
        assert not name.startswith("on")
        if name == "xlink:href":
            assert str(value).startswith("#")


def test_html_of_what_does_not_fit_says_what_would(tmp_path: Path) -> None:
    plan, _ = made = make(budget="2GB")
    assert plan.advice
    page = Page(write(tmp_path / "plan.html", made).decode())
    assert "does not fit" in page.texts
    assert set(plan.advice) <= set(page.texts)
    assert f"{-plan.waterfall.unused_bytes:,}" in page.texts


@pytest.mark.parametrize("extension", ["svg", "png"])
def test_the_same_plan_gives_the_same_bytes(tmp_path: Path, extension: str) -> None:
    first = write(tmp_path / f"first.{extension}")
    assert first == write(tmp_path / f"second.{extension}")


def test_settings_of_the_user_change_nothing(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    plain = write(tmp_path / "plain.svg")
    changes = {"font.size": 30, "svg.fonttype": "path", "axes.grid": True, "lines.linewidth": 9}
    with matplotlib.rc_context(changes):
        assert write(tmp_path / "changed.svg") == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_name_that_no_font_has_is_no_warning_in_a_png(tmp_path: Path) -> None:
    plan, sweep = make(source=make_source("한국어 모델/日本語"))
    assert write(tmp_path / "plan.png", (plan, sweep))


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    plan, sweep = make(source=make_source(name))
    made = with_terms(plan, **{name: GIB}), sweep
    svg = write(tmp_path / "plan.svg", made)
    # A long name goes on in the next line.
    joined = "".join(texts_of(svg)).replace(" ", "")
    assert shorten(printable(name), 212).replace(" ", "") in joined
    assert shorten(printable(name), 32).replace(" ", "") in joined
    assert printable(name) in str(parse(svg).get("aria-label"))
    page = Page(make_page([with_terms(plan, **{name: GIB})], None, "<svg></svg>"))
    assert page.open == []
    assert printable(name) in page.texts
    assert not any(tag == "script" for tag, _, _ in page.attributes)


def test_nothing_is_smaller_than_8_points(tmp_path: Path) -> None:
    svg = write(tmp_path / "plan.svg")
    styles = [str(text.get("style")) for text in parse(svg).iter(f"{SVG}text")]
    sizes = [float(style.split("font-size: ")[1].split("px")[0]) for style in styles]
    assert len(sizes) > 20
    assert min(sizes) >= 8


def test_picture_is_put_in_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    path.write_text("old")
    mask = os.umask(0o022)
    try:
        assert write(path).startswith(b"<?xml")
    finally:
        os.umask(mask)
    assert os.listdir(tmp_path) == ["plan.svg"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_refused_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    path.write_text("old")

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    plan, sweep = make()
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(EditFailed, match=r"plan\.svg cannot be written: No space left"):
        write_plot(str(path), [plan], [sweep], None)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.svg"]


def test_bar_that_does_not_fit_goes_on_beyond_the_budget(tmp_path: Path) -> None:
    plan, _ = made = make(budget="2GB")
    (bar,) = make_groups([plan], None)[0].bars
    assert bar.overflow_bytes == -plan.chiplets[0].free_bytes > 0
    assert "free" not in [part.name for part in bar.parts]
    assert sum(part.num_bytes for part in bar.parts) == bar.memory_bytes
    texts = texts_of(write(tmp_path / "plan.svg", made))
    assert f"{format_gib(bar.overflow_bytes)} too much" in texts
    smallest = format_gib(plan.budgets.smallest_bytes)
    assert f"does not fit: the smallest budget is {smallest}" in texts


def test_bar_beyond_all_memory_ends_with_what_is_used(tmp_path: Path) -> None:
    plan, sweep = make(source=make_source(num_hidden_layers=400))
    assert sweep.points == ()
    (bar,) = make_groups([plan], None)[0].bars
    assert bar.used_bytes > bar.memory_bytes
    assert sum(part.num_bytes for part in bar.parts) == bar.used_bytes
    texts = texts_of(write(tmp_path / "plan.svg", (plan, sweep)))
    assert f"memory {format_gib(bar.memory_bytes)}" in texts
    assert any(text.startswith("No budget works") for text in texts)


def test_term_of_an_artifact_called_as_one_of_ours_keeps_a_style_of_its_own(
    tmp_path: Path,
) -> None:
    plan, sweep = make()
    plan = with_terms(plan, free=3 * GIB)
    named = [part for part in make_groups([plan], None)[0].bars[0].parts if part.name == "free"]
    assert len({part.style for part in named}) == len(named)
    texts = texts_of(write(tmp_path / "plan.svg", (plan, sweep)))
    assert "free 3.00 GiB" in texts


def test_more_than_16_chiplets_are_drawn_once_where_they_are_alike(tmp_path: Path) -> None:
    plan, sweep = make("RBLN-CR13x8")
    heavier = replace(plan.chiplets[30], static_bytes={"Weight": 5 * GIB})
    chiplets = (*plan.chiplets[:30], heavier, plan.chiplets[31])
    plan = replace(plan, chiplets=chiplets, tightest=(7, 2))
    (group,) = make_groups([plan], None)
    assert [bar.label for bar in group.bars] == [
        "node 0, chiplet 0, x 31",
        "node 7, chiplet 2 (tightest)",
    ]
    assert [bar.count for bar in group.bars] == [31, 1]
    assert "node 0, chiplet 0, x 31" in texts_of(write(tmp_path / "plan.svg", (plan, sweep)))


def test_shared_bar_has_the_parts_of_every_tenant(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shared, sweeps = make_shared("60%")
    (group,) = make_groups(shared.plans, shared)
    assert len(group.bars) == 4
    for bar, *uses in zip(group.bars, *(plan.chiplets for plan in shared.plans), strict=True):
        assert bar.used_bytes == sum(use.used_bytes for use in uses)
        assert bar.budget_bytes == shared.budget_bytes // 4
        tenants = [part.tenant for part in bar.parts if part.tenant is not None]
        assert tenants == sorted(tenants)
        assert set(tenants) == {0, 1}
    path = tmp_path / "plan.svg"
    write_plot(str(path), shared.plans, sweeps, shared)
    texts = texts_of(path.read_bytes())
    assert "2 together on RBLN-CR13" in texts
    assert any(text.startswith("1  models/first: ") for text in texts)
    assert any(text.startswith("2  models/second: ") for text in texts)


def test_html_of_a_shared_device_has_a_table_for_every_tenant(tmp_path: Path) -> None:
    shared, _ = make_shared("60%")
    page = Page(make_page(shared.plans, shared, "<svg></svg>"))
    assert page.open == []
    assert page.texts.count("Answer") == 2
    assert shared.explanation in page.texts
    assert {"models/first", "models/second"} <= set(page.texts)


def test_budget_far_above_the_last_step_is_named_but_not_drawn(tmp_path: Path) -> None:
    made = make(batch_size=8, max_seq_len=8192, kvcache_partition_len=1024)
    texts = texts_of(write(tmp_path / "plan.svg", made))
    assert "answer" in texts
    assert "budget" not in texts
    assert any("of the budget of 15.72 GiB" in text for text in texts)


def test_plans_that_share_nothing_are_drawn_below_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = [make(), make("RBLN-CA25x2", "40%", batch_size=2), make(budget="2GB")]
    plans, sweeps = [plan for plan, _ in made], [sweep for _, sweep in made]
    path = tmp_path / "plan.svg"
    write_plot(str(path), plans, sweeps, None)
    texts = texts_of(path.read_bytes())
    for title in (
        "1  models/small on RBLN-CA25",
        "2  models/small on RBLN-CA25x2",
        "3  models/small on RBLN-CA25",
    ):
        assert title in texts
    assert any(text.startswith("3  models/small: does not fit") for text in texts)


def test_answer_lies_on_the_line_where_not_all_steps_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    from reblock.planning.plot_sweep import _curves

    plan, sweep = make("RBLN-CR13", "43%", max_seq_len=1024)
    assert plan.needed_bytes not in [point.budget_bytes for point in sweep.points]
    curves = _curves(plan, sweep)
    assert curves.blocks[curves.budgets.index(plan.needed_bytes / GIB)] == plan.num_blocks
    assert sorted(curves.budgets) == list(curves.budgets)
    assert sorted(curves.blocks) == list(curves.blocks)
    assert sorted(curves.requests) == list(curves.requests)


def pictured() -> Iterator[tuple[list[Plan], list[Sweep], SharedPlan | None]]:
    for npu, budget in (("RBLN-CA25", "100%"), ("cpu:64GB", "90%"), ("RBLN-CR13x2", "30%")):
        plan, sweep = make(npu, budget)
        yield [plan], [sweep], None
    plan, sweep = make(source=make_source("name/" * 100, num_hidden_layers=400), budget="5GB")
    plan = with_terms(plan, **{"term " * 30: 3 * GIB, "_term": GIB})
    yield [plan], [sweep], None
    shared, sweeps = make_shared("60%")
    yield list(shared.plans), sweeps, shared
    plans = [make(), make("RBLN-CA25x2", "40%", batch_size=2)]
    yield [plan for plan, _ in plans], [sweep for _, sweep in plans], None


def ticks_out_of_view(figure: Figure) -> list[Artist]:
    """Return the labels of ticks that are there but are not drawn."""
    return [
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not (min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval()))
        or not label.get_visible()
        or not axes.axison
    ]


def test_no_text_is_cut_off_and_no_label_leaves_its_bar() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from reblock.planning.plot_figure import _make_figure

    for plans, sweeps, shared in pictured():
        figure = _make_figure(plans, sweeps, shared)
        figure.draw_without_rendering()
        beyond = ticks_out_of_view(figure)
        texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t not in beyond]
        for text in texts:
            box = text.get_window_extent()
            assert box.x0 >= -1, text
            assert box.y0 >= -1, text
            assert box.x1 <= figure.bbox.width + 1, text
            assert box.y1 <= figure.bbox.height + 1, text
        # Those that were fitted into the bars are out of the layout.
        labels = [text.get_window_extent() for text in texts if not text.get_in_layout()]
        assert labels
        for one, other in combinations(labels, 2):
            assert not one.overlaps(other)
