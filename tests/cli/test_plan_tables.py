"""The text of plans: what it says in which case, its width, and the bar."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import make_artifact
from rbln_artifacts import DATA, LLAMA2_EAGER, QWEN3_CA25, QWEN3_CR13, STANDIN, add_alloc
from rbln_artifacts import copy_artifact as copy_rbln
from reblock.cli.plan_bar import memory_bar, shares
from reblock.cli.plan_comparison import comparison, shared_report
from reblock.cli.plan_tables import report
from reblock.cli.tables import paragraph
from reblock.planning import Plan, PlanSettings, plan, plan_together
from reblock.planning.document import Refused
from reblock.units import GIB, format_gib

if TYPE_CHECKING:
    from reblock.planning.result import Waterfall

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
MODELS = sorted(path.name for path in CONFIGS.iterdir())
QWEN3_8B = str(CONFIGS / "Qwen3-8B")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rebel", raising=False)
    monkeypatch.syspath_prepend(str(STANDIN))


def model_plan(name: str = "Qwen3-8B", **options: Any) -> Plan:
    return plan(str(CONFIGS / name), **{"npu": "RBLN-CR13", **options})


def squeezed(text: str) -> str:
    """Return a text with its words one space apart, as columns and line ends do not matter."""
    return re.sub(r"\s+", " ", text)


def too_long(text: str) -> list[str]:
    """Return the lines over 80 columns that are not there to be copied as one."""
    lines = [line for line in text.splitlines() if len(line) > 80]
    return [
        line
        for line in lines
        if not re.match(r"(model|artifact|\d+) +/|  (reblock|optimum-rbln-cli) ", line)
    ]


# One plan.


def test_the_answer_stands_above_everything_but_the_overview() -> None:
    text = report(model_plan(max_seq_len=8192, memory_budget="80%"))
    overview, answer, memory, *_ = text.split("\n\n")
    assert overview.startswith("model ")
    assert memory == "Memory"
    assert squeezed(answer).startswith(
        "blocks 84 of 8,192 tokens = 688,128 tokens "
        "requests 84 of 8,192 tokens side by side; longest single request 8,192 tokens "
        "limited by the memory budget: one more request of the full length would not fit, it "
    )


def test_the_overview_states_what_the_numbers_are_of() -> None:
    overview = squeezed(report(model_plan(max_seq_len=8192, memory_budget="80%")).split("\n\n")[0])
    for fragment in (
        "type qwen3, 8,190,735,360 parameters, weights bfloat16",
        "devices 1 x RBLN-CR13: 144.00 GiB in 4 chiplets, 140.00 GiB available",
        "attention eager, blocks of 8,192 tokens",
        "batch 84 requests of up to 8,192 tokens (as many as fit)",
        "KV cache 147,456 bytes a token; bfloat16",
        "budget 80% of the 140.00 GiB available on a device: 112.00 GiB (120,259,084,288 bytes)",
    ):
        assert fragment in overview


def test_several_devices_have_their_memory_each() -> None:
    text = report(model_plan(npu="RBLN-CA25x4"))
    assert "4 x RBLN-CA25: 16.00 GiB, 15.72 GiB available each" in text
    assert "Memory of each of 4 devices" in text


def test_the_waterfall_goes_from_the_device_to_what_is_unused() -> None:
    made = model_plan(max_seq_len=8192, memory_budget="80%")
    text = squeezed(report(made))
    for row in (
        "memory of the device 144.00 GiB 154,618,822,656",
        "- reserve of the system 4.00 GiB 4,294,967,296",
        "= available 140.00 GiB 150,323,855,360",
        "- outside the budget 28.00 GiB 30,064,771,072",
        "= budget, 80% 112.00 GiB 120,259,084,288",
        "- workspace 2.00 GiB 2,147,483,648 allowance (1)",
        "- KV cache of fixed size 0 bytes 0 exact",
        "- 84 blocks of 1.13 GiB 94.50 GiB 101,468,602,368 exact",
        "= unused 248.00 MiB 260,046,848",
        "(1) 256 MiB for each of 2 programs on every chiplet",
    ):
        assert row in text


def test_an_estimate_is_shown_with_how_far_it_may_be_off() -> None:
    made = model_plan("SmolLM2-135M", npu="cpu:8GB", max_seq_len=2048)
    estimates = [term for term in made.waterfall.terms if term.basis == "estimate"]
    text = squeezed(report(made))
    assert estimates
    for term in estimates:
        assert term.error_bytes
        assert f"{term.num_bytes:,} +-{format_gib(term.error_bytes)} (1)" in text
        assert f" (1) {term.source}" in text


def test_a_hybrid_model_has_two_costs_and_a_table_of_its_layers() -> None:
    text = squeezed(report(model_plan("gemma-3-27b-it")))
    assert (
        "KV cache 81,920 bytes a token in layers that keep all of them, and 416.00 MiB "
        "(436,207,616 bytes) a request, however long it is; bfloat16" in text
    )
    assert "sliding 52 16 128 + 128 1,024 425,984 436,207,616" in text
    assert "full 10 16 128 + 128 all 81,920" in text


def test_a_model_whose_layers_are_alike_has_no_table_of_them() -> None:
    assert "Layers" not in report(model_plan())


def test_a_model_without_blocks_is_not_said_to_have_any() -> None:
    text = squeezed(report(model_plan("mamba-130m-hf", max_seq_len=2048, batch_size=4)))
    assert "blocks none to choose: what a request keeps has a fixed size" in text
    assert "requests 4 of 2,048 tokens side by side" in text
    assert "bytes) a request, however long it is" in text
    assert not re.search(r"\d blocks? of", text)
    assert "counts that work" not in text


def test_an_artifact_of_eager_attention_keeps_room_for_all_tokens_of_a_request() -> None:
    text = squeezed(report(plan(str(DATA / LLAMA2_EAGER))))
    assert "524,288 bytes a token, and room for all 4,096 tokens of a request, 2.00 GiB" in text


def test_what_the_compiler_reported_is_said_to_be_from_it() -> None:
    text = squeezed(report(plan(str(DATA / QWEN3_CR13))))
    assert "- commands of the programs 300.00 MiB 314,572,800 reported (1)" in text
    assert "(1) reported by the compiler" in text
    assert "counts that work 33 to 160, for 32 requests" in text
    assert "the most that all of the device would hold is 107" in text
    assert "tightest" not in text


def test_chiplets_that_differ_have_the_tightest_named(tmp_path: Path) -> None:
    directory = copy_rbln(QWEN3_CR13, tmp_path / "a")
    add_alloc(directory, "Workspace", 0, 2, 2 * GIB)
    made = plan(str(directory))
    # 2 GiB are 7 blocks of 288 MiB, less what was left.
    assert made.num_blocks == 100
    text = squeezed(report(made))
    assert re.search(
        r"tightest chiplet node 0, chiplet 2: 3\d\.\d\d GiB of its share of 35\.00 GiB, "
        r"\d+\.\d\d [MG]iB left",
        text,
    )


def test_nodes_that_differ_have_the_fullest_shown(tmp_path: Path) -> None:
    directory = copy_rbln(QWEN3_CA25, tmp_path / "a")
    add_alloc(directory, "Workspace", 3, 0, GIB)
    text = report(plan(str(directory)))
    assert "Memory of device 3, the fullest of 4" in text
    assert "tightest chiplet" in text


def test_one_chiplet_that_is_too_full_is_seen_though_others_have_room(tmp_path: Path) -> None:
    directory = copy_rbln(QWEN3_CR13, tmp_path / "a")
    add_alloc(directory, "Weight", 0, 1, 30 * GIB)
    made = plan(str(directory))
    assert not made.fits
    assert made.waterfall.unused_bytes > 0
    text = squeezed(report(made))
    assert re.search(r"tightest chiplet node 0, chiplet 1: .* GiB missing", text)


def test_what_does_not_fit_ends_below_zero_and_says_what_would_fit() -> None:
    made = model_plan(memory_budget="20GB", max_seq_len=32768)
    text = report(made)
    assert text.split("\n\n")[1].startswith("does not fit: ")
    assert "\nwhat would fit:\n  - raise memory_budget to " in text
    assert re.search(r"= missing +-\d+\.\d\d [MG]iB +-[\d,]+\n", text)
    assert "batch      1 request of up to 32,768 tokens (not even one fits)" in text
    assert "optimum-rbln-cli" not in text
    assert "next step" not in text


def test_a_device_that_is_too_small_at_any_budget_is_said_to_be() -> None:
    text = squeezed(report(model_plan(npu="RBLN-CA25")))
    assert re.search(
        r"budgets that work none: [\d.]+ GiB \([\d,]+ bytes\) is needed, and the device has "
        r"15\.72 GiB",
        text,
    )
    assert "the device holds none of them" in text


def test_the_smallest_budget_in_percent_is_rounded_up_so_that_it_works() -> None:
    made = model_plan(max_seq_len=16384)
    shown = re.search(r"budgets that work +[\d.]+ GiB \(([\d.]+)%\)", report(made))
    assert shown is not None
    assert model_plan(max_seq_len=16384, memory_budget=f"{shown[1]}%").fits
    lower = f"{float(shown[1]) - 0.01:.2f}%"
    assert not model_plan(max_seq_len=16384, memory_budget=lower).fits


def test_the_budget_of_the_next_step_gives_it() -> None:
    made = model_plan(max_seq_len=16384, memory_budget="60%")
    shown = re.search(r"next step +(\d+) blocks, (\d+) requests with", report(made))
    budget = re.search(r"memory budget of\s+(\d+) bytes", report(made))
    assert shown is not None
    assert budget is not None
    larger = model_plan(max_seq_len=16384, memory_budget=int(budget[1]))
    assert larger.num_blocks == int(shown[1])
    assert larger.batch_size == int(shown[2]) == made.batch_size + 1


def test_requests_of_the_full_length_may_be_fewer_than_the_batch() -> None:
    text = squeezed(report(model_plan(batch_size=32, memory_budget="80%")))
    assert "batch 32 requests of up to 40,960 tokens KV cache" in text
    assert "requests 16 of 40,960 tokens side by side" in text
    assert "counts that work 33 to 160, for 32 requests" in text


def test_where_no_single_change_helps_none_is_named() -> None:
    made = model_plan(npu="RBLN-CA25", batch_size=900)
    assert made.advice == ()
    assert "what would fit" not in report(made)


def test_a_budget_that_the_full_batch_does_not_use_up_is_said_to_be() -> None:
    text = squeezed(report(model_plan(batch_size=2, max_seq_len=16384)))
    assert "limited by the full batch: " in text
    assert "next step" not in text


def test_commands_stand_alone_on_their_line_however_long(tmp_path: Path) -> None:
    directory = make_artifact(tmp_path / ("long name " * 10), num_blocks=9)
    text = report(plan(str(directory), npu="cpu:8GB"))
    line = next(line for line in text.splitlines() if line.startswith("  reblock set "))
    assert len(line) > 100
    assert line.endswith(f"{tmp_path}/{'long name ' * 10}' 32")
    assert f"artifact   {directory}" in text.splitlines()


def test_notes_are_wrapped() -> None:
    made = replace(model_plan(), notes=("a word and another " * 10,))
    text = report(made)
    assert text.splitlines()[-2].startswith("      ")
    assert re.search(r"\nnote: a word", text)


@pytest.mark.parametrize("name", MODELS)
def test_no_line_is_longer_than_80_columns(name: str) -> None:
    for budget in ("100%", "2GB"):
        made = model_plan(name, max_seq_len=1024, memory_budget=budget, dtype="bfloat16")
        assert not too_long(report(made))


def test_figures_of_the_largest_kind_stay_within_80_columns() -> None:
    large = model_plan("DeepSeek-V3.1", npu="RBLN-CA25x64", batch_size=900)
    assert not large.fits
    assert not too_long(report(large))


# Several plans.


def test_a_comparison_has_a_row_for_each_and_its_notes_once() -> None:
    plans = [
        model_plan("gemma-3-27b-it", npu=npu, memory_budget=budget)
        for npu in ("RBLN-CR13", "RBLN-CR13x2")
        for budget in ("60%", "100%")
    ]
    text = comparison(plans)
    assert not too_long(text)
    rows = squeezed(text)
    for made in plans:
        assert made.capacity is not None
        held = made.capacity
        assert (
            f"{made.target.text} {made.budget.text} {made.budget_bytes / GIB:.2f} GiB "
            f"{made.num_blocks:,} {held.num_full_sequences:,} {held.num_tokens:,} memory budget"
        ) in rows
    assert text.count("max_position_embeddings") == 1
    assert "batch as many requests of up to 131,072 tokens as fit" in rows


def test_a_comparison_says_on_which_device_a_token_costs_what() -> None:
    plans = [
        model_plan("SmolLM2-135M", npu=npu, dtype=dtype)
        for npu, dtype in (("RBLN-CR13", "bfloat16"), ("cpu:8GB", "float32"))
    ]
    rows = squeezed(comparison(plans))
    assert "bytes a token; bfloat16, on RBLN-CR13 KV cache" in rows
    assert "bytes a token; float32, on cpu:8GB" in rows


def test_a_comparison_explains_rows_that_do_not_fit_or_are_not_possible() -> None:
    refused = Refused(
        name=QWEN3_8B, npu="RBLN-CA25x4", memory_budget="20GB", reason="the device has less"
    )
    text = comparison([model_plan(), model_plan(npu="RBLN-CA25", memory_budget="50%"), refused])
    rows = squeezed(text)
    assert "RBLN-CA25 50% 7.86 GiB does not fit" in rows
    assert "RBLN-CA25x4 20GB not possible" in rows
    assert "RBLN-CA25, 50%: does not fit: " in rows
    assert ". No budget works: " in rows
    assert "RBLN-CA25x4, 20GB: the device has less" in rows
    assert not too_long(text)


def test_a_shared_device_has_a_row_for_each_a_total_and_the_commands_of_each() -> None:
    names = [QWEN3_8B, str(CONFIGS / "Qwen3-4B")]
    asked = PlanSettings(batch_size=4, max_seq_len=16384)
    shared = plan_together(names, npu="RBLN-CR13", settings=asked, memory_budgets=["80%"])
    text = shared_report(shared)
    rows = squeezed(text)
    assert f"1 {names[0]} 2 {names[1]} devices 1 x RBLN-CR13" in rows
    assert "budget 112.00 GiB of the 140.00 GiB available on a device, one for all" in rows
    assert f"together 112.00 GiB {shared.needed_bytes / GIB:.2f} GiB Together they take" in rows
    commands = [line for line in text.splitlines() if line.startswith("  optimum-rbln-cli ")]
    assert [names[0] in commands[0], names[1] in commands[1]] == [True, True]
    assert not too_long(text)


def test_what_does_not_fit_together_has_reasons_and_no_commands() -> None:
    asked = PlanSettings(batch_size=4, max_seq_len=16384)
    shared = plan_together(
        [QWEN3_8B, QWEN3_8B],
        npu="RBLN-CR13",
        settings=asked,
        memory_budgets=["5%", "50%"],
    )
    text = shared_report(shared)
    assert "optimum-rbln-cli" not in text
    assert re.search(r"\n1: does not fit: ", text)
    assert "what would fit:\n  - raise memory_budget" in text
    assert re.search(r" together .* does not fit\n", text)


# The bar.


@given(amounts=st.lists(st.integers(1, 2**60), min_size=1, max_size=7), width=st.integers(7, 78))
def test_shares_add_up_and_nothing_is_too_small_to_see(amounts: list[int], width: int) -> None:
    widths = shares(amounts, width)
    assert sum(widths) == width
    assert min(widths) >= 1
    # Those that were raised to one take at most one from each of the others' shares together.
    for amount, each in zip(amounts, widths, strict=True):
        assert each - 1 <= amount * width / sum(amounts) or each == 1
        assert each >= amount * width / sum(amounts) - len(amounts)


def bar_of(waterfall: Waterfall) -> dict[str, int]:
    """Return how many characters the bar has for every name of its legend."""
    bar, legend = memory_bar(waterfall).split("\n", 1)
    assert bar[:2] == " ["
    assert bar[-1] == "]"
    assert len(bar) <= 79
    entries = [entry.strip() for entry in legend.replace("\n", " ").split(",")]
    counts = {entry[2:]: bar[2:-1].count(entry[0]) for entry in entries}
    assert sum(counts.values()) == len(bar) - 3
    return counts


def test_the_bar_is_in_proportion() -> None:
    counts = bar_of(model_plan(max_seq_len=8192, memory_budget="50%").waterfall)
    assert list(counts) == [
        "reserve",
        "weights",
        "runtime and workspace",
        "KV cache",
        "unused",
        "outside the budget",
    ]
    # Of 76 characters for 144 GiB.
    assert counts["outside the budget"] == pytest.approx(76 * 70 / 144, abs=1)
    assert counts["reserve"] == pytest.approx(76 * 4 / 144, abs=1)


def test_the_bar_of_what_does_not_fit_shows_how_much_is_missing() -> None:
    waterfall = model_plan(npu="RBLN-CA25", memory_budget="50%").waterfall
    counts = bar_of(waterfall)
    assert "unused" not in counts
    # The weights alone are more than the budget, and are drawn up to its end.
    whole = waterfall.dram_bytes - waterfall.unused_bytes
    assert counts["weights"] == pytest.approx(76 * waterfall.budget_bytes / whole, abs=1)
    assert counts["does not fit"] == pytest.approx(76 * -waterfall.unused_bytes / whole, abs=1)


def test_the_bar_falls_back_to_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    waterfall = model_plan(max_seq_len=8192).waterfall
    assert "\N{FULL BLOCK}" in memory_bar(waterfall)
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding="ascii"))
    plain = memory_bar(waterfall)
    monkeypatch.undo()
    assert plain.isascii()
    assert "W weights" in plain


def test_a_number_stays_with_its_unit() -> None:
    for width in range(60, 90):
        for line in paragraph("x" * width + " 12.50 GiB and 7 blocks").splitlines():
            assert not line.endswith(("12.50", " 7"))


def test_a_long_word_is_not_broken() -> None:
    word = "/a/path/of/many/parts" * 9
    assert word in paragraph(f"the words before it {word} and behind").splitlines()
