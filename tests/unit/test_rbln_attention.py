"""The class methods of optimum-rbln, on the stand-in artifacts; numbers are computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rbln_models import (
    BrokenModel,
    FakeModel,
    OldModel,
    load_artifact,
    sizes_of,
    warnings_in,
)
from reference_plans import ALL, LLAMA2_EAGER, LLAMA2_FLASH, QWEN3_CA25, QWEN3_CR13

from reblock.errors import (
    ArtifactMismatch,
    BelowMinimum,
    BudgetAboveDevice,
    BudgetTooSmall,
    CompilerTooOld,
    CorruptArtifact,
    InvalidBlockCount,
    InvalidBudget,
    NotResizable,
    UsageError,
)
from reblock.rbln import RBLNDecoderOnlyFlashAttentionMixin as Mixin
from reblock.rbln import RBLNDecoderOnlyModelForCausalLMConfig
from reblock.units import GIB, MIB

# 2 of 8 KV heads on each of 4 devices, blocks of 8,192 tokens, head size 128, 2 bytes a value.
QWEN3_TENSOR_BLOCK = 2 * 8_192 * 128 * 2
QWEN3_BLOCK = 301_989_888  # 36 layers of keys and of values: 72 * 4,194,304
# 4,399,824,896 of weights, once, and 11,796,480 + 94,371,840 in each of the two programs.
QWEN3_CA25_STATIC = 4_612_161_536
CA_AVAILABLE = 16_877_879_296  # 16 GiB less 288 MiB

MODELS = {QWEN3_CA25: (40, 9, 40), QWEN3_CR13: (107, 33, 160), LLAMA2_FLASH: (24, 17, 64)}


def fake_config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "memory_budget": None,
        "npu": "RBLN-CA25",
        "phases": ["prefill", "decode"],
        "num_full_blocks": 64,
        "cache_metas": [SimpleNamespace(name="kv", can_resize=True)],
    }
    return SimpleNamespace(**{**values, **changes})


def estimate(name: str, budget: Any = None) -> int:
    models, config = load_artifact(name)
    config.memory_budget = budget
    return Mixin.estimate_num_kvcache_blocks(models, config, config.kvcache_num_blocks)


# Estimates


@pytest.mark.parametrize(("name", "counts"), MODELS.items())
def test_estimate_of_an_artifact_is_the_count_it_was_compiled_to(
    name: str, counts: tuple[int, int, int]
) -> None:
    models, config = load_artifact(name)
    count, minimum, full = counts
    assert Mixin.estimate_num_kvcache_blocks(models, config, count) == count
    assert (config.num_min_blocks, config.num_full_blocks) == (minimum, full)


def test_qwen3_8b_on_four_ca25_takes_11_25_gib_of_each() -> None:
    models, config = load_artifact(QWEN3_CA25)
    caches = models["prefill"].exp_get_dram_tensor_sizes()
    sizes = Mixin._kvcache_bytes_per_chiplet(caches, config, 40, current_blocks=40)
    assert sizes == {(device, 0): 12_079_595_520 for device in range(4)}
    assert 12_079_595_520 == 11 * GIB + GIB // 4 == 40 * QWEN3_BLOCK
    assert Mixin._required_memory_at(models, config, 40) == 45 * GIB


@pytest.mark.parametrize(
    ("budget", "num_blocks"),
    [
        (None, 40),
        (1.0, 40),
        ("100%", 40),
        (CA_AVAILABLE, 40),
        (0.8, 29),  # 13,502,303,436 - 4,612,161,536 = 8,890,141,900, 29.4 blocks
        ("80%", 29),
        ("0.8", 29),
        ("10GB", 20),  # 10,737,418,240 - 4,612,161,536 = 6,125,256,704, 20.3 blocks
        (10_737_418_240, 20),
        (0.5, 12),  # 8,438,939,648 - 4,612,161,536 = 3,826,778,112, 12.7 blocks
        (7_330_070_528, 9),  # 4,612,161,536 + 9 * 301,989,888
    ],
)
def test_budget_gives_the_blocks_that_are_left_after_weights_and_workspace(
    budget: Any, num_blocks: int
) -> None:
    assert estimate(QWEN3_CA25, budget) == num_blocks


@pytest.mark.parametrize(
    ("name", "smallest", "minimum"),
    [
        (QWEN3_CA25, 7_330_070_528, 9),
        # Four chiplets, each with 5,107,613,696 + 33 * 301,989,888.
        (QWEN3_CR13, 4 * 15_073_280_000, 33),
        # 3,489,660,928 + 4 * (7,864,320 + 62,914,560), and 17 blocks of 512 MiB.
        (LLAMA2_FLASH, 3_772_776_448 + 17 * 536_870_912, 17),
    ],
)
def test_budget_too_small_names_the_smallest_that_works_and_that_one_works(
    name: str, smallest: int, minimum: int
) -> None:
    with pytest.raises(BudgetTooSmall, match=f"raise memory_budget to {smallest}") as caught:
        estimate(name, smallest - 1)
    assert isinstance(caught.value, ValueError)
    assert caught.value.smallest_budget_bytes == smallest
    assert estimate(name, smallest) == minimum


@pytest.mark.parametrize("name", MODELS)
def test_smaller_budget_never_gives_more_blocks(name: str) -> None:
    counts = [estimate(name, f"{percent}%") for percent in range(80, 101)]
    assert counts == sorted(counts)


def test_budget_above_the_device_is_refused_and_both_are_named() -> None:
    with pytest.raises(BudgetAboveDevice, match=r"17,179,869,184.*16,877,879,296") as caught:
        estimate(QWEN3_CA25, "16GB")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("budget", [0, 0.0, -1, 1.5, "110%", "much", True, float("nan")])
def test_budget_that_cannot_be_read_is_refused(budget: Any) -> None:
    with pytest.raises(InvalidBudget, match="memory_budget"):
        estimate(QWEN3_CA25, budget)


def test_chiplet_that_is_two_gib_heavier_than_the_others_decides() -> None:
    # Each chiplet has 35 GiB. (37,580,963,840 - 5,107,613,696) / 301,989,888 is 107.5, and with
    # 2,147,483,648 less 100.4.
    models, config = load_artifact(QWEN3_CR13)
    models["prefill"]._plan["alloc"]["Workspace"][0][2] += 2 * GIB
    assert Mixin.estimate_num_kvcache_blocks(models, config, 107) == 100


def test_lighter_chiplets_do_not_make_up_for_a_heavy_one() -> None:
    models, config = load_artifact(QWEN3_CR13)
    workspace = models["prefill"]._plan["alloc"]["Workspace"][0]
    workspace[2] += 2 * GIB
    models["prefill"]._plan["alloc"]["Weight"][0][0] -= 2 * GIB
    assert Mixin.estimate_num_kvcache_blocks(models, config, 107) == 100


def test_without_a_prefill_phase_the_estimate_is_1_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Mixin.estimate_num_kvcache_blocks({}, fake_config(phases=["decode"])) == 1
    (warning,) = warnings_in(caplog)
    assert "has no 'prefill'" in warning


def test_without_a_prefill_program_the_estimate_is_refused() -> None:
    with pytest.raises(UsageError, match="has decoder_batch_1, but no 'prefill'"):
        Mixin.estimate_num_kvcache_blocks({"decoder_batch_1": FakeModel({})}, fake_config())


def test_estimate_reads_no_more_than_the_documented_attributes() -> None:
    # 16 GiB less 288 MiB hold 8,048 tensors of 2 MiB.
    models = {"prefill": FakeModel({"Kernel": [[0]]}, {"kv": [[2 * MIB]]})}
    assert Mixin.estimate_num_kvcache_blocks(models, fake_config(num_full_blocks=10_000)) == 8_048
    models["prefill"].alloc = {"Kernel": [[48 * MIB]]}
    assert Mixin.estimate_num_kvcache_blocks(models, fake_config(num_full_blocks=10_000)) == 8_024


def test_decoders_are_asked_for_what_is_no_cache_only() -> None:
    # 48 MiB fewer are left for tensors of 2 MiB, of which 8,048 fit the empty device.
    decoder: Any = SimpleNamespace(get_alloc_per_chiplet_by_key=lambda: {"Kernel": [[48 * MIB]]})
    models = {"prefill": FakeModel({}, {"kv": [[2 * MIB]]}), "decoder_batch_1": decoder}
    assert Mixin.estimate_num_kvcache_blocks(models, fake_config(num_full_blocks=10_000)) == 8_024
    assert Mixin._required_memory_at(models, fake_config(), 3) == 6 * MIB


def test_device_with_another_number_of_chiplets_than_the_programs_is_refused() -> None:
    models, config = load_artifact(QWEN3_CR13)
    config.npu = "RBLN-CA25"
    with pytest.raises(UsageError, match="devices of 4 chiplets, but RBLN-CA25 has 1"):
        Mixin.estimate_num_kvcache_blocks(models, config, 107)
    with pytest.raises(UsageError, match="devices of 4 chiplets, but RBLN-CA25 has 1"):
        Mixin._collect_chiplet_kvcache_inputs(models, config)


@pytest.mark.parametrize("current", [0, -1, 2.0, True, None])
def test_current_blocks_must_be_a_count(current: Any) -> None:
    models, config = load_artifact(QWEN3_CA25)
    with pytest.raises(InvalidBlockCount):
        Mixin.estimate_num_kvcache_blocks(models, config, current)


def test_buffers_that_do_not_divide_into_current_blocks_are_refused() -> None:
    models, config = load_artifact(QWEN3_CA25)
    with pytest.raises(CorruptArtifact, match="do not divide into 7 blocks"):
        Mixin.estimate_num_kvcache_blocks(models, config, 7)


def test_caches_that_the_configuration_does_not_name_are_refused() -> None:
    models = {"prefill": FakeModel({}, {"kv": [[1]], "other": [[1]]})}
    with pytest.raises(ArtifactMismatch, match="cache 'other' is named by the programs but"):
        Mixin.estimate_num_kvcache_blocks(models, fake_config())


# The parts of an estimate


def test_collect_gives_what_is_no_cache_the_caches_and_a_share_of_the_budget() -> None:
    models, config = load_artifact(QWEN3_CR13)
    config.memory_budget = "50%"
    alloc, caches, available, chiplets = Mixin._collect_chiplet_kvcache_inputs(models, config)
    # Weights once, and 39,321,600 + 314,572,800 in each of the two programs.
    assert alloc == {(0, chiplet): 4_399_824_896 + 2 * 353_894_400 for chiplet in range(4)}
    assert caches == models["prefill"].exp_get_dram_tensor_sizes()
    assert available == 70 * GIB // 4
    assert chiplets == set(alloc)


def test_collect_needs_no_cache_metas() -> None:
    models = {"prefill": FakeModel({"Kernel": [[100], [100]]}, {"kv": [[10], [10]]})}
    config = SimpleNamespace(memory_budget=None, npu="RBLN-CA25")
    alloc, caches, available, chiplets = Mixin._collect_chiplet_kvcache_inputs(models, config)
    assert alloc == {(0, 0): 100, (1, 0): 100}
    assert caches == {"kv": [[10], [10]]}
    assert available == CA_AVAILABLE
    assert chiplets == {(0, 0), (1, 0)}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("budget", [None, "90%"])
def test_search_in_what_collect_gives_is_the_estimate(name: str, budget: Any) -> None:
    models, config = load_artifact(name)
    config.memory_budget, current = budget, config.kvcache_num_blocks
    inputs = Mixin._collect_chiplet_kvcache_inputs(models, config)
    found = Mixin._search_num_kvcache_blocks(config, *inputs, current_blocks=current)
    assert found == Mixin.estimate_num_kvcache_blocks(models, config, current)


def test_search_that_finds_nothing_says_what_each_chiplet_needs() -> None:
    config = fake_config(num_min_blocks=3)
    with pytest.raises(BudgetTooSmall, match=r"node 1, chiplet 0 needs 6\.00 MiB") as caught:
        Mixin._search_num_kvcache_blocks(
            config, {(0, 0): 5, (1, 0): 0}, {"kv": [[0], [2 * MIB]]}, 6 * MIB - 1, {(0, 0)}
        )
    assert caught.value.smallest_budget_bytes == 6 * MIB
    assert caught.value.tightest == (1, 0)


def test_search_counts_a_chiplet_that_holds_nothing_but_caches() -> None:
    sizes = {"kv": [[0, 2 * MIB]]}
    found = Mixin._search_num_kvcache_blocks(fake_config(), {(0, 0): 0}, sizes, 9 * MIB, {(0, 0)})
    assert found == 4


# Memory at a count


def test_required_memory_is_aligned_after_scaling_and_so_not_linear() -> None:
    # 3 MiB a block: 3 -> 4, 6 -> 6, 9 -> 10, 12 -> 12; the fixed one always takes 2 MiB.
    metas = [
        SimpleNamespace(name="kv", can_resize=True),
        SimpleNamespace(name="window", can_resize=False),
    ]
    config = fake_config(cache_metas=metas)
    models = {"prefill": FakeModel({}, {"kv": [[3 * MIB]], "window": [[1]]})}
    taken = [Mixin._required_memory_at(models, config, n) // MIB for n in (1, 2, 3, 4)]
    assert taken == [6, 8, 12, 14]


@pytest.mark.parametrize("name", MODELS)
def test_required_memory_rises_with_the_count(name: str) -> None:
    models, config = load_artifact(name)
    taken = [Mixin._required_memory_at(models, config, n) for n in range(1, 170)]
    assert taken == sorted(taken)
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize("name", ALL)
def test_required_memory_at_the_current_count_is_what_the_models_hold(name: str) -> None:
    models, config = load_artifact(name)
    held = models["prefill"].get_alloc_per_chiplet_by_key()["DramTensor"]
    assert Mixin._required_memory_at(models, config, config.kvcache_num_blocks) == sum(
        map(sum, held)
    )


@pytest.mark.parametrize("target", [9, 25, 40])
def test_required_memory_is_right_after_a_resize(target: int) -> None:
    models, config = load_artifact(QWEN3_CA25)
    expected = {n: Mixin._required_memory_at(models, config, n) for n in (9, 17, 40)}
    Mixin.rescale_kvcache_num_blocks(models, config, target)
    config.kvcache_num_blocks = target
    assert {n: Mixin._required_memory_at(models, config, n) for n in expected} == expected
    held = models["prefill"].get_alloc_per_chiplet_by_key()["DramTensor"]
    assert Mixin._required_memory_at(models, config, target) == sum(map(sum, held))


@pytest.mark.parametrize("count", [None, 0])
def test_required_memory_of_a_fresh_compilation_counts_from_one_block(count: int | None) -> None:
    models = {"prefill": FakeModel({}, {"kv": [[2 * MIB]]})}
    config = fake_config(kvcache_num_blocks=count)
    assert Mixin._required_memory_at(models, config, 5) == 10 * MIB


# After a compilation


def test_fresh_compilation_is_grown_to_the_estimate() -> None:
    models, config = load_artifact(LLAMA2_FLASH)
    Mixin.rescale_kvcache_num_blocks(models, SimpleNamespace(**vars_of(config)), 1)
    config.kvcache_num_blocks = 0
    Mixin.set_kvcache_num_blocks_after_compilation(models, config)
    assert config.kvcache_num_blocks == 24
    assert sizes_of(models) == sizes_of(load_artifact(LLAMA2_FLASH)[0])


def vars_of(config: RBLNDecoderOnlyModelForCausalLMConfig) -> dict[str, Any]:
    """Return what a rescale reads, with a minimum of one block."""
    return {
        "kvcache_num_blocks": config.kvcache_num_blocks,
        "cache_metas": config.cache_metas,
        "num_full_blocks": config.num_full_blocks,
    }


def test_fresh_compilation_that_does_not_fit_is_left_as_it_is() -> None:
    models = {"prefill": FakeModel({}, {"kv": [[GIB]]})}
    config = fake_config(kvcache_num_blocks=0, num_min_blocks=16)
    with pytest.raises(BudgetTooSmall):
        Mixin.set_kvcache_num_blocks_after_compilation(models, config)
    assert (models["prefill"].dram, config.kvcache_num_blocks) == ({"kv": [[GIB]]}, 0)


def test_decoder_alone_does_not_do_where_more_than_one_block_is_needed() -> None:
    models = {"decoder_batch_1": FakeModel({}, {"kv": [[MIB]]})}
    config = fake_config(phases=["decode"], kvcache_num_blocks=0, num_min_blocks=2)
    with pytest.raises(BelowMinimum, match="kvcache_num_blocks=1 is below 2"):
        Mixin.set_kvcache_num_blocks_after_compilation(models, config)
    assert models["decoder_batch_1"].dram == {"kv": [[MIB]]}


@pytest.mark.parametrize("multiplier", [0, -1, 1.5, True])
def test_caches_are_multiplied_by_a_count_only(multiplier: Any) -> None:
    models = {"prefill": FakeModel({}, {"kv": [[MIB]]})}
    with pytest.raises(InvalidBlockCount):
        Mixin.multiply_kv_cache_num_blocks(models, fake_config(), multiplier)
    assert models["prefill"].dram == {"kv": [[MIB]]}


def test_compiler_that_cannot_multiply_is_found_before_any_model_is_changed() -> None:
    models: dict[str, Any] = {
        "prefill": FakeModel({}, {"kv": [[MIB]]}),
        "decoder_batch_1": SimpleNamespace(),
    }
    with pytest.raises(CompilerTooOld, match="exp_multiply_buffer_size"):
        Mixin.multiply_kv_cache_num_blocks(models, fake_config(), 4)
    assert models["prefill"].dram == {"kv": [[MIB]]}


# Resizing


def test_rescale_gives_every_buffer_its_bytes_per_block_times_the_target() -> None:
    models, config = load_artifact(QWEN3_CA25)
    assert {size for _, size in cache_sizes(models)} == {40 * QWEN3_TENSOR_BLOCK}
    Mixin.rescale_kvcache_num_blocks(models, config, 9)
    found = cache_sizes(models)
    # Two programs of 72 caches on four devices.
    assert len(found) == 2 * 72 * 4
    assert {size for _, size in found} == {37_748_736} == {9 * QWEN3_TENSOR_BLOCK}
    held = models["decoder_batch_8"].get_alloc_per_chiplet_by_key()["DramTensor"]
    assert held == [[2_717_908_992]] * 4 == [[9 * QWEN3_BLOCK]] * 4


def cache_sizes(models: dict[str, Any]) -> list[tuple[str, int]]:
    return [
        (name, size)
        for sizes in sizes_of(models).values()
        for name, rows in sizes.items()
        for row in rows
        for size in row
    ]


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_gives_the_same_bytes(name: str) -> None:
    models, config = load_artifact(name)
    before = sizes_of(models)
    count, minimum, _ = MODELS[name]
    for target in (minimum, minimum + 1, count):
        Mixin.rescale_kvcache_num_blocks(models, config, target)
        config.kvcache_num_blocks = target
    assert sizes_of(models) == before


def test_resized_artifact_is_estimated_as_before_with_its_current_count() -> None:
    models, config = load_artifact(QWEN3_CR13)
    Mixin.rescale_kvcache_num_blocks(models, config, 40)
    config.kvcache_num_blocks = 40
    assert Mixin.estimate_num_kvcache_blocks(models, config, current_blocks=40) == 107
    config.memory_budget = "80%"
    # Each chiplet has 28 GiB: (30,064,771,072 - 5,107,613,696) / 301,989,888 is 82.6.
    assert Mixin.estimate_num_kvcache_blocks(models, config, current_blocks=40) == 82


def test_rescale_leaves_the_configuration_alone() -> None:
    models, config = load_artifact(QWEN3_CA25)
    Mixin.rescale_kvcache_num_blocks(models, config, 9)
    assert config.kvcache_num_blocks == 40


@pytest.mark.parametrize("target", [8, 1])
def test_rescale_below_the_minimum_is_refused(target: int) -> None:
    models, config = load_artifact(QWEN3_CA25)
    before = sizes_of(models)
    with pytest.raises(BelowMinimum, match=f"kvcache_num_blocks={target} is below 9") as caught:
        Mixin.rescale_kvcache_num_blocks(models, config, target)
    assert isinstance(caught.value, ValueError)
    assert sizes_of(models) == before


@pytest.mark.parametrize("target", [0, -5, 2.5, True, None, "many"])
def test_rescale_to_what_is_no_count_is_refused(target: Any) -> None:
    models, config = load_artifact(QWEN3_CA25)
    with pytest.raises(InvalidBlockCount):
        Mixin.rescale_kvcache_num_blocks(models, config, target)


@pytest.mark.parametrize("current", [0, None, -1])
def test_rescale_needs_to_know_the_current_count(current: Any) -> None:
    models, config = load_artifact(QWEN3_CA25)
    config.kvcache_num_blocks = current
    with pytest.raises(ValueError, match="kvcache_num_blocks"):
        Mixin.rescale_kvcache_num_blocks(models, config, 20)


def test_compiler_that_cannot_rescale_is_found_before_any_model_is_changed() -> None:
    models, config = load_artifact(QWEN3_CA25)
    before = sizes_of(models)
    # The last of them, so that the others would have been changed by then.
    models["prefill"] = OldModel(models["prefill"])
    assert list(models)[-1] == "prefill"
    with pytest.raises(CompilerTooOld, match="upgrade rebel-compiler") as caught:
        Mixin.rescale_kvcache_num_blocks(models, config, 9)
    assert isinstance(caught.value, RuntimeError)
    assert "exp_rescale_buffer_size" in str(caught.value)
    assert sizes_of(models) == before


def test_model_that_fails_to_rescale_leaves_all_as_they_were() -> None:
    models = {
        "prefill": FakeModel({}, {"kv": [[3 * MIB]]}),
        "decoder_batch_1": BrokenModel({}, {"kv": [[3 * MIB]]}),
    }
    config = fake_config(kvcache_num_blocks=3)
    with pytest.raises(OSError, match="no memory"):
        Mixin.rescale_kvcache_num_blocks(models, config, 2)
    assert models["prefill"].scaled == [{"kv": (2, 3)}, {"kv": (3, 2)}]
    assert sizes_of(models) == {name: {"kv": [[3 * MIB]]} for name in models}


def test_rescale_names_caches_that_can_be_resized_only() -> None:
    metas = [
        SimpleNamespace(name="kv", can_resize=True),
        SimpleNamespace(name="window", can_resize=False),
    ]
    model = FakeModel({}, {"kv": [[4]], "window": [[4]]})
    config = fake_config(cache_metas=metas, kvcache_num_blocks=2)
    Mixin.rescale_kvcache_num_blocks({"prefill": model}, config, 3)
    assert model.scaled == [{"kv": (3, 2)}]
    assert model.dram == {"kv": [[6]], "window": [[4]]}


@pytest.mark.parametrize(
    ("current", "target", "fragments"),
    [
        (40, 40, []),
        (40, 9, []),
        (20, 30, ["more than the 20 blocks that there are now"]),
        (50, 45, ["more than the 40 blocks that a full batch can use"]),
        (40, 45, ["more than the 40 blocks that there are now", "the other 5 take memory for"]),
    ],
)
def test_rescale_warns_of_more_blocks_than_there_were_or_can_be_used(
    caplog: pytest.LogCaptureFixture, current: int, target: int, fragments: list[str]
) -> None:
    models = {"prefill": FakeModel({}, {"kv": [[current * MIB]]})}
    config = fake_config(kvcache_num_blocks=current, num_full_blocks=40)
    Mixin.rescale_kvcache_num_blocks(models, config, target)
    warnings = warnings_in(caplog)
    assert len(warnings) == len(fragments)
    for fragment, warning in zip(fragments, warnings, strict=True):
        assert fragment in warning
    assert models["prefill"].dram == {"kv": [[target * MIB]]}


# A fixed count


def test_fixed_count_is_what_the_estimate_gives() -> None:
    assert estimate(LLAMA2_EAGER) == 1


def test_fixed_count_of_several_blocks_is_known_from_the_configuration() -> None:
    metas = [SimpleNamespace(name="kv", can_resize=False)]
    models = {"prefill": FakeModel({}, {"kv": [[24 * MIB]]})}
    config = fake_config(cache_metas=metas, kvcache_num_blocks=24)
    assert Mixin.estimate_num_kvcache_blocks(models, config) == 24
    # Caches of windows alone hold what a full batch needs.
    config.kvcache_num_blocks = 0
    assert Mixin.estimate_num_kvcache_blocks(models, config) == 64


def test_fixed_count_that_does_not_fit_the_budget_is_refused() -> None:
    # 3,631,218,688 bytes and 64 caches of 8 MiB.
    smallest = 3_631_218_688 + 64 * 8 * MIB
    with pytest.raises(BudgetTooSmall):
        estimate(LLAMA2_EAGER, smallest - 1)
    assert estimate(LLAMA2_EAGER, smallest) == 1


def test_fixed_count_cannot_be_changed() -> None:
    models, config = load_artifact(LLAMA2_EAGER)
    before = sizes_of(models)
    with pytest.raises(NotResizable, match="none of the 64 caches can be resized") as caught:
        Mixin.rescale_kvcache_num_blocks(models, config, 2)
    assert isinstance(caught.value, ValueError)
    Mixin.rescale_kvcache_num_blocks(models, config, 1)
    assert sizes_of(models) == before
