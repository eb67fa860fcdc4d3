"""The report of one plan: the answer, where the memory goes, what would change it, what to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.cli.plan_bar import memory_bar
from reblock.cli.tables import add_size, labelled, make_table, paragraph, render
from reblock.units import format_bytes, format_gib

if TYPE_CHECKING:
    from reblock.planning.result import CachedModel, Command, LayerGroup, NextStep, Plan, Term
    from reblock.sizing import ChipletUse

__all__ = [
    "advice_text",
    "commands_text",
    "describe",
    "devices",
    "kept",
    "notes_text",
    "report",
]

_TERMS = {
    "Weight": "weights",
    "Runtime": "runtime",
    "Workspace": "workspace",
    "Command": "commands of the programs",
    "fixed KV cache": "KV cache of fixed size",
}


def report(plan: Plan) -> str:
    """Return everything that is to be said of one plan, as text of 80 columns."""
    sections = [
        _overview(plan),
        _answer(plan),
        _layers(plan.model),
        _memory(plan),
        memory_bar(plan.waterfall),
        _limits(plan),
        commands_text(plan.commands),
        notes_text(plan.notes),
    ]
    return "\n\n".join(section for section in sections if section)


def advice_text(advice: tuple[str, ...]) -> str:
    """Return what would make a plan fit, to stand behind the reason why it does not."""
    if not advice:
        return ""
    lines = [paragraph(line, first="  - ", indent=4) for line in advice]
    return "\n".join(["\nwhat would fit:", *lines])


def commands_text(commands: tuple[Command, ...], *, prefix: str = "") -> str:
    """Return commands, each alone on its line however long it is, so that it can be pasted."""
    return "\n\n".join(
        f"{paragraph(prefix + command.text)}:\n\n  {command.line}" for command in commands
    )


def notes_text(notes: tuple[str, ...]) -> str:
    """Return notes, wrapped."""
    return "\n".join(paragraph(note, first="note: ", indent=6) for note in notes)


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Return what holds of a model or an artifact on any device, its name first."""
    rows: list[tuple[str, str]] = [(plan.kind, plan.name)]
    if plan.module is not None:
        rows.append(("module", plan.module))
    parameters = ""
    if plan.num_parameters is not None:
        parameters = f"{plan.num_parameters:,} parameters, "
    rows.append(("type", f"{plan.model_type}, {parameters}weights {plan.weights_dtype}"))
    return rows


def devices(plan: Plan) -> str:
    """Return the devices of a plan and the memory of each."""
    device, count = plan.target.device, plan.target.num_devices
    each = " each" if count > 1 else ""
    parts = f" in {device.num_chiplets} chiplets" if device.num_chiplets > 1 else ""
    return (
        f"{count} x {device.name}: {format_gib(device.dram_bytes)}{parts}, "
        f"{format_gib(device.available_bytes)} available{each}"
    )


def _overview(plan: Plan) -> str:
    rows = [
        *describe(plan),
        ("devices", devices(plan)),
        ("attention", _attention(plan)),
        ("batch", _batch(plan)),
        ("KV cache", kept(plan)),
        ("budget", _budget(plan)),
    ]
    return labelled(rows, whole=("model", "artifact", "module"))


def _attention(plan: Plan) -> str:
    text = f"{plan.attn_impl}, blocks of {plan.kvcache_block_size:,} tokens"
    partition_len = plan.kvcache_partition_len
    if partition_len not in (None, plan.kvcache_block_size):
        text += f", partitions of {partition_len:,} tokens"
    return text


def _batch(plan: Plan) -> str:
    chosen = ""
    if plan.is_batch_chosen:
        chosen = " (as many as fit)" if plan.fits else " (not even one fits)"
    return f"{_requests(plan.batch_size)} of up to {_tokens(plan.max_seq_len)}{chosen}"


def kept(plan: Plan) -> str:
    """Return the cost of a token and of a request, which are two numbers for many models."""
    model = plan.model
    full, fixed = model.full_bytes_per_token, model.fixed_bytes_per_request
    if full:
        text = f"{full:,} bytes a token"
        if fixed:
            text += (
                f" in layers that keep all of them, and {format_bytes(fixed)} a request, however "
                "long it is"
            )
    elif any(group.bytes_per_token and group.window is None for group in model.layers):
        text = (
            f"{model.bytes_per_token:,} bytes a token, and room for all "
            f"{_tokens(plan.max_seq_len)} of a request, {format_bytes(fixed)}, is always kept"
        )
    else:
        text = f"{format_bytes(fixed)} a request, however long it is"
    return f"{text}; {model.kv_dtype}"


def _budget(plan: Plan) -> str:
    available = plan.budgets.available_bytes
    return (
        f"{plan.budget.text} of the {format_gib(available)} available on a device: "
        f"{format_bytes(plan.budget_bytes)}"
    )


def _answer(plan: Plan) -> str:
    held = plan.capacity
    if plan.num_blocks is None or held is None:
        return paragraph(plan.explanation) + advice_text(plan.advice)
    requests = (
        f"{held.num_full_sequences:,} of {_tokens(plan.max_seq_len)} side by side; longest single "
        f"request {_tokens(held.longest_sequence_tokens)}"
    )
    blocks = "none to choose: what a request keeps has a fixed size"
    if plan.waterfall.bytes_per_block:
        blocks = f"{plan.num_blocks:,} of {_tokens(plan.kvcache_block_size)} = "
        blocks += _tokens(held.num_tokens)
    return labelled([("blocks", blocks), ("requests", requests), ("limited by", plan.explanation)])


def _layers(model: CachedModel) -> str:
    if len(model.layers) < 2:
        return ""
    columns = ("number", "KV heads", "width", "window", "a token", "a request")
    table = make_table("Layers, and the bytes that all of a kind keep", "", *columns)
    for group in model.layers:
        table.add_row(*_layer_row(group))
    return render(table)


def _layer_row(group: LayerGroup) -> tuple[str, ...]:
    widths = [group.key_width, group.value_width, group.index_width]
    if not group.bytes_per_token:
        window = ""
    else:
        window = "all" if group.window is None else f"{group.window:,}"
    return (
        group.kind,
        f"{group.num_layers:,}",
        f"{group.num_kv_heads:,}" if group.num_kv_heads else "",
        " + ".join(f"{width:,}" for width in widths if width),
        window,
        f"{group.num_layers * group.bytes_per_token:,}" if group.bytes_per_token else "",
        f"{_fixed_bytes(group):,}" if _fixed_bytes(group) else "",
    )


def _fixed_bytes(group: LayerGroup) -> int:
    """What the layers keep of a request that fills their windows."""
    windows = group.bytes_per_token * (group.window or 0)
    return group.num_layers * (windows + group.state_bytes)


def _memory(plan: Plan) -> str:
    waterfall, sources = plan.waterfall, _sources(plan)
    table = make_table(_memory_title(plan), "", "", "bytes", "known", gap=1)
    add_size(table, "memory of the device", waterfall.dram_bytes)
    add_size(table, "- reserve of the system", waterfall.reserve_bytes)
    add_size(table, "= available", waterfall.available_bytes)
    add_size(table, "- outside the budget", waterfall.outside_budget_bytes)
    add_size(table, f"= budget, {plan.budget.text}", waterfall.budget_bytes)
    for term in waterfall.terms:
        name = _TERMS.get(term.name, term.name)
        if term.name == "KV cache blocks":
            if not waterfall.bytes_per_block:
                continue
            name = f"{_blocks(waterfall.num_blocks)} of {format_gib(waterfall.bytes_per_block)}"
        add_size(table, f"- {name}", term.num_bytes, _known(term, sources))
    unused = "unused" if waterfall.unused_bytes >= 0 else "missing"
    add_size(table, f"= {unused}", waterfall.unused_bytes)
    footnotes = [
        paragraph(source, first=f" ({number}) ", indent=5) for source, number in sources.items()
    ]
    return "\n".join([render(table), *(["", *footnotes] if footnotes else [])])


def _memory_title(plan: Plan) -> str:
    if plan.target.num_devices == 1:
        return "Memory"
    if _is_uneven(plan):
        return f"Memory of device {plan.waterfall.node}, the fullest of {plan.target.num_devices}"
    return f"Memory of each of {plan.target.num_devices} devices"


def _sources(plan: Plan) -> dict[str, int]:
    """Return where the figures that are not exact are from, numbered."""
    sources = [term.source for term in plan.waterfall.terms if term.basis != "exact"]
    return {source: number for number, source in enumerate(dict.fromkeys(sources), start=1)}


def _known(term: Term, sources: dict[str, int]) -> str:
    if term.basis == "exact":
        return "exact"
    text = f"+-{format_gib(term.error_bytes)}" if term.error_bytes else term.basis
    return f"{text} ({sources[term.source]})"


def _limits(plan: Plan) -> str:
    """Return what would change the answer: the next step, budgets, counts."""
    rows = []
    if plan.next_step is not None:
        rows.append(("next step", _next_step(plan, plan.next_step)))
    rows.append(("budgets that work", _budgets(plan)))
    if plan.waterfall.bytes_per_block:
        rows.append(("counts that work", _counts(plan)))
    if _is_uneven(plan):
        rows.append(("tightest chiplet", _tightest(plan)))
    return labelled(rows)


def _next_step(plan: Plan, step: NextStep) -> str:
    what = _requests(step.num_requests)
    if plan.waterfall.bytes_per_block:
        what = f"{_blocks(step.num_blocks)}, {what}"
    share = _percent(step.budget_bytes, plan.budgets.available_bytes)
    there = "" if step.is_available else ", which is more than the device has"
    return (
        f"{what} with a memory budget of {step.budget_bytes} bytes "
        f"({format_gib(step.budget_bytes)}, {share}){there}"
    )


def _budgets(plan: Plan) -> str:
    smallest, available = plan.budgets.smallest_bytes, plan.budgets.available_bytes
    if plan.budgets.is_empty:
        return (
            f"none: {format_bytes(smallest)} is needed, and the device has "
            f"{format_bytes(available)} available"
        )
    return (
        f"{format_gib(smallest)} ({_percent(smallest, available)}) to {format_gib(available)}; "
        f"the smallest is {smallest:,} bytes"
    )


def _counts(plan: Plan) -> str:
    bounds, largest = plan.bounds, plan.largest_num_blocks
    if bounds.minimum == bounds.full:
        text = f"{bounds.full:,} only, for {_requests(plan.batch_size)}"
    else:
        text = f"{bounds.minimum:,} to {bounds.full:,}, for {_requests(plan.batch_size)}"
    if largest is None:
        return f"{text}; the device holds none of them"
    return f"{text}; the most that all of the device would hold is {largest:,}"


def _percent(num_bytes: int, available_bytes: int) -> str:
    """Return a share of the available memory, rounded up: what it says is enough must be enough."""
    hundredths = -(-num_bytes * 10_000 // available_bytes)
    return f"{hundredths // 100:,}.{hundredths % 100:02}%"


def _is_uneven(plan: Plan) -> bool:
    return len({use.used_bytes for use in plan.chiplets}) > 1


def _tightest(plan: Plan) -> str:
    use = _tightest_use(plan)
    left = f"{format_gib(use.free_bytes)} left"
    if use.free_bytes < 0:
        left = f"{format_gib(-use.free_bytes)} missing"
    return (
        f"node {use.node}, chiplet {use.chiplet}: {format_gib(use.used_bytes)} of its share of "
        f"{format_gib(use.budget_bytes)}, {left}"
    )


def _tightest_use(plan: Plan) -> ChipletUse:
    return next(use for use in plan.chiplets if (use.node, use.chiplet) == plan.tightest)


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"
