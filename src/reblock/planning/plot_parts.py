"""The bars of a picture as values: what lies on every chiplet, in which order and which grey.

    | weights | ... | KV cache | alignment | free || outside the budget | reserve |
    0                                      budget ^             available ^  memory ^

A bar that does not fit goes on beyond the budget, and what it covers there is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reblock.devices import Device
    from reblock.planning.result import Plan, SharedPlan
    from reblock.sizing import ChipletUse

__all__ = ["Bar", "BarGroup", "Part", "Style", "make_groups", "printable", "shorten", "term_styles"]

# More are drawn once with their number where they are alike, and the fullest where they are not.
_MOST_BARS = 16
_MOST_DIFFERENT_BARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a part is filled, for paper without colours: 0.0 is black; no hatch is plain."""

    grey: float
    hatch: str


# A part differs from all others in its hatch, or by much in its grey. Hatches are of lines alone,
# as dots make files ten times as large.
_TERM_STYLES = {
    "Weight": Style(grey=0.45, hatch=""),
    "Command": Style(grey=0.9, hatch="++"),
    "Runtime": Style(grey=0.8, hatch="|||"),
    "Workspace": Style(grey=0.75, hatch="\\\\\\"),
}
_MORE_TERM_STYLES = (
    Style(grey=0.85, hatch="-\\\\"),
    Style(grey=0.65, hatch="++xx"),
    Style(grey=0.95, hatch="|\\\\"),
    Style(grey=0.7, hatch="xx|"),
)
_OTHER_TERMS = ("other terms", Style(grey=0.6, hatch="xx-"))
_FIXED_CACHE = ("fixed KV cache", Style(grey=0.85, hatch="//-"))
_BLOCKS = ("KV cache blocks", Style(grey=0.95, hatch="///"))
_ALIGNMENT = ("alignment", Style(grey=0.0, hatch=""))
_FREE = ("free", Style(grey=1.0, hatch=""))
_OUTSIDE = ("outside the budget", Style(grey=1.0, hatch="---"))
_RESERVE = ("reserve", Style(grey=0.9, hatch="xxxx"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a bar; `tenant` is the place of its plan among several that share a device."""

    name: str
    num_bytes: int
    style: Style
    tenant: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What is on one chiplet, or on each of `count` alike; parts follow each other from 0 on."""

    label: str
    count: int
    parts: tuple[Part, ...]
    used_bytes: int
    budget_bytes: int
    memory_bytes: int

    @property
    def overflow_bytes(self) -> int:
        """What does not fit into the budget."""
        return max(0, self.used_bytes - self.budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """The bars of one plan; `num_hidden` chiplets have more room than all that are drawn."""

    title: str
    bars: tuple[Bar, ...]
    num_hidden: int


def printable(text: str) -> str:
    """Return text in which nothing is left that is not seen, or that XML does not allow.

    >>> printable("a\\nb")
    'a\\\\nb'
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def shorten(text: str, length: int) -> str:
    """Return text with its middle left out where it is too long; names differ at their ends."""
    if len(text) <= length:
        return text
    tail = length // 2
    return f"{text[: length - tail - 3]}...{text[-tail:]}"


def term_styles(plans: Sequence[Plan]) -> dict[str, Style]:
    """Return the styles of those terms that are drawn on their own; the rest is drawn as one."""
    sizes: dict[str, int] = {}
    for plan in plans:
        for use in plan.chiplets:
            for name, num_bytes in use.static_bytes.items():
                sizes[name] = sizes.get(name, 0) + num_bytes
    styles = {name: _TERM_STYLES[name] for name in sizes if name in _TERM_STYLES}
    others = sorted(sizes.keys() - styles.keys(), key=lambda name: (-sizes[name], name))
    return styles | dict(zip(others, _MORE_TERM_STYLES, strict=False))


def make_groups(plans: Sequence[Plan], shared: SharedPlan | None) -> tuple[BarGroup, ...]:
    """Return the bars of every plan, or of all that share a device together."""
    styles = term_styles(plans)
    if shared is not None:
        groups = [_group("", _shared_bars(shared, styles))]
    else:
        groups = [
            _group(_title(number, plan) if len(plans) > 1 else "", _plan_bars(plan, styles))
            for number, plan in enumerate(plans, start=1)
        ]
    if sum(len(group.bars) for group in groups) > _MOST_BARS:
        groups = [_with_fewer(group) for group in groups]
    return tuple(groups)


def _title(number: int, plan: Plan) -> str:
    return printable(f"{number}  {plan.name} on {plan.target.text}")


def _group(title: str, bars: Sequence[Bar]) -> BarGroup:
    return BarGroup(title=title, bars=tuple(bars), num_hidden=0)


def _with_fewer(group: BarGroup) -> BarGroup:
    alike: dict[Bar, list[Bar]] = {}
    for bar in group.bars:
        alike.setdefault(replace(bar, label=""), []).append(bar)
    bars = [
        replace(found[0], label=f"{found[0].label}, x {len(found)}", count=len(found))
        if len(found) > 1
        else found[0]
        for found in alike.values()
    ]
    fullest = sorted(bars, key=lambda bar: -bar.used_bytes)[:_MOST_DIFFERENT_BARS]
    drawn = [bar for bar in bars if bar in fullest]
    hidden = sum(bar.count for bar in bars) - sum(bar.count for bar in drawn)
    return replace(group, bars=tuple(drawn), num_hidden=hidden)


def _plan_bars(plan: Plan, styles: Mapping[str, Style]) -> list[Bar]:
    device = plan.target.device
    num_nodes = len({use.node for use in plan.chiplets})
    bars = []
    for use in plan.chiplets:
        label = _label(use, device, num_nodes)
        if len(plan.chiplets) > 1 and (use.node, use.chiplet) == plan.tightest:
            label += " (tightest)"
        used = _used_parts(use, styles, None)
        bars.append(_bar(label, used, device, use.budget_bytes))
    return bars


def _shared_bars(shared: SharedPlan, styles: Mapping[str, Style]) -> list[Bar]:
    device = shared.plans[0].target.device
    uses: dict[tuple[int, int], list[tuple[int, ChipletUse]]] = {}
    for tenant, plan in enumerate(shared.plans):
        for use in plan.chiplets:
            uses.setdefault((use.node, use.chiplet), []).append((tenant, use))
    num_nodes = len({node for node, _ in uses})
    # Budgets of their own may add up to more than there is.
    budget_bytes = min(shared.budget_bytes, shared.available_bytes) // device.num_chiplets
    bars = []
    for _, found in sorted(uses.items()):
        parts = [part for tenant, use in found for part in _used_parts(use, styles, tenant)]
        bars.append(_bar(_label(found[0][1], device, num_nodes), parts, device, budget_bytes))
    return bars


def _label(use: ChipletUse, device: Device, num_nodes: int) -> str:
    places = []
    if num_nodes > 1:
        places.append(f"node {use.node}")
    if device.num_chiplets > 1:
        places.append(f"chiplet {use.chiplet}")
    return ", ".join(places) or device.name


def _used_parts(use: ChipletUse, styles: Mapping[str, Style], tenant: int | None) -> list[Part]:
    named = [(name, use.static_bytes.get(name, 0), style) for name, style in styles.items()]
    rest = sum(size for name, size in use.static_bytes.items() if name not in styles)
    named += [
        (_OTHER_TERMS[0], rest, _OTHER_TERMS[1]),
        (_FIXED_CACHE[0], use.fixed_cache_bytes, _FIXED_CACHE[1]),
        (_BLOCKS[0], use.resizable_cache_bytes, _BLOCKS[1]),
        (_ALIGNMENT[0], use.alignment_bytes, _ALIGNMENT[1]),
    ]
    return [
        Part(name=printable(name), num_bytes=num_bytes, style=style, tenant=tenant)
        for name, num_bytes, style in named
        if num_bytes > 0
    ]


def _bar(label: str, used: Sequence[Part], device: Device, budget_bytes: int) -> Bar:
    used_bytes = sum(part.num_bytes for part in used)
    memory_bytes = device.dram_bytes // device.num_chiplets
    parts, end = list(used), used_bytes
    for (name, style), limit in (
        (_FREE, budget_bytes),
        (_OUTSIDE, device.available_bytes_per_chiplet),
        (_RESERVE, memory_bytes),
    ):
        if limit > end:
            parts.append(Part(name=name, num_bytes=limit - end, style=style, tenant=None))
            end = limit
    return Bar(
        label=label,
        count=1,
        parts=tuple(parts),
        used_bytes=used_bytes,
        budget_bytes=budget_bytes,
        memory_bytes=memory_bytes,
    )
