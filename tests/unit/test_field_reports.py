"""What users of comparable systems reported, with the numbers of their reports: budgets and counts.

Every test names the report that it is of. docs/field-reports.md lists them all, those that a test
held before too, and what models keep is in test_field_report_models.py.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from reference_plans import (
    LLAMA2_EAGER,
    LLAMA2_FLASH,
    QWEN3_CA25,
    QWEN3_CR13,
    load_config,
    load_plan,
    make_plan,
)

from artifacts import make_artifact
from fakes import FakeRunner, FakeSampler, continue_alone, make_limits
from reblock.artifact.reader import open_artifact
from reblock.artifact.resize import plan_resize
from reblock.budget import parse_budget
from reblock.devices import Device, get_device, read_cpu_device
from reblock.engine import Engine, SamplingParams
from reblock.errors import (
    BelowMinimum,
    BudgetAboveDevice,
    BudgetTooSmall,
    DoesNotFit,
    InvalidBudget,
    InvalidOption,
    RequestTooLarge,
    UsageError,
)
from reblock.options import CompileOptions
from reblock.planning import Plan, PlanSettings, plan, plan_together
from reblock.sizing import (
    BlockBounds,
    Sizing,
    block_bounds,
    capacity,
    estimate,
    largest_fitting,
)
from reblock.units import GIB, MIB

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
OPT_BLOCK = 16


def config(name: str) -> str:
    return str(CONFIGS / name)


def term(found: Plan, name: str) -> int:
    return next(term.num_bytes for term in found.waterfall.terms if term.name == name)


def make_device(available_bytes: int) -> Device:
    return Device(
        name="test-device",
        dram_bytes=available_bytes,
        num_chiplets=1,
        reserve_bytes_per_chiplet=0,
        max_eager_seq_len=None,
        min_partition_len=1,
        max_partition_len=None,
        default_partition_len=1,
    )


def estimate_reference(name: str, budget: object) -> Sizing:
    own = load_config(name)
    return estimate(
        load_plan(name), own.bounds, device=get_device(own.npu), budget=parse_budget(budget)
    )


def make_engine(**limits: Any) -> Engine:
    return Engine(FakeRunner(make_limits(**limits)), sampler=FakeSampler())


def run_to_end(engine: Engine) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).append(output.token_id)
    engine.check_integrity()
    return answers


# What a budget is


@pytest.mark.parametrize("npu", ["cpu:24GB", "RBLN-CA25", "RBLN-CR13"])
def test_the_cache_of_one_short_request_is_112_mib_however_large_the_device(npu: str) -> None:
    # Report 2: 28 layers, 8 KV heads of 128, bf16; not 18.78 GiB and 175,856 tokens.
    found = plan(config("Qwen3-1.7B"), npu=npu, batch_size=1, max_seq_len=1024)
    assert found.model.full_bytes_per_token == 28 * 2 * 8 * 128 * 2 == 114_688
    assert term(found, "KV cache blocks") == 112 * MIB
    assert found.limited_by == "full_batch"
    assert found.capacity is not None
    assert found.capacity.num_tokens == 1024


def test_a_length_that_does_not_fit_is_refused_with_every_term_of_the_sum() -> None:
    # Report 3: "Where does 43328 come from?" A length of 56,000 was asked for; blocks of 16.
    weights, per_block = 14 * GIB, 2 * MIB
    pool = 43_328 // 16 * per_block
    memory = make_plan(static=[[weights]], resizable=[[[per_block]]])
    bounds = block_bounds(attn_impl="flash_attn", max_seq_len=56_000, block_size=16, batch_size=1)
    with pytest.raises(BudgetTooSmall) as caught:
        estimate(memory, bounds, device=make_device(weights + pool))
    for num_bytes in (weights, weights + 3_500 * per_block, weights + pool):
        assert f"{num_bytes:,} bytes" in str(caught.value)
    assert "kvcache_num_blocks=3500 is the fewest" in str(caught.value)
    fitting = largest_fitting(memory, BlockBounds(minimum=1, full=3_500), weights + pool)
    assert fitting == 2_708
    assert capacity(2_708, block_size=16, max_seq_len=56_000, batch_size=1).num_tokens == 43_328


# Frozen: a number of this table changes only with a new option of a new name. What a fraction is
# of, what a budget covers and how it is rounded are promises, whatever else becomes better.
GOLDEN = [
    (QWEN3_CA25, "100%", 16_877_879_296, 40),
    (QWEN3_CA25, 0.9, 15_190_091_366, 35),
    (QWEN3_CA25, "0.8", 13_502_303_436, 29),
    (QWEN3_CA25, "66.67%", 11_252_482_126, 21),
    (QWEN3_CA25, "60%", 10_126_727_577, 18),
    (QWEN3_CA25, "50%", 8_438_939_648, 12),
    (QWEN3_CA25, "12.5GB", 13_421_772_800, 29),
    (QWEN3_CA25, "10GB", 10_737_418_240, 20),
    (QWEN3_CA25, 7_330_070_528, 7_330_070_528, 9),
    (QWEN3_CR13, 1.0, 150_323_855_360, 107),
    (QWEN3_CR13, 0.9, 135_291_469_824, 95),
    (QWEN3_CR13, "80%", 120_259_084_288, 82),
    (QWEN3_CR13, "66.67%", 100_220_914_368, 66),
    (QWEN3_CR13, "45%", 67_645_734_912, 39),
    (QWEN3_CR13, "100GB", 107_374_182_400, 71),
    (LLAMA2_FLASH, "1.0", 16_877_879_296, 24),
    (LLAMA2_FLASH, "90%", 15_190_091_366, 21),
    (LLAMA2_FLASH, "15GB", 16_106_127_360, 22),
    (LLAMA2_EAGER, "80%", 13_502_303_436, 1),
]


@pytest.mark.parametrize(("name", "budget", "num_bytes", "num_blocks"), GOLDEN)
def test_a_budget_means_the_same_in_every_release(
    name: str, budget: object, num_bytes: int, num_blocks: int
) -> None:
    # Report 5: the meaning of a fraction changed between two releases.
    sizing = estimate_reference(name, budget)
    assert (sizing.budget_bytes, sizing.num_blocks) == (num_bytes, num_blocks)


@pytest.mark.parametrize("budget", ["100%", 0.9, "8GB", 7_330_070_528])
def test_a_budget_covers_weights_and_workspace_beside_the_cache(budget: object) -> None:
    # Report 10: a cap on all of the engine's memory, and not on its cache.
    sizing, memory = estimate_reference(QWEN3_CA25, budget), load_plan(QWEN3_CA25)
    held = memory.total_at(sizing.num_blocks)
    assert {"Weight", "Workspace"} <= memory.static.keys()
    assert all(sum(node) <= sizing.budget_bytes for node in held)
    assert sizing.chiplets[0].used_bytes == held[0][0] > memory.kv_bytes_at(sizing.num_blocks)[0][0]


def test_a_fraction_is_of_what_is_there_and_not_of_what_is_free(tmp_path: Path) -> None:
    # Report 7: a fraction of free memory makes the start of a second model a matter of luck.
    devices = []
    for free in (60_000_000, 1_000_000):
        path = tmp_path / str(free) / "proc" / "meminfo"
        path.parent.mkdir(parents=True)
        path.write_text(f"MemTotal: 67108864 kB\nMemFree: {free} kB\nMemAvailable: {free} kB\n")
        devices.append(read_cpu_device(str(tmp_path / str(free))))
    assert devices[0] == devices[1]
    assert parse_budget(0.5).resolve(devices[1].available_bytes) == (64 * GIB - 256 * MIB) // 2


@pytest.mark.parametrize("shares", [(0.2, 0.2), (0.75, 0.2), (0.4, 0.4)])
def test_the_share_of_a_second_model_does_not_count_what_the_first_takes(
    shares: tuple[float, float],
) -> None:
    # Report 6: 0.2 and 0.2 failed, and so did 0.2 after 0.75.
    names = [config("Qwen3-0.6B"), config("SmolLM2-135M")]
    asked: dict[str, Any] = {"batch_size": 4, "max_seq_len": 2048}
    for order in (1, -1):
        together = plan_together(
            names[::order],
            npu="RBLN-CA25",
            memory_budgets=shares[::order],
            settings=PlanSettings(**asked),
        )
        alone = [
            plan(name, npu="RBLN-CA25", memory_budget=share, **asked)
            for name, share in zip(names[::order], shares[::order], strict=True)
        ]
        assert together.plans == tuple(alone)
        assert together.fits
        assert together.needed_bytes == sum(found.needed_bytes for found in alone)


def test_shares_above_the_whole_that_are_used_up_do_not_fit() -> None:
    # Report 8: 0.6 and 0.5 both started, as each was of what was free at its start.
    names = [config("Qwen3-0.6B"), config("Qwen3-1.7B")]
    asked = PlanSettings(batch_size=16, max_seq_len=8192, kvcache_partition_len=1024)
    shared = plan_together(names, npu="RBLN-CA25", memory_budgets=[0.6, 0.5], settings=asked)
    assert [found.fits for found in shared.plans] == [True, True]
    assert shared.budget_bytes > shared.available_bytes
    assert not shared.fits
    assert shared.explanation.startswith("does not fit: together they take")


def test_one_and_one_point_zero_are_a_byte_and_all_of_it_and_the_refusal_says_so() -> None:
    # Report 7: whether 1 is a count, bytes or 100 % had to be guessed.
    assert (parse_budget("1").amount, parse_budget("1.0").amount) == (1, Fraction(1))
    for budget in (1.0, "1.0", "100%"):
        assert estimate_reference(QWEN3_CA25, budget).num_blocks == 40
    for budget in (1, "1"):
        with pytest.raises(BudgetTooSmall, match=r"A bare 1 is 1 byte: write 1\.0 or 100%"):
            estimate_reference(QWEN3_CA25, budget)
    with pytest.raises(InvalidBudget, match="fraction above 1"):
        parse_budget(2.0)


@pytest.mark.parametrize("budget", [1.0, "1.0", "100%"])
def test_all_of_the_memory_is_a_budget_and_leaves_the_reserve_alone(budget: object) -> None:
    # Report 15: 1.0 "theoretically should work", and ran out of memory.
    sizing, device = estimate_reference(QWEN3_CA25, budget), get_device("RBLN-CA25")
    assert sizing.budget_bytes == device.dram_bytes - 288 * MIB
    assert all(use.free_bytes >= 0 for use in sizing.chiplets)
    assert sizing.chiplets[0].static_bytes["Workspace"] > 0


def test_budgets_that_change_nothing_say_that_the_full_batch_is_the_limit() -> None:
    # Report 11: from 0.1 to 0.9 there was "no change at all", and nothing said why.
    found = [
        plan(
            config("SmolLM2-135M"),
            npu="RBLN-CR13",
            memory_budget=tenths / 10,
            batch_size=4,
            max_seq_len=2048,
        )
        for tenths in range(1, 10)
    ]
    assert {each.num_blocks for each in found} == {4}
    assert {each.limited_by for each in found} == {"full_batch"}
    assert all("the full batch" in each.explanation for each in found)
    assert {each.next_step for each in found} == {None}


def test_an_option_without_effect_is_refused_and_not_ignored() -> None:
    # Report 11.
    with pytest.raises(UsageError, match="exclude each other"):
        CompileOptions.from_keys({"memory_budget": "0.9", "kvcache_num_blocks": "40"})
    with pytest.raises(InvalidOption, match="is unknown"):
        CompileOptions.from_keys({"kv_cache_free_gpu_mem_fraction": "0.9"})


# What a refusal says


def test_every_refusal_names_the_one_direction_that_helps() -> None:
    # Report 12: the error said to increase what the documentation said to decrease.
    with pytest.raises(BudgetTooSmall, match="raise memory_budget to") as small:
        estimate_reference(QWEN3_CA25, "30%")
    assert "lower memory_budget" not in str(small.value)
    with pytest.raises(BudgetAboveDevice, match="lower memory_budget") as large:
        estimate_reference(QWEN3_CA25, "17GB")
    assert "raise" not in str(large.value)
    heavy = make_plan(static=[[17 * GIB]], resizable=[[[MIB]]])
    with pytest.raises(BudgetTooSmall, match="No budget works") as none:
        estimate(heavy, BlockBounds(minimum=1, full=2), device=get_device("RBLN-CA25"))
    assert "memory_budget to" not in str(none.value)


@pytest.mark.parametrize("name", [QWEN3_CA25, QWEN3_CR13, LLAMA2_FLASH])
def test_bisecting_budgets_ends_at_the_smallest_that_every_refusal_named(name: str) -> None:
    # Report 13: 0.85 ran out of memory, 0.84 was not enough, and no value in between was told.
    available = get_device(load_config(name).npu).available_bytes
    refused, fitting, named = 1, available, set()
    while fitting - refused > 1:
        middle = (fitting + refused) // 2
        try:
            estimate_reference(name, middle)
            fitting = middle
        except BudgetTooSmall as error:
            named.add((error.smallest_budget_bytes, error.available_bytes))
            refused = middle
    assert named == {(fitting, available)}
    assert estimate_reference(name, available).smallest_budget_bytes == fitting


def test_where_no_budget_works_every_refusal_says_none_does() -> None:
    # Report 13: the interval of budgets that work may be empty.
    memory = make_plan(static=[[15 * GIB]], resizable=[[[GIB]]])
    for budget in ("84%", "85%", "100%"):
        with pytest.raises(BudgetTooSmall, match=r"No budget works: that takes 16\.00 GiB"):
            estimate(
                memory,
                BlockBounds(minimum=1, full=9),
                device=get_device("RBLN-CA25"),
                budget=parse_budget(budget),
            )
    found = plan(config("Llama-3.1-70B"), npu="RBLN-CA25", max_seq_len=8192)
    assert found.budgets.is_empty
    assert ". No budget works: " in found.explanation


@pytest.mark.parametrize(
    ("smallest", "percent", "below"),
    [(127_940_000_000, "91.13%", "91.12%"), (131_050_000_000, "93.35%", "93.34%")],
)
def test_a_budget_below_the_weights_is_answered_with_the_smallest_share_that_works(
    smallest: int, percent: str, below: str
) -> None:
    # Report 14: weights of 125.65 GB on 140.4 GB with 0.88; 0.9113 and 0.9335 would have worked.
    weights, available = 125_650_000_000, 140_400_000_000
    cache = smallest // (2 * MIB) * 2 * MIB - weights // (2 * MIB) * 2 * MIB
    memory = make_plan(static=[[weights]], resizable=[[[cache]]])
    bounds, device = BlockBounds(minimum=1, full=9), make_device(available)
    with pytest.raises(BudgetTooSmall) as caught:
        estimate(memory, bounds, device=device, budget=parse_budget(0.88))
    needed = caught.value.smallest_budget_bytes
    assert needed == weights + cache
    assert f"{needed:,} bytes), {percent} of the" in str(caught.value)
    assert f"raise memory_budget to {needed}" in str(caught.value)
    assert estimate(memory, bounds, device=device, budget=parse_budget(percent)).num_blocks == 1
    with pytest.raises(BudgetTooSmall):
        estimate(memory, bounds, device=device, budget=parse_budget(below))


@pytest.mark.parametrize("budget", ["1MB", "10%", "17GB"])
def test_a_fit_that_fails_is_an_error_and_no_warning(budget: str) -> None:
    # Report 56: a fit that failed was a warning, and the server ran out of memory.
    with pytest.raises(DoesNotFit) as caught:
        estimate_reference(QWEN3_CA25, budget)
    assert caught.value.exit_code == 3


# Counts that are given


def test_a_small_count_is_checked_on_its_own_where_the_full_batch_would_not_fit() -> None:
    # Reports 16 and 23: 5,000 blocks were refused, as the check at the start was of the fraction.
    asked: dict[str, Any] = {
        "npu": "cpu:24GB",
        "memory_budget": 0.9,
        "batch_size": 64,
        "kvcache_block_size": 16,
    }
    found = plan(config("Qwen3-0.6B"), num_blocks=5_000, **asked)
    assert (found.num_blocks, found.limited_by) == (5_000, "given")
    assert term(found, "KV cache blocks") == 5_000 * 16 * 114_688
    assert found.bounds.full * 16 * 114_688 > 200 * GIB
    above = plan(config("Qwen3-0.6B"), num_blocks=50_000, **asked)
    assert not above.fits
    (line,) = (line for line in above.advice if line.startswith("lower num_blocks to"))
    fewer = int(line.split()[3].rstrip(","))
    assert plan(config("Qwen3-0.6B"), num_blocks=fewer, **asked).fits
    assert not plan(config("Qwen3-0.6B"), num_blocks=fewer + 1, **asked).fits


def test_a_small_count_is_set_though_the_full_batch_is_more_than_the_device(tmp_path: Path) -> None:
    # Reports 16 and 23, on an artifact: 9 blocks take 40 MiB and all 32 of them 128 MiB.
    weights = get_device("cpu").available_bytes - 64 * MIB
    artifact = open_artifact(
        str(make_artifact(tmp_path / "a", num_blocks=32, weight_bytes=weights))
    )
    planned = plan_resize(artifact, 9)
    assert (planned.num_blocks_after, planned.sizing, planned.warnings) == (9, None, ())
    (warning,) = plan_resize(artifact, 32).warnings
    assert warning.startswith("32 blocks need")


def test_a_count_of_one_is_refused_with_the_fewest_that_work(tmp_path: Path) -> None:
    # Report 18: one block of 16 tokens started, and could serve nothing.
    artifact = open_artifact(str(make_artifact(tmp_path / "a", num_blocks=16)))
    with pytest.raises(BelowMinimum, match="use 9 or more") as caught:
        plan_resize(artifact, 1)
    assert (caught.value.num_blocks, caught.value.num_min_blocks) == (1, 9)
    with pytest.raises(BelowMinimum, match="raise it to 128"):
        CompileOptions(kvcache_block_size=OPT_BLOCK, kvcache_num_blocks=1).resolve(
            max_position_embeddings=2048
        )


@pytest.mark.parametrize("batch_size", [1, 2, 8, 64])
@pytest.mark.parametrize(("max_seq_len", "block_size"), [(2048, 16), (40_960, 8192), (4096, 4096)])
def test_the_fewest_blocks_hold_a_whole_sequence_and_a_block_for_every_other(
    batch_size: int, max_seq_len: int, block_size: int
) -> None:
    # Reports 27 and 29: enough for one sequence, and not so many that the batch has to be 1.
    is_eager = block_size == max_seq_len
    bounds = block_bounds(
        attn_impl="eager" if is_eager else "flash_attn",
        max_seq_len=max_seq_len,
        block_size=block_size,
        batch_size=batch_size,
    )
    held = capacity(
        bounds.minimum, block_size=block_size, max_seq_len=max_seq_len, batch_size=batch_size
    )
    assert held.num_full_sequences >= 1
    assert held.longest_sequence_tokens == max_seq_len
    assert bounds.minimum >= batch_size
    if not is_eager and batch_size > 1:
        rule = max(max_seq_len // block_size, batch_size) + 1
        assert bounds.minimum == min(rule, bounds.full) < bounds.full


@pytest.mark.parametrize("block_size", [1, 8])
def test_a_block_size_that_no_program_has_is_refused_before_any_work(block_size: int) -> None:
    # Report 25: 1 and 8 were listed as valid, and crashed when the cache was made.
    for key in ("kvcache_block_size", "kvcache_partition_len"):
        with pytest.raises(InvalidOption, match=f"{key}={block_size} is below 16") as caught:
            CompileOptions.from_keys({key: block_size}).resolve(max_position_embeddings=2048)
        assert caught.value.option == key
    with pytest.raises(InvalidOption, match=f"kvcache_block_size={block_size} must be from 1024"):
        plan(config("opt-125m"), npu="RBLN-CA25", kvcache_block_size=block_size)


# Requests that are larger than the cache


def test_a_prompt_that_needs_more_blocks_than_the_pool_has_is_refused_and_does_not_hang() -> None:
    # Report 17: 50 blocks of 16 tokens, prompts of 1,002 tokens that need 63, and a wait for ever.
    engine = make_engine(num_blocks=50, block_size=OPT_BLOCK, max_seq_len=2048, max_batch=4)
    prompt = [number % 256 for number in range(1_002)]
    with pytest.raises(RequestTooLarge, match=r"takes 63 blocks of 16 tokens.* has 50") as caught:
        engine.add(prompt, SamplingParams(max_new_tokens=1))
    assert caught.value.max_tokens == 801
    assert not engine.has_work
    fitting = engine.add(prompt[:700], SamplingParams(max_new_tokens=16))
    assert run_to_end(engine) == {fitting: continue_alone(prompt[:700], 16)}


@pytest.mark.parametrize(("num_blocks", "is_served"), [(62, False), (63, True), (64, True)])
def test_a_request_is_served_by_exactly_the_blocks_it_fills_and_not_by_one_less(
    num_blocks: int, is_served: bool
) -> None:
    # Report 19: with exactly enough blocks it said 1.00x and waited, as one block was a null block.
    engine = make_engine(num_blocks=num_blocks, block_size=OPT_BLOCK, max_seq_len=1_008)
    prompt = [number % 256 for number in range(1_000)]
    if not is_served:
        with pytest.raises(RequestTooLarge, match="takes 63 blocks"):
            engine.add(prompt, SamplingParams(max_new_tokens=8))
        assert not engine.has_work
        return
    request_id = engine.add(prompt, SamplingParams(max_new_tokens=8))
    assert run_to_end(engine) == {request_id: continue_alone(prompt, 8)}


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_request_of_the_longest_length_that_is_told_is_served(more: int) -> None:
    # Report 22: the length that was found lay exactly on the pool's capacity, and waited for ever.
    engine = make_engine(num_blocks=5, block_size=OPT_BLOCK, max_seq_len=2048)
    longest = engine.limits.max_request_tokens
    prompt = [7] * (longest - 4 + more)
    if more > 0:
        with pytest.raises(RequestTooLarge) as caught:
            engine.add(prompt, SamplingParams(max_new_tokens=4))
        assert caught.value.max_tokens == longest
        return
    request_id = engine.add(prompt, SamplingParams(max_new_tokens=4))
    assert run_to_end(engine) == {request_id: continue_alone(prompt, 4)}
