from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_plans import (
    ALL,
    LLAMA2_FLASH,
    QWEN3_CR13,
    load_config,
    load_plan,
    load_programs,
    make_plan,
)

from reblock.errors import ArtifactMismatch, CorruptArtifact
from reblock.memory import TENSOR_ALIGNMENT_BYTES, CacheTensor, MemoryPlan, ProgramMemory
from reblock.units import MIB


def make_program(
    name: str,
    *,
    weight: tuple[tuple[int, ...], ...] = ((100,),),
    caches: dict[str, tuple[tuple[int, ...], ...]] | None = None,
) -> ProgramMemory:
    return ProgramMemory(
        name=name,
        alloc={"Weight": weight},
        caches={"kv_0": ((8,),)} if caches is None else caches,
    )


def join(programs: list[ProgramMemory], *names: str, current_blocks: int = 4) -> MemoryPlan:
    return MemoryPlan.from_programs(
        programs,
        resizable=dict.fromkeys(names or ("kv_0",), True),
        current_blocks=current_blocks,
        source="/artifact",
    )


def test_static_terms_are_summed_over_programs_and_caches_counted_once() -> None:
    plan = load_plan(LLAMA2_FLASH)
    programs = load_programs(LLAMA2_FLASH)
    assert len(programs) == 4
    # The four programs share the weights, which only the first of them reports.
    assert plan.static["Weight"] == ((3_489_660_928,),) * 4
    assert plan.static["Workspace"] == ((4 * 62_914_560,),) * 4
    assert plan.kv_bytes_at(plan.current_blocks) == ((64 * 201_326_592,),) * 4


def test_program_without_a_term_of_another_counts_nothing_for_it() -> None:
    one = ProgramMemory(name="one", alloc={"Weight": ((5,),)}, caches={"kv_0": ((8,),)})
    two = ProgramMemory(name="two", alloc={"Runtime": ((7,),)}, caches={"kv_0": ((8,),)})
    plan = join([one, two])
    assert plan.static == {"Weight": ((5,),), "Runtime": ((7,),)}
    assert plan.static_bytes == ((12,),)


def test_two_pools_of_one_device_are_both_counted() -> None:
    plan = make_plan(static=[[0]], resizable=[[[174 * MIB]]], fixed=[[[2560 * MIB]]])
    assert plan.kv_bytes_at(1) == ((2734 * MIB,),)
    assert plan.fixed_cache_bytes == ((2560 * MIB,),)
    assert plan.bytes_per_block == ((174 * MIB,),)


def test_tensor_is_aligned_after_it_was_scaled() -> None:
    plan = make_plan(static=[[0]], resizable=[[[3 * MIB]], [[3 * MIB]]])
    # 3 MiB rounds up to 4 alone, but twice 3 MiB needs no rounding.
    assert plan.kv_bytes_at(1) == ((8 * MIB,),)
    assert plan.kv_bytes_at(2) == ((12 * MIB,),)
    assert plan.kv_unaligned_bytes_at(1) == ((6 * MIB,),)


def test_fixed_cache_is_the_same_at_any_count() -> None:
    plan = make_plan(static=[[1]], fixed=[[[3 * MIB]]], current_blocks=2)
    assert plan.total_at(1) == plan.total_at(100) == ((4 * MIB + 1,),)
    assert not plan.has_resizable_cache


@pytest.mark.parametrize("name", ALL)
def test_reference_plan_at_its_current_count_is_what_the_programs_report(name: str) -> None:
    plan = load_plan(name)
    first = load_programs(name)[0]
    reported = sum(sum(map(sum, grid)) for grid in first.caches.values())
    assert sum(map(sum, plan.kv_unaligned_bytes_at(plan.current_blocks))) == reported


@pytest.mark.parametrize("name", ALL)
def test_reference_plan_agrees_with_the_shapes_of_its_config(name: str) -> None:
    config, plan = load_config(name), load_plan(name)
    for meta, cache in zip(config.cache_metas, plan.caches, strict=True):
        held = cache.bytes_at(config.kvcache_num_blocks, plan.current_blocks)
        assert sum(map(sum, held)) == meta.bytes_at(config.kvcache_num_blocks)


def test_resized_plan_gives_the_same_bytes_per_block() -> None:
    plan = load_plan(QWEN3_CR13)
    assert plan.current_blocks == 107
    assert plan.bytes_per_block == ((301_989_888,) * 4,)
    assert (plan.num_nodes, plan.num_chiplets) == (1, 4)


def test_plan_without_caches_has_the_shape_of_its_static_terms() -> None:
    plan = make_plan(static=[[1, 2], [3, 4]])
    assert (plan.num_nodes, plan.num_chiplets) == (2, 2)
    assert plan.total_at(5) == ((1, 2), (3, 4))


def test_programs_that_disagree_on_a_cache_are_refused() -> None:
    programs = [make_program("prefill"), make_program("decoder", caches={"kv_0": ((12,),)})]
    with pytest.raises(ArtifactMismatch) as caught:
        join(programs)
    assert caught.value.path == "/artifact"
    assert "'decoder' holds 12 bytes in cache 'kv_0', but another program holds 8" in str(
        caught.value
    )


def test_cache_that_the_config_does_not_name_is_refused() -> None:
    program = make_program("prefill", caches={"kv_0": ((8,),), "kv_9": ((8,),)})
    with pytest.raises(ArtifactMismatch, match="'kv_9' is named by the programs but not"):
        join([program])


def test_cache_that_no_program_has_is_refused() -> None:
    with pytest.raises(ArtifactMismatch, match=r"'kv_1' is named by rbln_config\.json alone"):
        join([make_program("prefill")], "kv_0", "kv_1")


def test_programs_for_devices_of_different_shape_are_refused() -> None:
    programs = [make_program("prefill"), make_program("decoder", weight=((1, 2),))]
    with pytest.raises(ArtifactMismatch, match=r"'decoder' reports Weight for 1 nodes of"):
        join(programs)


@pytest.mark.parametrize("weight", [(), ((),), ((1,), (2, 3))])
def test_grid_that_is_no_grid_is_refused(weight: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(CorruptArtifact, match="every node must have the same, one at least"):
        join([make_program("prefill", weight=weight)])


@pytest.mark.parametrize(
    "programs", [[], [ProgramMemory(name="prefill", alloc={}, caches={})]], ids=["none", "empty"]
)
def test_programs_that_report_nothing_are_refused(programs: list[ProgramMemory]) -> None:
    with pytest.raises(CorruptArtifact, match="no memory at all"):
        join(programs)


def test_cache_that_does_not_divide_into_its_blocks_is_refused() -> None:
    with pytest.raises(CorruptArtifact, match="kv_0 holds 8 bytes, which do not divide into 3"):
        join([make_program("prefill")], current_blocks=3)


def test_cache_tensor_scales_by_the_exact_ratio() -> None:
    cache = CacheTensor(name="kv_0", is_resizable=True, bytes_grid=((8 * 107, 107),))
    assert cache.bytes_at(40, 107) == ((320, 40),)


@given(
    per_block=st.integers(min_value=0, max_value=10 * MIB),
    current=st.integers(min_value=1, max_value=1000),
    counts=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
)
def test_cache_memory_never_falls_when_blocks_are_added(
    per_block: int, current: int, counts: tuple[int, int]
) -> None:
    plan = make_plan(static=[[0]], resizable=[[[per_block]]], current_blocks=current)
    low, high = sorted(counts)
    assert plan.kv_bytes_at(low) <= plan.kv_bytes_at(high)
    aligned, unaligned = plan.kv_bytes_at(low)[0][0], plan.kv_unaligned_bytes_at(low)[0][0]
    assert unaligned == per_block * low
    assert aligned % TENSOR_ALIGNMENT_BYTES == 0
    assert 0 <= aligned - unaligned < TENSOR_ALIGNMENT_BYTES
