from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import (
    ALL,
    LLAMA2_EAGER,
    LLAMA2_FLASH,
    QWEN3_CA25,
    QWEN3_CR13,
    load_config,
    load_plan,
    make_plan,
)

from reblock.budget import parse_budget
from reblock.devices import Device, get_device
from reblock.errors import BudgetAboveDevice, BudgetTooSmall, InvalidOption, UsageError
from reblock.memory import MemoryPlan
from reblock.sizing import (
    BlockBounds,
    Sizing,
    block_bounds,
    capacity,
    chiplet_uses,
    estimate,
    fits,
    largest_fitting,
    resolve_budget,
    smallest_budget,
    tightest,
)
from reblock.units import GIB, MIB


def make_device(available_bytes: int, *, num_chiplets: int = 1) -> Device:
    return Device(
        name="test-device",
        dram_bytes=available_bytes,
        num_chiplets=num_chiplets,
        reserve_bytes_per_chiplet=0,
        max_eager_seq_len=None,
        min_partition_len=1,
        max_partition_len=None,
        default_partition_len=1,
    )


def estimate_reference(name: str, budget: object = "100%") -> Sizing:
    config = load_config(name)
    return estimate(
        load_plan(name),
        config.bounds,
        device=get_device(config.npu),
        budget=parse_budget(budget),
    )


@pytest.mark.parametrize(
    ("attn_impl", "max_seq_len", "block_size", "batch_size", "minimum", "full"),
    [
        ("flash_attn", 40_960, 8_192, 8, 9, 40),
        ("flash_attn", 40_960, 8_192, 32, 33, 160),
        ("flash_attn", 40_960, 8_192, 1, 5, 5),
        ("flash_attn", 40_960, 8_192, 2, 6, 10),
        ("flash_attn", 16_384, 4_096, 16, 17, 64),
        ("flash_attn", 8_192, 8_192, 1, 1, 1),
        ("flash_attn", 8_192, 8_192, 4, 4, 4),
        ("eager", 4_096, 4_096, 1, 1, 1),
        ("eager", 4_096, 4_096, 8, 8, 8),
    ],
)
def test_block_bounds_follow_the_attention(
    attn_impl: str, max_seq_len: int, block_size: int, batch_size: int, minimum: int, full: int
) -> None:
    bounds = block_bounds(
        attn_impl="eager" if attn_impl == "eager" else "flash_attn",
        max_seq_len=max_seq_len,
        block_size=block_size,
        batch_size=batch_size,
    )
    assert bounds == BlockBounds(minimum=minimum, full=full)


def test_block_longer_than_a_sequence_is_refused() -> None:
    with pytest.raises(InvalidOption, match="kvcache_block_size=256 is more than max_seq_len=128"):
        block_bounds(attn_impl="eager", max_seq_len=128, block_size=256, batch_size=1)


@pytest.mark.parametrize(
    ("name", "num_blocks", "minimum", "full", "limited_by"),
    [
        (QWEN3_CA25, 40, 9, 40, "full_batch"),
        (QWEN3_CR13, 107, 33, 160, "budget"),
        (LLAMA2_FLASH, 24, 17, 64, "budget"),
        (LLAMA2_EAGER, 1, 1, 1, "fixed"),
    ],
)
def test_reference_artifact_is_sized_as_optimum_rbln_sized_it(
    name: str, num_blocks: int, minimum: int, full: int, limited_by: str
) -> None:
    sizing = estimate_reference(name)
    assert sizing.num_blocks == num_blocks == load_config(name).kvcache_num_blocks
    assert sizing.bounds == BlockBounds(minimum=minimum, full=full)
    assert sizing.limited_by == limited_by


def test_golden_qwen3_8b_on_four_ca25_has_40_blocks_of_11_25_gib() -> None:
    # 36 layers of keys and of values; 8 KV heads over 4 devices; 8,192 tokens of 128 bf16 values.
    per_block = 2 * 8_192 * 128 * 2
    weights = 4_612_161_536
    plan = make_plan(static=[[weights]] * 4, resizable=[[[per_block]] * 4] * 72)
    bounds = block_bounds(
        attn_impl="flash_attn", max_seq_len=40_960, block_size=8_192, batch_size=8
    )
    sizing = estimate(plan, bounds, device=get_device("RBLN-CA25"))
    assert bounds.minimum == 9
    assert sizing.num_blocks == 40
    assert plan.kv_bytes_at(40) == ((11 * GIB + GIB // 4,),) * 4
    # The artifact that optimum-rbln laid out says the same.
    assert load_plan(QWEN3_CA25).kv_bytes_at(40) == plan.kv_bytes_at(40)


def test_sizing_limited_by_the_budget_says_what_one_more_block_takes() -> None:
    sizing = estimate_reference(QWEN3_CR13)
    plan = load_plan(QWEN3_CR13)
    assert sizing.available_bytes == sizing.budget_bytes == 140 * GIB
    assert sizing.next_block_budget_bytes == smallest_budget(plan, 108)
    assert sizing.next_block_budget_bytes > sizing.available_bytes
    assert sizing.smallest_budget_bytes == smallest_budget(plan, 33)


def test_sizing_limited_by_the_full_batch_has_no_use_for_another_block() -> None:
    assert estimate_reference(QWEN3_CA25).next_block_budget_bytes is None


def test_budget_of_two_gigabytes_holds_what_is_in_two_gigabytes() -> None:
    # Qwen3-1.7B: 28 layers, 8 KV heads of 128, bf16, so 114,688 bytes a token; blocks of 16.
    plan = make_plan(static=[[GIB]], resizable=[[[8 * 128 * 2 * 16]]] * 56)
    bounds = BlockBounds(minimum=65, full=2560)
    sizing = estimate(plan, bounds, device=make_device(24 * GIB), budget=parse_budget("2GB"))
    assert smallest_budget(plan, sizing.num_blocks) <= 2 * GIB
    assert smallest_budget(plan, sizing.num_blocks + 1) > 2 * GIB


@pytest.mark.parametrize(
    ("budget_mib", "num_blocks"), [(6, None), (7, 3), (8, 3), (9, 4), (13, 6), (14, 6), (99, 6)]
)
def test_largest_fitting_is_within_the_bounds_or_none(
    budget_mib: int, num_blocks: int | None
) -> None:
    # 1 MiB of weights, and a tensor of 2 MiB a block.
    plan = make_plan(static=[[MIB]], resizable=[[[2 * MIB]]])
    assert largest_fitting(plan, BlockBounds(minimum=3, full=6), budget_mib * MIB) == num_blocks


def test_tightest_names_the_fullest_chiplet_and_the_first_of_equals() -> None:
    plan = make_plan(static=[[5, 7], [7, 6]], resizable=[[[0, 0], [0, 0]]])
    assert tightest(plan, 1) == (7, (0, 1))


def test_budget_is_resolved_for_the_device_the_plan_is_for() -> None:
    plan = make_plan(static=[[1, 1]], resizable=[[[1, 1]]])
    device = make_device(1_000, num_chiplets=2)
    assert resolve_budget(plan, device, parse_budget("80%")) == 800
    with pytest.raises(BudgetAboveDevice):
        resolve_budget(plan, device, parse_budget(1_001))
    with pytest.raises(UsageError, match="devices of 2 chiplets, but test-device has 4"):
        resolve_budget(plan, make_device(1_000, num_chiplets=4), parse_budget("80%"))


def test_estimate_never_gives_more_than_a_full_batch_can_use() -> None:
    plan = make_plan(static=[[0]], resizable=[[[2 * MIB]]])
    sizing = estimate(plan, BlockBounds(minimum=1, full=7), device=make_device(1000 * GIB))
    assert (sizing.num_blocks, sizing.limited_by) == (7, "full_batch")


def test_tightest_chiplet_decides_and_not_the_total() -> None:
    # One chiplet is 2 GiB heavier than the other three; in all there would be room for more.
    static = [[12 * GIB, 10 * GIB, 10 * GIB, 10 * GIB]]
    plan = make_plan(static=static, resizable=[[[GIB] * 4]])
    sizing = estimate(
        plan,
        BlockBounds(minimum=1, full=100),
        device=make_device(4 * 16 * GIB, num_chiplets=4),
    )
    assert sizing.num_blocks == 4
    assert sizing.tightest == (0, 0)
    assert [use.free_bytes for use in sizing.chiplets] == [0, 2 * GIB, 2 * GIB, 2 * GIB]


def test_tightest_is_the_chiplet_that_refuses_one_more_block() -> None:
    # At one block the first is fuller; at two, which do not fit, the second would be.
    plan = make_plan(static=[[10 * MIB], [0]], resizable=[[[2 * MIB], [10 * MIB]]])
    sizing = estimate(plan, BlockBounds(minimum=1, full=9), device=make_device(15 * MIB))
    assert (sizing.num_blocks, sizing.limited_by) == (1, "budget")
    assert sizing.tightest == (1, 0)
    full = estimate(plan, BlockBounds(minimum=1, full=1), device=make_device(15 * MIB))
    assert (full.limited_by, full.tightest) == ("full_batch", (0, 0))


def test_nodes_with_different_layers_are_sized_by_the_heavier_one() -> None:
    plan = make_plan(static=[[0], [0]], resizable=[[[4 * MIB], [2 * MIB]]])
    sizing = estimate(plan, BlockBounds(minimum=1, full=99), device=make_device(40 * MIB))
    assert sizing.num_blocks == 10


def test_two_artifacts_of_forty_percent_fit_on_one_device_together() -> None:
    plan = make_plan(static=[[GIB]], resizable=[[[GIB // 8]]])
    device = make_device(16 * GIB)
    sizings = [
        estimate(plan, BlockBounds(minimum=1, full=999), device=device, budget=parse_budget(0.4))
        for _ in range(2)
    ]
    used = sum(smallest_budget(plan, sizing.num_blocks) for sizing in sizings)
    assert used <= device.available_bytes * 8 // 10


@pytest.mark.parametrize("name", [QWEN3_CA25, QWEN3_CR13, LLAMA2_FLASH])
def test_estimate_does_not_depend_on_what_the_artifact_holds_now(name: str) -> None:
    plan = load_plan(name)
    fresh = MemoryPlan(
        static=plan.static,
        caches=tuple(
            replace(cache, bytes_grid=cache.bytes_at(1, plan.current_blocks))
            for cache in plan.caches
        ),
        current_blocks=1,
    )
    config = load_config(name)
    device = get_device(config.npu)
    assert estimate(fresh, config.bounds, device=device) == estimate(
        plan, config.bounds, device=device
    )


def test_waterfall_adds_up_to_the_budget() -> None:
    plan = make_plan(
        static=[[5 * MIB]],
        resizable=[[[3 * MIB]]],
        fixed=[[[MIB]]],
        current_blocks=4,
    )
    sizing = estimate(plan, BlockBounds(minimum=1, full=99), device=make_device(20 * MIB))
    (use,) = sizing.chiplets
    assert sizing.num_blocks == 4
    assert use.static_bytes == {"Weight": 5 * MIB}
    assert use.fixed_cache_bytes == MIB
    assert use.resizable_cache_bytes == 12 * MIB
    assert use.alignment_bytes == MIB
    assert use.bytes_per_block == 3 * MIB
    assert use.used_bytes == 19 * MIB == plan.total_at(4)[0][0]
    assert use.free_bytes == MIB


def test_waterfall_of_a_count_that_does_not_fit_has_less_than_nothing_free() -> None:
    plan = make_plan(static=[[0]], resizable=[[[2 * MIB]]])
    (use,) = chiplet_uses(plan, 3, 4 * MIB)
    assert use.free_bytes == -2 * MIB


def test_artifact_without_resizable_caches_keeps_its_count_if_that_fits() -> None:
    sizing = estimate_reference(LLAMA2_EAGER, "50%")
    assert (sizing.num_blocks, sizing.limited_by) == (1, "fixed")
    assert sizing.next_block_budget_bytes is None
    with pytest.raises(BudgetTooSmall):
        estimate_reference(LLAMA2_EAGER, "1GB")


def test_budget_too_small_says_what_is_needed_and_what_works() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        estimate_reference(QWEN3_CA25, "6GB")
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.exit_code == 3
    assert error.needed_bytes == error.smallest_budget_bytes == 7_330_070_528
    assert (error.budget_bytes, error.available_bytes) == (6 * GIB, 16_877_879_296)
    assert error.tightest == (0, 0)
    message = str(error)
    for part in (
        "kvcache_num_blocks=9",
        "memory_budget='6GB'",
        "node 0, chiplet 0 needs 6.83 GiB (7,330,070,528 bytes)",
        "4.30 GiB (4,612,161,536 bytes) is not KV cache",
        "its share of the budget is 6.00 GiB (6,442,450,944 bytes)",
        "43.44% of the 15.72 GiB (16,877,879,296 bytes) available",
        "raise memory_budget to 7330070528",
        "lower max_seq_len or batch_size",
    ):
        assert part in message
    assert "bare 1" not in message


@pytest.mark.parametrize("name", ALL)
def test_smallest_budget_in_the_message_works_and_one_byte_less_per_chiplet_does_not(
    name: str,
) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        estimate_reference(name, "1MB")
    smallest = caught.value.smallest_budget_bytes
    sizing = estimate_reference(name, smallest)
    assert sizing.num_blocks == sizing.bounds.minimum
    with pytest.raises(BudgetTooSmall):
        estimate_reference(name, smallest - 1)


@pytest.mark.parametrize("name", ALL)
def test_smallest_percentage_in_the_message_works_when_written_back(name: str) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        estimate_reference(name, "1MB")
    percent = next(word for word in str(caught.value).split() if word.endswith("%"))
    assert estimate_reference(name, percent).num_blocks >= load_config(name).bounds.minimum


@pytest.mark.parametrize("one", [1, "1"])
def test_budget_of_a_bare_one_is_answered_with_how_to_write_the_whole_device(one: object) -> None:
    with pytest.raises(BudgetTooSmall, match=r"write 1\.0 or 100% for the whole device"):
        estimate_reference(QWEN3_CR13, one)


def test_cache_too_large_for_the_device_is_answered_with_no_budget_works() -> None:
    plan = make_plan(static=[[2 * MIB]], resizable=[[[4 * MIB]]])
    with pytest.raises(BudgetTooSmall) as caught:
        estimate(plan, BlockBounds(minimum=3, full=9), device=make_device(10 * MIB))
    assert caught.value.smallest_budget_bytes == 14 * MIB > caught.value.available_bytes
    assert "No budget works" in str(caught.value)
    assert "lower max_seq_len or batch_size" in str(caught.value)
    assert "raise memory_budget" not in str(caught.value)


def test_weights_too_large_for_the_device_are_not_blamed_on_the_cache() -> None:
    plan = make_plan(static=[[12 * MIB]], resizable=[[[4 * MIB]]])
    with pytest.raises(BudgetTooSmall) as caught:
        estimate(plan, BlockBounds(minimum=1, full=9), device=make_device(10 * MIB))
    assert "Compile for more devices (num_devices), or a smaller model" in str(caught.value)
    assert "max_seq_len" not in str(caught.value)


def test_budget_above_the_device_is_refused() -> None:
    with pytest.raises(BudgetAboveDevice):
        estimate_reference(QWEN3_CA25, "100GB")


def test_plan_for_another_kind_of_device_is_refused() -> None:
    with pytest.raises(UsageError, match="devices of 4 chiplets, but RBLN-CA25 has 1"):
        estimate(
            load_plan(QWEN3_CR13), BlockBounds(minimum=1, full=9), device=get_device("RBLN-CA25")
        )


@pytest.mark.parametrize(
    ("num_blocks", "batch_size", "tokens", "sequences", "longest"),
    [
        (40, 8, 327_680, 8, 40_960),
        (9, 8, 73_728, 1, 40_960),
        (5, 8, 40_960, 1, 40_960),
        (4, 8, 32_768, 0, 32_768),
        (40, 2, 327_680, 2, 40_960),
    ],
)
def test_capacity_counts_tokens_and_whole_sequences(
    num_blocks: int, batch_size: int, tokens: int, sequences: int, longest: int
) -> None:
    held = capacity(num_blocks, block_size=8_192, max_seq_len=40_960, batch_size=batch_size)
    assert held.num_tokens == tokens
    assert held.num_full_sequences == sequences
    assert held.longest_sequence_tokens == longest


def test_capacity_of_a_sequence_that_ends_within_a_block_counts_the_whole_block() -> None:
    assert capacity(1, block_size=64, max_seq_len=100, batch_size=9).num_full_sequences == 0
    assert capacity(2, block_size=64, max_seq_len=100, batch_size=9).num_full_sequences == 1


# Laws, on plans of up to 3 nodes of up to 4 chiplets with sizes around the alignment.
sizes = st.integers(min_value=0, max_value=9 * MIB)


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    num_nodes, num_chiplets = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))

    def grid() -> list[list[int]]:
        return [[draw(sizes) for _ in range(num_chiplets)] for _ in range(num_nodes)]

    return make_plan(
        static=grid(),
        resizable=[grid() for _ in range(draw(st.integers(0, 3)))],
        fixed=[grid() for _ in range(draw(st.integers(0, 2)))],
        current_blocks=draw(st.integers(1, 50)),
    )


all_bounds = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(
    lambda pair: BlockBounds(minimum=min(pair), full=max(pair))
)
laws = settings(deadline=None, max_examples=60)


def fits_naively(plan: MemoryPlan, num_blocks: int, budget_bytes: int) -> bool:
    share = budget_bytes // plan.num_chiplets
    return all(need <= share for node in plan.total_at(num_blocks) for need in node)


@laws
@given(plan=plans(), counts=st.tuples(st.integers(1, 60), st.integers(1, 60)), budget=sizes)
def test_fits_is_monotone_in_the_count(
    plan: MemoryPlan, counts: tuple[int, int], budget: int
) -> None:
    low, high = sorted(counts)
    budget_bytes = budget * 40
    assert fits(plan, low, budget_bytes) or not fits(plan, high, budget_bytes)


@laws
@given(plan=plans(), num_blocks=st.integers(1, 60))
def test_smallest_budget_fits_and_one_byte_less_does_not(plan: MemoryPlan, num_blocks: int) -> None:
    smallest = smallest_budget(plan, num_blocks)
    assert fits_naively(plan, num_blocks, smallest)
    assert smallest == 0 or not fits_naively(plan, num_blocks, smallest - 1)


@laws
@given(plan=plans(), num_blocks=st.integers(1, 60), budget_bytes=st.integers(0, 800 * MIB))
def test_fits_agrees_with_looking_at_every_chiplet(
    plan: MemoryPlan, num_blocks: int, budget_bytes: int
) -> None:
    assert fits(plan, num_blocks, budget_bytes) == fits_naively(plan, num_blocks, budget_bytes)


@laws
@given(plan=plans(), bounds=all_bounds, budget_bytes=st.integers(1, 1600 * MIB))
def test_estimate_is_what_trying_every_count_finds(
    plan: MemoryPlan, bounds: BlockBounds, budget_bytes: int
) -> None:
    device = make_device(
        budget_bytes // plan.num_chiplets * plan.num_chiplets, num_chiplets=plan.num_chiplets
    )
    tried = range(bounds.minimum, bounds.full + 1)
    if not plan.has_resizable_cache:
        tried = range(plan.current_blocks, plan.current_blocks + 1)
    fitting = [n for n in tried if fits_naively(plan, n, device.available_bytes)]
    if not fitting:
        with pytest.raises(BudgetTooSmall) as caught:
            estimate(plan, bounds, device=device)
        assert caught.value.smallest_budget_bytes > device.available_bytes
        return
    sizing = estimate(plan, bounds, device=device)
    assert sizing.num_blocks == max(fitting)
    expected = "full_batch" if max(fitting) == bounds.full else "budget"
    assert sizing.limited_by == (expected if plan.has_resizable_cache else "fixed")


@laws
@given(plan=plans(), bounds=all_bounds, budget_bytes=st.integers(1, 1600 * MIB))
def test_sizing_accounts_for_every_byte_of_every_chiplet(
    plan: MemoryPlan, bounds: BlockBounds, budget_bytes: int
) -> None:
    device = make_device(1600 * MIB, num_chiplets=plan.num_chiplets)
    try:
        sizing = estimate(plan, bounds, device=device, budget=parse_budget(budget_bytes))
    except BudgetTooSmall:
        assert not fits_naively(plan, bounds.minimum, budget_bytes) or not plan.has_resizable_cache
        return
    total = plan.total_at(sizing.num_blocks)
    for use in sizing.chiplets:
        assert use.used_bytes == total[use.node][use.chiplet]
        assert use.used_bytes + use.free_bytes == budget_bytes // plan.num_chiplets
        assert min(use.free_bytes, use.alignment_bytes) >= 0
    if sizing.next_block_budget_bytes is not None:
        assert sizing.next_block_budget_bytes > budget_bytes
        assert fits_naively(plan, sizing.num_blocks + 1, sizing.next_block_budget_bytes)


@laws
@given(
    plan=plans(),
    bounds=all_bounds,
    percents=st.tuples(st.integers(1, 100), st.integers(1, 100)),
)
def test_smaller_budget_never_gives_more_blocks(
    plan: MemoryPlan, bounds: BlockBounds, percents: tuple[int, int]
) -> None:
    device = make_device(800 * MIB, num_chiplets=plan.num_chiplets)
    counts = []
    for percent in sorted(percents):
        try:
            budget = parse_budget(f"{percent}%")
            counts.append(estimate(plan, bounds, device=device, budget=budget).num_blocks)
        except BudgetTooSmall:
            counts.append(0)
    assert counts[0] <= counts[1]
