"""A page of its own with a picture of plans and their numbers as tables; nothing is fetched."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from reblock.planning.plot_parts import printable
from reblock.units import format_bytes, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reblock.planning.result import Plan, SharedPlan, Term

__all__ = ["describe", "make_page"]

_STYLE = """
body { font: 15px/1.45 sans-serif; color: black; background: white; max-width: 62em;
       margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 1.6em; }
h1, h2, td { overflow-wrap: anywhere; }
figure { margin: 0; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 0.8em 0; }
caption { text-align: left; font-weight: bold; }
th, td { border-bottom: 1px solid #999; padding: 0.2em 0.8em 0.2em 0; text-align: left;
         vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
@media print { body { margin: 0; max-width: none; font-size: 10pt; }
               table, figure { break-inside: avoid; } }
"""


def describe(plans: Sequence[Plan], shared: SharedPlan | None) -> str:
    """Return in words what the picture shows, for those who do not see it."""
    lines = ["Bars of the memory of every chiplet, and blocks and requests over the budget."]
    if shared is not None:
        lines.append(f"{shared.explanation}.")
    lines += [f"{plan.name} on {plan.target.text}: {_answer(plan)}." for plan in plans]
    return printable(" ".join(lines))


def make_page(plans: Sequence[Plan], shared: SharedPlan | None, svg: str) -> str:
    """Return the page; `svg` is the element alone."""
    title = " + ".join(dict.fromkeys(plan.name for plan in plans))
    devices = ", ".join(dict.fromkeys(plan.target.text for plan in plans))
    heading = _text(f"{title} on {devices}")
    body = [f"<h1>{heading}</h1>"]
    if shared is not None:
        body.append(f"<p>{_text(shared.explanation)}</p>")
    body.append(f"<figure>\n{svg}\n</figure>")
    for plan in plans:
        body += _section(plan)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _answer(plan: Plan) -> str:
    if plan.num_blocks is None or plan.capacity is None:
        return plan.explanation
    return (
        f"{plan.num_blocks:,} blocks, {plan.capacity.num_full_sequences:,} requests of "
        f"{plan.max_seq_len:,} tokens; {plan.explanation}"
    )


def _section(plan: Plan) -> Iterable[str]:
    yield f"<h2>{_text(plan.name)}</h2>"
    yield _table("Answer", [f"<tr><th scope='row'>{n}</th>{v}</tr>" for n, v in _facts(plan)])
    yield _table(f"Memory of node {plan.waterfall.node}", _waterfall(plan))
    for caption, lines in (("What would make it fit", plan.advice), ("Notes", plan.notes)):
        if lines:
            items = "".join(f"<li>{_text(line)}</li>" for line in lines)
            yield f"<h3>{caption}</h3>\n<ul>{items}</ul>"


def _table(caption: str, rows: Iterable[str]) -> str:
    return f"<table>\n<caption>{caption}</caption>\n" + "\n".join(rows) + "\n</table>"


def _facts(plan: Plan) -> Iterable[tuple[str, str]]:
    held = plan.capacity
    yield "device", _cell(plan.target.text)
    yield "budget of one device", _cell(f"{plan.budget.text}, {format_bytes(plan.budget_bytes)}")
    yield "blocks", _cell("does not fit" if plan.num_blocks is None else f"{plan.num_blocks:,}")
    if held is not None:
        yield "requests of the full length", _cell(f"{held.num_full_sequences:,}")
        yield "tokens held", _cell(f"{held.num_tokens:,}")
        yield "longest sequence, tokens", _cell(f"{held.longest_sequence_tokens:,}")
    yield "tokens in a block", _cell(f"{plan.kvcache_block_size:,}")
    yield "limited by", _cell(plan.explanation)
    yield "smallest budget that works", _cell(format_bytes(plan.budgets.smallest_bytes))


def _cell(text: str) -> str:
    return f"<td>{_text(text)}</td>"


def _waterfall(plan: Plan) -> Iterable[str]:
    fall = plan.waterfall
    yield (
        "<tr><th scope='col'>what</th><th scope='col'></th><th scope='col'>bytes</th>"
        "<th scope='col'>known</th></tr>"
    )
    yield _row("memory", fall.dram_bytes, "")
    yield _row("- reserve", fall.reserve_bytes, "")
    yield _row("- outside the budget", fall.outside_budget_bytes, "")
    yield _row("= budget", fall.budget_bytes, "")
    for term in fall.terms:
        yield _row(f"- {_term_name(term, plan)}", term.num_bytes, _known(term))
    yield _row("= free" if fall.unused_bytes >= 0 else "= too much", abs(fall.unused_bytes), "")


def _term_name(term: Term, plan: Plan) -> str:
    if term.name != "KV cache blocks":
        return term.name
    fall = plan.waterfall
    return f"{term.name}, {fall.num_blocks:,} of {format_gib(fall.bytes_per_block)}"


def _known(term: Term) -> str:
    if term.error_bytes is None:
        return f"{term.basis}, error not known: {term.source}"
    error = f", off by up to {format_gib(term.error_bytes)}" if term.error_bytes else ""
    return f"{term.basis}{error}: {term.source}"


def _row(name: str, num_bytes: int, known: str) -> str:
    return (
        f"<tr><th scope='row'>{_text(name)}</th><td class='number'>{format_gib(num_bytes)}</td>"
        f"<td class='number'>{num_bytes:,}</td>{_cell(known)}</tr>"
    )
