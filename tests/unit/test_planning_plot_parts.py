"""The bars of a picture as values: they add up, and no two parts look the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from plans_to_draw import make, make_shared, with_terms

from reblock.planning.plot_parts import make_groups, printable, shorten, term_styles
from reblock.units import GIB, MIB


@pytest.mark.parametrize(
    ("npu", "budget"), [("RBLN-CA25x4", "100%"), ("RBLN-CR13", "50%"), ("cpu:16GB", "80%")]
)
def test_parts_of_a_bar_add_up_to_the_memory_of_the_chiplet(npu: str, budget: str) -> None:
    plan, _ = make(npu, budget)
    (group,) = make_groups([plan], None)
    assert len(group.bars) == len(plan.chiplets)
    for bar, use in zip(group.bars, plan.chiplets, strict=True):
        sizes = {part.name: part.num_bytes for part in bar.parts}
        assert sum(sizes.values()) == plan.target.device.dram_bytes // len(
            {use.chiplet for use in plan.chiplets}
        )
        assert sizes.items() >= use.static_bytes.items()
        assert sizes["KV cache blocks"] == use.resizable_cache_bytes
        assert sizes.get("free", 0) == use.free_bytes
        assert sizes["reserve"] == plan.target.device.reserve_bytes_per_chiplet
        assert bar.overflow_bytes == 0


def test_greys_and_hatches_of_all_parts_are_different() -> None:
    plan, _ = make(budget="60%")
    more = {"Command": MIB, "Runtime": MIB, **{f"term {index}": MIB for index in range(9)}}
    plan = with_terms(plan, **more)
    uses = [replace(use, fixed_cache_bytes=MIB, alignment_bytes=MIB) for use in plan.chiplets]
    plan = replace(plan, chiplets=tuple(uses))
    parts = make_groups([plan], None)[0].bars[0].parts
    assert len(parts) == 15
    for one, other in combinations(parts, 2):
        assert one.name != other.name
        if sorted(one.style.hatch) == sorted(other.style.hatch):
            assert abs(one.style.grey - other.style.grey) >= 0.4


def test_more_terms_than_there_are_styles_are_added_up() -> None:
    plan, _ = make()
    plan = with_terms(plan, **{f"term {index}": index * MIB for index in range(1, 10)})
    styles = term_styles([plan])
    assert [name for name in styles if name.startswith("term")] == [
        "term 9",
        "term 8",
        "term 7",
        "term 6",
    ]
    sizes = {part.name: part.num_bytes for part in make_groups([plan], None)[0].bars[0].parts}
    assert sizes["term 6"] == 6 * MIB
    assert sizes["other terms"] == (1 + 2 + 3 + 4 + 5) * MIB


def test_up_to_16_chiplets_are_drawn_one_by_one() -> None:
    plan, _ = make("RBLN-CR13x4")
    (group,) = make_groups([plan], None)
    assert len(group.bars) == 16
    assert group.bars[0].label == "node 0, chiplet 0 (tightest)"
    assert group.bars[15].label == "node 3, chiplet 3"


def test_of_many_different_chiplets_the_fullest_are_drawn() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from reblock.planning.plot_bars import draw_bars, num_rows

    plan, _ = make("RBLN-CA25x64")
    chiplets = [
        replace(use, static_bytes={"Weight": GIB + use.node * MIB}) for use in plan.chiplets
    ]
    groups = make_groups([replace(plan, chiplets=tuple(chiplets))], None)
    assert [bar.label for bar in groups[0].bars] == [f"node {node}" for node in range(24, 64)]
    assert groups[0].num_hidden == 24
    assert num_rows(groups) == 41
    axes = figure.add_subplot()
    draw_bars(axes, groups, "device")
    assert "and 24 chiplets with more room" in [text.get_text() for text in axes.texts]


def test_shared_budgets_above_the_device_are_drawn_up_to_it() -> None:
    shared, _ = make_shared("80%", "70%")
    assert shared.budget_bytes > shared.available_bytes
    (group,) = make_groups(shared.plans, shared)
    assert {bar.budget_bytes for bar in group.bars} == {shared.available_bytes // 4}


def test_printable_leaves_what_is_seen_and_writes_out_the_rest() -> None:
    assert printable("a$b 모델") == "a$b 모델"
    assert printable("\x00\n\u202e\udcff") == "\\x00\\n\\u202e\\udcff"


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdefghijkl", 9) == "ab...ijkl"
