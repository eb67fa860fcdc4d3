"""Plans: the numbers, where they come from, and that they are the smallest and the largest ones."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from artifacts import make_artifact
from rbln_artifacts import QWEN3_CA25, QWEN3_CR13, STANDIN, copy_artifact
from reblock.artifact.reader import open_artifact
from reblock.budget import MemoryBudget, parse_budget
from reblock.devices import get_device
from reblock.errors import (
    BelowMinimum,
    BudgetAboveDevice,
    InvalidOption,
    UnsupportedModel,
    UsageError,
)
from reblock.memory import align
from reblock.model_spec import parse_model_config
from reblock.model_spec.weights import WeightBytes
from reblock.planning import Plan, PlanSettings, make_plan, parse_target, plan
from reblock.planning.sources import ModelSource
from reblock.sizing import estimate
from reblock.units import GIB, MIB

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
ALL = sorted(path.name for path in CONFIGS.iterdir())


def config(name: str) -> str:
    return str(CONFIGS / name)


def make_source(stored: WeightBytes | None = None, **values: Any) -> ModelSource:
    """Return a small Llama, changed by `values`."""
    content = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
        "max_position_embeddings": 65_536,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    text = json.dumps({key: value for key, value in {**content, **values}.items() if value != ()})
    spec = parse_model_config(text, path="config.json")
    return ModelSource(name="tiny", kind="directory", spec=spec, stored=stored, notes=())


def plan_source(source: ModelSource, npu: str, budget: object = "100%", **values: Any) -> Plan:
    return make_plan(source, PlanSettings(**values), parse_target(npu), parse_budget(budget))


# The README's question: how many 8k requests of Qwen3-8B fit one CR13 at 80 %?


def test_qwen3_8b_with_8k_requests_on_one_cr13_at_80_percent() -> None:
    found = plan(config("Qwen3-8B"), npu="RBLN-CR13", memory_budget="80%", max_seq_len=8192)
    # By hand: 80 % of 140 GiB, less the weights and the allowance, over 1.125 GiB a request.
    budget = 140 * GIB * 8 // 10
    per_chiplet = align(8_190_735_360 * 2 // 4) + 2 * 256 * MIB
    per_request = 36 * 2 * 8192 * 8 * 128 * 2
    assert per_request == 1_207_959_552
    assert found.capacity is not None
    assert found.capacity.num_full_sequences == (budget - 4 * per_chiplet) // per_request == 84
    assert found.batch_size == 84
    assert found.is_batch_chosen
    assert found.limited_by == "budget"


def test_qwen3_8b_on_four_ca25_has_the_published_numbers() -> None:
    found = plan(
        config("Qwen3-8B"),
        npu="RBLN-CA25x4",
        batch_size=8,
        max_seq_len=40_960,
        kvcache_block_size=8192,
    )
    assert (found.bounds.minimum, found.bounds.full, found.num_blocks) == (9, 40, 40)
    assert 4 * found.waterfall.bytes_per_block == 1.125 * GIB
    blocks = next(term for term in found.waterfall.terms if term.name == "KV cache blocks")
    assert blocks.num_bytes == 11.25 * GIB
    assert found.limited_by == "full_batch"
    assert found.next_step is None


def test_a_plan_and_the_artifact_of_the_same_model_agree_on_the_cache() -> None:
    planned = plan(
        config("Qwen3-8B"), npu="RBLN-CR13", batch_size=32, kvcache_block_size=8192, num_blocks=107
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STANDIN))
        artifact = open_artifact(str(STANDIN.parent / QWEN3_CR13))
    memory = artifact.memory_plan()
    kv_bytes = [
        use.fixed_cache_bytes + use.resizable_cache_bytes + use.alignment_bytes
        for use in planned.chiplets
    ]
    assert (tuple(kv_bytes),) == memory.kv_bytes_at(107)
    assert planned.bounds == artifact.bounds


def test_the_plan_of_an_artifact_is_its_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STANDIN))
    directory = str(copy_artifact(QWEN3_CA25, tmp_path / "artifact"))
    artifact = open_artifact(directory)
    for budget in ("100%", "0.8", "60%", "50%", "8GB"):
        found = plan(directory, memory_budget=budget)
        sizing = estimate(
            artifact.memory_plan(),
            artifact.bounds,
            device=get_device("RBLN-CA25"),
            budget=parse_budget(budget),
        )
        assert found.num_blocks == sizing.num_blocks
        assert found.limited_by == sizing.limited_by
        assert found.budgets.smallest_bytes == sizing.smallest_budget_bytes
        assert found.chiplets == sizing.chiplets
        step = sizing.next_block_budget_bytes
        assert (found.next_step and found.next_step.budget_bytes) == step


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("npu", ["cpu:64GB", "RBLN-CA25x4", "RBLN-CR13"])
def test_every_public_model_has_a_plan_that_adds_up(name: str, npu: str) -> None:
    # Where parameters are not counted, a user says what the weights take.
    found = plan(config(name), npu=npu, max_seq_len=1024, weight_bytes=4 * GIB)
    fall = found.waterfall
    assert fall.dram_bytes - fall.reserve_bytes == fall.available_bytes
    assert fall.available_bytes - fall.outside_budget_bytes == fall.budget_bytes
    assert sum(term.num_bytes for term in fall.terms) + fall.unused_bytes == fall.budget_bytes
    assert fall.unused_bytes >= 0 or not found.fits
    for use in found.chiplets:
        assert use.free_bytes == use.budget_bytes - use.used_bytes
    assert found.fits
    assert found.capacity is not None
    assert found.capacity.num_full_sequences == found.batch_size


LAYERS = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 6),
        "num_attention_heads": st.sampled_from([4, 8, 16]),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([32, 64, 128]),
        "vocab_size": st.integers(1000, 200_000),
    }
)
GEMMA = {"model_type": "gemma3_text", "sliding_window": 512, "architectures": ["Gemma3ForCausalLM"]}
WINDOWS = st.sampled_from([{}, GEMMA])
REQUESTS = st.one_of(st.none(), st.integers(1, 40))
LENGTHS = st.sampled_from([1024, 4096, 32_768, 65_536])
DEVICES = st.sampled_from(["cpu:2GB", "cpu:24GB", "RBLN-CA25", "RBLN-CA25x4", "RBLN-CR13x2"])


def with_budget(source: ModelSource, npu: str, num_bytes: int, **values: Any) -> Plan:
    budget = MemoryBudget(amount=num_bytes, text=str(num_bytes))
    return make_plan(source, PlanSettings(**values), parse_target(npu), budget)


@settings(deadline=None, max_examples=150)
@given(layers=LAYERS, windows=WINDOWS, batch_size=REQUESTS, length=LENGTHS, npu=DEVICES)
def test_the_smallest_budget_works_and_one_byte_less_does_not(
    layers: dict[str, Any], windows: dict[str, Any], batch_size: int | None, length: int, npu: str
) -> None:
    source = make_source(**layers, **windows)
    asked = {"batch_size": batch_size, "max_seq_len": length}
    smallest = plan_source(source, npu, **asked).budgets.smallest_bytes
    assume(smallest <= parse_target(npu).device.available_bytes)
    at_smallest = with_budget(source, npu, smallest, **asked)
    assert at_smallest.fits
    assert at_smallest.budgets.smallest_bytes == smallest
    below = with_budget(source, npu, smallest - 1, **asked)
    assert not below.fits
    assert below.budgets.smallest_bytes == smallest
    assert below.waterfall.unused_bytes < 0
    assert any(str(smallest) in line for line in below.advice)


@settings(deadline=None, max_examples=150)
@given(
    layers=LAYERS,
    windows=WINDOWS,
    batch_size=REQUESTS,
    length=LENGTHS,
    npu=DEVICES,
    percent=st.integers(5, 100),
)
def test_the_next_step_works_and_one_byte_less_gives_what_there_was(
    layers: dict[str, Any],
    windows: dict[str, Any],
    batch_size: int | None,
    length: int,
    npu: str,
    percent: int,
) -> None:
    source = make_source(**layers, **windows)
    asked = {"batch_size": batch_size, "max_seq_len": length}
    found = plan_source(source, npu, f"{percent}%", **asked)
    step = found.next_step
    assume(found.fits and step is not None and step.is_available)
    assert step is not None
    assert step.budget_bytes > found.budget_bytes
    more = with_budget(source, npu, step.budget_bytes, **asked)
    less = with_budget(source, npu, step.budget_bytes - 1, **asked)
    assert less.num_blocks == found.num_blocks
    assert more.num_blocks is not None
    assert more.num_blocks >= step.num_blocks
    assert more.capacity is not None
    assert more.capacity.num_full_sequences >= step.num_requests


@settings(deadline=None, max_examples=60)
@given(layers=LAYERS, windows=WINDOWS, batch_size=REQUESTS, length=LENGTHS, npu=DEVICES)
def test_more_budget_never_gives_less(
    layers: dict[str, Any], windows: dict[str, Any], batch_size: int | None, length: int, npu: str
) -> None:
    source = make_source(**layers, **windows)
    counts = [
        plan_source(source, npu, f"{percent}%", batch_size=batch_size, max_seq_len=length)
        for percent in (10, 30, 55, 80, 100)
    ]
    blocks = [found.num_blocks or 0 for found in counts]
    assert blocks == sorted(blocks)
    largest = counts[-1].num_blocks
    assert {found.largest_num_blocks for found in counts} == {largest}


def test_a_bare_1_is_one_byte_and_the_answer_says_what_was_meant() -> None:
    found = plan_source(make_source(), "RBLN-CA25", "1", batch_size=1)
    assert not found.fits
    assert "write 1.0 or 100% for the whole device: a bare 1 is 1 byte" in found.advice


# A count that was asked for.


def test_a_count_is_checked_on_its_own_whatever_the_largest_is() -> None:
    source = make_source()
    found = plan_source(source, "cpu:2GB", "60%", batch_size=8, max_seq_len=8192, num_blocks=70)
    assert found.num_blocks == 70
    assert found.limited_by == "given"
    assert found.needed_bytes <= found.budget_bytes
    small = with_budget(
        source, "cpu:2GB", found.needed_bytes - 1, batch_size=8, max_seq_len=8192, num_blocks=70
    )
    assert not small.fits
    assert small.needed_bytes == small.budgets.smallest_bytes == found.needed_bytes


def test_a_count_below_the_fewest_is_refused_with_the_fewest() -> None:
    with pytest.raises(BelowMinimum, match="num_blocks=64 is below 65") as caught:
        plan_source(make_source(), "cpu:8GB", batch_size=8, max_seq_len=8192, num_blocks=64)
    assert caught.value.num_min_blocks == 65


def test_a_count_above_the_full_batch_is_planned_and_said_to_be_too_many() -> None:
    found = plan_source(make_source(), "cpu:8GB", batch_size=1, max_seq_len=1024, num_blocks=20)
    assert found.num_blocks == 20
    assert found.capacity is not None
    assert found.capacity.num_full_sequences == 1
    assert "20 blocks are more than the 8" in found.notes[-1]


def test_a_count_without_a_batch_size_is_for_as_many_requests_as_it_holds() -> None:
    found = plan_source(make_source(), "cpu:8GB", max_seq_len=1024, num_blocks=35)
    assert found.batch_size == 4
    assert found.capacity is not None
    assert found.capacity.num_full_sequences == 4


def test_a_count_that_does_not_fit_the_device_names_the_most_it_holds() -> None:
    found = plan_source(make_source(), "cpu:2GB", batch_size=64, max_seq_len=8192, num_blocks=4000)
    assert not found.fits
    largest = found.largest_num_blocks
    assert largest is not None
    assert f"lower num_blocks to {largest}, the most that fit" in found.advice
    again = plan_source(
        make_source(), "cpu:2GB", batch_size=64, max_seq_len=8192, num_blocks=largest
    )
    assert again.fits


def test_a_count_that_does_not_fit_the_budget_names_the_most_that_does() -> None:
    asked: dict[str, Any] = {"npu": "RBLN-CR13", "batch_size": 32, "memory_budget": "80%"}
    found = plan(config("Qwen3-8B"), num_blocks=100, kvcache_block_size=8192, **asked)
    assert not found.fits
    (line,) = (line for line in found.advice if line.startswith("lower num_blocks"))
    count = int(line.split()[3].rstrip(","))
    assert plan(config("Qwen3-8B"), num_blocks=count, kvcache_block_size=8192, **asked).fits
    more = plan(config("Qwen3-8B"), num_blocks=count + 1, kvcache_block_size=8192, **asked)
    assert not more.fits


# What does not fit.


def test_where_not_even_the_weights_fit_the_answer_says_so_and_what_would_help() -> None:
    found = plan(config("Llama-3.1-70B"), npu="RBLN-CA25x4", max_seq_len=8192)
    assert not found.fits
    assert found.num_blocks is None
    assert found.capacity is None
    assert found.explanation.startswith("does not fit: what is not KV cache takes 33.36 GiB")
    assert found.budgets.is_empty
    assert found.waterfall.unused_bytes < 0
    assert ". No budget works: " in found.explanation
    assert "compile for 16 devices: npu RBLN-CA25x16" in found.advice
    assert plan(config("Llama-3.1-70B"), npu="RBLN-CA25x16", max_seq_len=8192).fits


def follow(line: str, source: ModelSource, npu: str, budget: str, asked: dict[str, Any]) -> Plan:
    """Return the plan for what a line of advice says to change."""
    changed = dict(asked)
    for part in line.split(", and "):
        words = part.split()
        if part.startswith("raise memory_budget to"):
            budget = words[3]
        elif part.startswith("write "):
            budget = words[1].rstrip(":")
        elif part.startswith(("lower batch_size", "lower max_seq_len", "lower num_blocks")):
            changed[words[1]] = int(words[3].rstrip(","))
        elif part.startswith("choose dtype"):
            changed["dtype"] = "bfloat16"
        elif part.startswith("choose weight_dtype"):
            changed["weight_dtype"] = "int8"
        elif " npu " in part:
            npu = words[-1]
        else:
            pytest.fail(f"advice that this test does not know: {line}")
    return plan_source(source, npu, budget, **changed)


@settings(deadline=None, max_examples=200)
@given(
    layers=LAYERS,
    changes=st.sampled_from([{}, GEMMA, {"dtype": "float32"}]),
    batch_size=REQUESTS,
    length=st.sampled_from([1, 2, 64, 4096, 32_768]),
    npu=st.sampled_from(["cpu:1GB", "cpu:2GB", "RBLN-CA25", "RBLN-CR13"]),
    budget=st.sampled_from(["2%", "10%", "50%", "200MB", "600MB", "100%"]),
    num_blocks=st.sampled_from([None, None, 3000, 40_000]),
)
def test_every_piece_of_advice_works_when_it_is_followed(
    layers: dict[str, Any],
    changes: dict[str, Any],
    batch_size: int | None,
    length: int,
    npu: str,
    budget: str,
    num_blocks: int | None,
) -> None:
    source = make_source(**{**layers, **changes, "hidden_size": 2048, "vocab_size": 128_000})
    asked = {"batch_size": batch_size, "max_seq_len": length, "num_blocks": num_blocks}
    try:
        found = plan_source(source, npu, budget, **asked)
    except (BelowMinimum, InvalidOption):
        assume(False)
    assert not (found.fits and found.advice)
    for line in found.advice:
        assert follow(line, source, npu, budget, asked).fits, line


def test_a_cpu_that_is_too_small_is_answered_with_one_that_is_not() -> None:
    source = make_source(num_hidden_layers=32, hidden_size=4096, vocab_size=100_000)
    found = plan_source(source, "cpu:2GB", "90%", batch_size=1)
    line = next(line for line in found.advice if line.startswith("take a machine"))
    assert plan_source(source, line.split()[-1], "90%", batch_size=1).fits


def test_a_budget_above_the_device_is_an_error_that_names_both() -> None:
    with pytest.raises(BudgetAboveDevice, match=r"20.00 GiB .* 15.72 GiB"):
        plan_source(make_source(), "RBLN-CA25", "20GB")


# Layers, types and devices.


def test_a_hybrid_has_two_numbers_a_part_per_token_and_a_part_per_request() -> None:
    found = plan(config("gemma-3-27b-it"), npu="RBLN-CR13x2", batch_size=1, max_seq_len=131_072)
    model = found.model
    assert model.full_bytes_per_token == 10 * 16 * 256 * 2
    assert model.fixed_bytes_per_request == 52 * 1024 * 16 * 256 * 2
    held = model.full_bytes_per_token * 131_072 + model.fixed_bytes_per_request
    assert held / GIB == 10.40625


def test_a_window_as_long_as_the_requests_is_no_window() -> None:
    source = make_source(**GEMMA, num_hidden_layers=6)
    short = plan_source(source, "cpu:8GB", batch_size=2, max_seq_len=512)
    assert short.model.fixed_bytes_per_request == 0
    assert short.model.full_bytes_per_token == short.model.bytes_per_token


def test_more_devices_than_heads_hold_a_head_each_and_never_none() -> None:
    source = make_source(num_key_value_heads=2)
    one, four, eight = (
        plan_source(source, npu, batch_size=2, max_seq_len=8192)
        for npu in ("RBLN-CA25", "RBLN-CA25x4", "RBLN-CA25x8")
    )
    assert four.waterfall.bytes_per_block == eight.waterfall.bytes_per_block
    assert four.waterfall.bytes_per_block * 2 == one.waterfall.bytes_per_block


def test_a_latent_is_whole_on_every_chiplet() -> None:
    found = plan(config("DeepSeek-V2-Lite"), npu="RBLN-CR13", batch_size=1, max_seq_len=8192)
    per_chiplet = {use.bytes_per_block for use in found.chiplets}
    assert per_chiplet == {27 * 576 * 2 * 8192}


def test_heads_of_an_odd_width_are_padded_on_rbln_devices_only() -> None:
    source = make_source(head_dim=96)
    rbln = plan_source(source, "RBLN-CA25", batch_size=2, max_seq_len=8192)
    cpu = plan_source(source, "cpu:8GB", batch_size=2, max_seq_len=8192)
    assert rbln.waterfall.bytes_per_block == 4 * 2 * 4 * 128 * 2 * rbln.kvcache_block_size
    assert cpu.waterfall.bytes_per_block == 4 * 2 * 4 * 96 * 2 * cpu.kvcache_block_size


def test_an_fp8_cache_holds_twice_the_tokens_of_a_bf16_one() -> None:
    source = make_source()
    asked = {"batch_size": 64, "max_seq_len": 8192}
    bf16 = plan_source(source, "RBLN-CA25", **asked)
    fp8 = plan_source(source, "RBLN-CA25", kv_dtype="fp8", **asked)
    assert fp8.model.bytes_per_token * 2 == bf16.model.bytes_per_token
    assert fp8.model.kv_dtype == "float8_e4m3fn"
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    stored = WeightBytes(num_bytes=10**8, num_elements=None, source="headers")
    asked_by_checkpoint = plan_source(make_source(stored, **scheme), "RBLN-CA25", **asked)
    assert asked_by_checkpoint.model.kv_dtype == "float8_e4m3fn"


def test_the_cpu_has_one_type_for_all_and_says_which_it_takes() -> None:
    found = plan_source(make_source(dtype="float16"), "cpu:8GB", batch_size=1)
    assert (found.weights_dtype, found.model.kv_dtype) == ("float32", "float32")
    assert any("float16; for the cpu it is compiled in float32" in note for note in found.notes)
    with pytest.raises(InvalidOption, match="kv_dtype='float8_e4m3fn' is not compiled"):
        plan_source(make_source(), "cpu:8GB", kv_dtype="fp8")
    with pytest.raises(InvalidOption, match="keys and values are of the type of the programs"):
        plan_source(make_source(), "cpu:8GB", kv_dtype="float32")


def test_a_quantized_model_of_no_named_type_has_a_cache_of_bfloat16() -> None:
    model = plan(config("gpt-oss-120b"), npu="RBLN-CR13", max_seq_len=4096, weight_bytes=GIB).model
    assert model.kv_dtype == "bfloat16"
    assert (model.bytes_per_token, model.full_bytes_per_token) == (73_728, 36_864)


def test_layers_that_read_the_cache_of_different_others_are_one_group() -> None:
    groups = plan(config("gemma-3n-E4B-it"), npu="RBLN-CR13", max_seq_len=2048).model.layers
    assert [group.num_layers for group in groups if group.kind == "shared"] == [15]


def test_a_model_without_blocks_has_requests_but_no_tokens_in_blocks() -> None:
    found = plan(config("mamba-130m-hf"), npu="RBLN-CA25", batch_size=4, max_seq_len=2048)
    assert found.capacity is not None
    assert (found.capacity.num_tokens, found.capacity.num_full_sequences) == (0, 4)
    assert found.limited_by == "fixed"
    assert "no count to choose" in found.explanation


def test_a_thousand_devices_are_planned_as_one_and_all_are_shown() -> None:
    found = plan(config("DeepSeek-V3.1"), npu="RBLN-CR13x1024", batch_size=8, max_seq_len=16_384)
    assert len(found.chiplets) == 4096
    assert {use.node for use in found.chiplets} == set(range(1024))


# Weights.


def weight_term(found: Plan) -> Any:
    return next(term for term in found.waterfall.terms if term.name == "Weight")


def test_stored_weights_are_taken_as_they_are_where_no_type_is_asked_for() -> None:
    stored = WeightBytes(num_bytes=123_456_789, num_elements=None, source="index")
    found = plan_source(make_source(stored), "RBLN-CA25", batch_size=1)
    assert weight_term(found).num_bytes == 123_456_789
    assert "index of its safetensors" in weight_term(found).source
    # How a compiler of RBLN devices lays them out is not known.
    assert weight_term(found).basis == "estimate"
    assert weight_term(found).error_bytes is None


def test_pickled_weights_are_an_estimate() -> None:
    stored = WeightBytes(num_bytes=123_456_789, num_elements=None, source="bin")
    assert weight_term(plan_source(make_source(stored), "RBLN-CA25")).basis == "estimate"


def test_a_type_that_is_asked_for_counts_parameters() -> None:
    stored = WeightBytes(num_bytes=123_456_789, num_elements=None, source="index")
    source = make_source(stored)
    found = plan_source(source, "RBLN-CA25", batch_size=1, dtype="float32")
    assert source.spec.num_parameters is not None
    assert weight_term(found).num_bytes == 4 * source.spec.num_parameters


def test_tied_embeddings_count_once() -> None:
    tied, untied = (make_source(tie_word_embeddings=tied) for tied in (True, False))
    difference = [
        weight_term(plan_source(source, "cpu:8GB", batch_size=1)).num_bytes
        for source in (untied, tied)
    ]
    assert difference[0] - difference[1] == 32_000 * 512 * 2


def test_quantized_weights_without_files_are_counted_in_full_and_it_is_said() -> None:
    source = make_source(quantization_config={"quant_method": "gptq", "bits": 4})
    found = plan_source(source, "RBLN-CA25", batch_size=1)
    assert weight_term(found).basis == "estimate"
    assert weight_term(found).error_bytes is None
    assert any("how large that makes them is not known" in note for note in found.notes)
    stored = WeightBytes(num_bytes=50_000_000, num_elements=None, source="headers")
    quantized = make_source(stored, quantization_config={"quant_method": "gptq", "bits": 4})
    assert weight_term(plan_source(quantized, "RBLN-CA25", batch_size=1)).num_bytes == 50_000_000


def test_weights_that_nobody_knows_are_an_error_and_can_be_given() -> None:
    source = make_source(model_type="unheard_of")
    assert source.spec.num_parameters is None
    with pytest.raises(UnsupportedModel, match="give weight_bytes, or name a directory"):
        plan_source(source, "RBLN-CA25", batch_size=1)
    found = plan_source(source, "RBLN-CA25", batch_size=1, weight_bytes=3 * GIB)
    assert weight_term(found).num_bytes == 3 * GIB
    assert weight_term(found).basis == "given"


def test_a_context_that_nobody_knows_is_asked_for() -> None:
    source = make_source(max_position_embeddings=(), model_type="unheard_of")
    with pytest.raises(InvalidOption, match="give max_seq_len"):
        plan_source(source, "RBLN-CA25", weight_bytes=GIB)


def test_files_that_hold_no_weights_at_all_are_not_believed() -> None:
    empty = WeightBytes(num_bytes=0, num_elements=0, source="headers")
    known = make_source()
    found = plan_source(make_source(empty), "RBLN-CA25", batch_size=1)
    assert known.spec.num_parameters is not None
    assert weight_term(found).num_bytes == 2 * known.spec.num_parameters


def test_files_that_hold_another_amount_than_the_architecture_are_counted_and_it_is_said() -> None:
    stored = WeightBytes(num_bytes=10**9, num_elements=None, source="index")
    found = plan_source(make_source(stored), "RBLN-CA25", batch_size=1)
    assert weight_term(found).num_bytes == 10**9
    assert any("The files hold 953.67 MiB of weights" in note for note in found.notes)


def test_a_plan_stops_at_a_number_of_requests_and_says_so() -> None:
    found = plan_source(make_source(), "cpu:99999999TB", max_seq_len=1024)
    assert found.batch_size == 2**20
    assert "no further than 1,048,576 requests" in found.explanation
    assert found.next_step is None


@pytest.mark.parametrize(
    "values",
    [
        {"num_blocks": "many"},
        {"weight_bytes": "1GB"},
        {"weight_bytes": 1.5},
        {"weight_bytes": True},
        {"weight_bytes": 10**5000},
        {"dtype": []},
        {"npu": 5},
        {"batch_size": 10**5000},
        {"memory_budget": 10**5000},
        {"memory_budget": -(10**5000)},
        {"name": None},
        {"name": ""},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_of_the_wrong_kind_are_usage_errors(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan(**{"name": config("Qwen3-8B"), "npu": "RBLN-CR13", **values})


# Artifacts.


def test_an_artifact_of_the_torch_backend_says_what_was_measured(tmp_path: Path) -> None:
    directory = str(make_artifact(tmp_path / "artifact", num_blocks=16))
    found = plan(directory, npu="cpu:1GB")
    assert found.kind == "artifact"
    assert {term.name: term.basis for term in found.waterfall.terms}["Weight"] == "exact"
    assert found.num_blocks == found.bounds.full == 32
    assert found.commands[0].line == f"reblock set {directory} 32"


def test_what_compiling_has_settled_cannot_be_changed_in_a_plan(tmp_path: Path) -> None:
    directory = str(make_artifact(tmp_path / "artifact"))
    with pytest.raises(UsageError, match="settled batch_size, dtype"):
        plan(directory, batch_size=4, dtype="float32")
    with pytest.raises(InvalidOption, match="is compiled for cpu, and its programs do not run"):
        plan(directory, npu="RBLN-CA25")
    with pytest.raises(InvalidOption, match="compiled for 1 device"):
        plan(directory, npu="RBLN-CA25x2")


def test_an_artifact_with_windows_has_a_part_for_every_request(tmp_path: Path) -> None:
    directory = str(make_artifact(tmp_path / "artifact", sliding_layers=(1,)))
    model = plan(directory, npu="cpu:1GB").model
    assert model.full_bytes_per_token == 2 * 8 * 128 * 4
    assert model.fixed_bytes_per_request == 2 * 8 * 128 * 4 * 512
    assert model.bytes_per_token == 2 * model.full_bytes_per_token


def test_a_module_of_what_is_no_artifact_is_refused() -> None:
    with pytest.raises(UsageError, match="so it has no modules"):
        plan(config("Qwen3-8B"), module="language_model")


# Command lines.


def test_the_command_for_the_cpu_is_one_that_compile_takes() -> None:
    found = plan_source(make_source(), "cpu:8GB", "80%", batch_size=4, max_seq_len=2048)
    (command,) = found.commands
    assert command.line == (
        "reblock compile tiny --batch-size 4 --max-seq-len 2048 --attn-impl flash_attn "
        "--kvcache-partition-len 128 --memory-budget 80%"
    )


def test_the_command_has_the_count_where_a_count_was_asked_for() -> None:
    found = plan_source(make_source(), "cpu:8GB", batch_size=4, max_seq_len=2048, num_blocks=40)
    assert found.commands[0].line.endswith("--kvcache-num-blocks 40")


def test_the_command_for_devices_is_that_of_optimum_rbln() -> None:
    found = plan_source(make_source(), "RBLN-CA25x4", "0.8", batch_size=4, max_seq_len=65_536)
    assert found.commands[0].line == (
        "optimum-rbln-cli --model-id tiny --batch-size 4 --max-seq-len 65536 "
        "--attn-impl flash_attn --kvcache-partition-len 16384 --memory-budget 0.8 "
        "--npu RBLN-CA25 --num-devices 4"
    )


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("--npu", "./--npu"),
        ("-x", "./-x"),
        ("a;rm b", "'a;rm b'"),
        ("a\x1b[2Jb", r"$'a\x1b[2Jb'"),
        ("a\nb", r"$'a\nb'"),
        ("it's\n", r"$'it\'s\n'"),
    ],
)
def test_a_name_in_a_command_is_only_ever_a_name(name: str, argument: str) -> None:
    source = replace(make_source(), name=name)
    found = plan_source(source, "cpu:8GB", batch_size=1, max_seq_len=2048)
    line = found.commands[0].line
    assert line.startswith(f"reblock compile {argument} --batch-size")
    script = line.replace("reblock compile", "printf '%s|'", 1)
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.split("|")[0].removeprefix("./") == name


def test_a_budget_in_bytes_is_written_as_optimum_rbln_reads_it() -> None:
    found = plan_source(make_source(), "RBLN-CA25", "6.5GB", batch_size=4, max_seq_len=2048)
    assert f"--memory-budget {13 * GIB // 2} " in found.commands[0].line


def test_what_optimum_rbln_has_no_option_for_is_said_and_no_command_is_given() -> None:
    found = plan_source(make_source(), "RBLN-CA25", kv_dtype="fp8", batch_size=4)
    assert found.commands == ()
    assert "no option for a cache of float8_e4m3fn alone" in found.notes[-1]
    gguf = replace(make_source(), kind="gguf")
    found = plan_source(gguf, "RBLN-CA25", batch_size=4)
    assert found.commands == ()
    assert "does not read GGUF files" in found.notes[-1]


def test_a_device_that_is_too_small_is_answered_with_a_larger_one() -> None:
    found = plan(config("Qwen3-32B"), npu="RBLN-CA25", batch_size=1, max_seq_len=8192)
    assert "take larger devices: npu RBLN-CR13" in found.advice
    assert plan(config("Qwen3-32B"), npu="RBLN-CR13", batch_size=1, max_seq_len=8192).fits


@pytest.mark.parametrize(("written", "meant"), [("80", "80%"), ("1", "1.0 or 100%")])
def test_a_bare_small_number_is_answered_with_what_was_meant(written: str, meant: str) -> None:
    found = plan_source(make_source(), "RBLN-CA25", written, batch_size=1)
    assert any(line.startswith(f"write {meant}") for line in found.advice)


def test_a_name_with_spaces_is_quoted_in_commands() -> None:
    source = replace(make_source(), name="my model")
    found = plan_source(source, "cpu:8GB", batch_size=1, max_seq_len=2048)
    assert found.commands[0].line.startswith("reblock compile 'my model' ")


def test_a_model_that_is_not_compiled_for_the_cpu_has_a_plan_but_no_command() -> None:
    found = plan(config("Qwen3-Next-80B-A3B-Instruct"), npu="cpu:512GB", max_seq_len=8192)
    assert found.fits
    assert found.commands == ()
    assert found.notes[0].startswith("reblock does not compile this model for the cpu: layers with")
