"""What users of comparable systems reported of models, with the numbers of their reports.

Every test names the report that it is of; docs/field-reports.md lists them all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from reference_plans import QWEN3_CA25, load_plan, make_plan

from reblock.budget import parse_budget
from reblock.devices import read_cpu_device
from reblock.model_spec import parse_model_config
from reblock.options import ResolvedOptions
from reblock.planning import Plan, PlanSettings, open_subject, parse_target, plan
from reblock.planning.candidate import ModelSubject
from reblock.planning.sources import ModelSource
from reblock.sizing import BlockBounds, capacity, largest_fitting, smallest_budget
from reblock.units import GIB, MIB

if TYPE_CHECKING:
    from reblock.memory import MemoryPlan

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
BF16 = 2
_LOWER_LENGTH = re.compile(r"lower max_seq_len to (\d+)")


def config(name: str) -> str:
    return str(CONFIGS / name)


def term(found: Plan, name: str) -> int:
    return next(term.num_bytes for term in found.waterfall.terms if term.name == name)


def kv_bytes(found: Plan) -> int:
    return term(found, "fixed KV cache") + term(found, "KV cache blocks")


# What is said of the capacity


def test_a_capacity_is_that_of_the_count_there_is_now() -> None:
    # Report 24: from 333,325 blocks to 100, and the log still said 5,333,200 tokens.
    before, after = (
        capacity(count, block_size=16, max_seq_len=131_072, batch_size=64).num_tokens
        for count in (333_325, 100)
    )
    assert (before, after) == (5_333_200, 1_600)


def test_tokens_are_told_in_whole_blocks_after_rounding() -> None:
    # Report 28: "Using 10718 tokens", which 16 does not divide.
    per_token = 114_688
    memory = make_plan(static=[[GIB]], resizable=[[[28 * 2 * per_token * 16 // 56]]])
    budget = GIB + 10_718 * per_token
    count = largest_fitting(memory, BlockBounds(minimum=1, full=4096), budget)
    assert count == 669
    held = capacity(count, block_size=16, max_seq_len=4096, batch_size=16)
    assert held.num_tokens == 10_704
    assert smallest_budget(memory, count) <= budget < smallest_budget(memory, count + 1)


def test_the_cost_of_a_token_does_not_depend_on_lengths_or_the_batch() -> None:
    # Report 42: bytes a token, derived from the concurrency, ranged from 4.05 to 92.62 KiB.
    told = set()
    for max_seq_len in (2048, 32_768, 131_072):
        for batch_size in (1, 4):
            found = plan(
                config("gemma-3-27b-it"),
                npu="RBLN-CR13x4",
                max_seq_len=max_seq_len,
                batch_size=batch_size,
            )
            told.add((found.model.full_bytes_per_token, found.model.fixed_bytes_per_request))
    assert told == {(10 * 16 * 256 * BF16, 52 * 1024 * 16 * 256 * BF16)}


def test_a_capacity_stands_beside_the_type_the_budget_and_the_length_it_is_for() -> None:
    # Report 46: two tools disagreed on Gemma 4, as each had a definition, a type and a share of
    # its own.
    asked: dict[str, Any] = {
        "npu": "RBLN-CR13",
        "memory_budget": 0.9,
        "batch_size": 8,
        "max_seq_len": 65_536,
        "weight_bytes": 62 * 10**9,
    }
    wide = plan(config("gemma-4-31B-it"), **asked)
    narrow = plan(config("gemma-4-31B-it"), kv_dtype="fp8", **asked)
    assert (wide.model.kv_dtype, narrow.model.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert wide.model.bytes_per_token == 2 * narrow.model.bytes_per_token
    assert (wide.budget.text, wide.budget_bytes) == ("0.9", 140 * GIB * 9 // 10)
    assert (wide.batch_size, wide.max_seq_len) == (8, 65_536)
    assert wide.capacity is not None
    assert wide.capacity.num_tokens == (wide.num_blocks or 0) * wide.kvcache_block_size


# What layers keep


@pytest.mark.parametrize(
    ("name", "kv_dtype", "num_bytes", "num_bytes_for_ever"),
    [
        ("Llama-2-7b-hf", None, 524_288, 524_288),
        ("Llama-3.1-8B", None, 131_072, 131_072),
        ("Qwen3-0.6B", None, 114_688, 114_688),
        ("Qwen3-1.7B", None, 114_688, 114_688),
        ("Qwen3-4B", None, 147_456, 147_456),
        ("gpt-oss-120b", "bf16", 73_728, 36_864),
        ("DeepSeek-V3.1", None, 70_272, 70_272),
    ],
)
def test_a_plan_has_the_published_bytes_of_a_token(
    name: str, kv_dtype: str | None, num_bytes: int, num_bytes_for_ever: int
) -> None:
    asked: dict[str, Any] = {"max_seq_len": 4096, "kv_dtype": kv_dtype, "weight_bytes": GIB}
    model = plan(config(name), npu="RBLN-CR13", **asked).model
    assert (model.bytes_per_token, model.full_bytes_per_token) == (num_bytes, num_bytes_for_ever)


@pytest.mark.parametrize(
    ("name", "num_tokens", "gib", "one_formula_gib"),
    [
        # Keys and values of hidden_size / num_attention_heads elements, in every layer.
        ("gemma-3-27b-it", 131_072, 10.40625, 62 * 2 * 16 * (5376 // 32) * 2 * 131_072 / GIB),
        ("Qwen3-0.6B", 40_960, 4.375, 28 * 2 * 8 * (1024 // 16) * 2 * 40_960 / GIB),
        ("DeepSeek-V3.1", 163_840, 10.7227, 2.08),
    ],
)
def test_one_formula_for_all_models_is_not_what_is_told(
    name: str, num_tokens: int, gib: float, one_formula_gib: float
) -> None:
    # Report 31: 81.38 instead of 10.41, 2.19 instead of 4.38, and 2.08 instead of 10.72.
    found = plan(
        config(name), npu="RBLN-CR13x4", batch_size=1, max_seq_len=num_tokens, weight_bytes=GIB
    )
    model = found.model
    held = model.full_bytes_per_token * num_tokens + model.fixed_bytes_per_request
    assert held / GIB == pytest.approx(gib, abs=5e-5)
    assert abs(held / GIB - one_formula_gib) > 2


def test_layers_of_their_own_widths_fit_where_one_formula_asked_for_58_gb() -> None:
    # Report 37: Gemma 4 12B ran in 24 GB; 40 of its 48 layers keep a window of 1,024 tokens.
    found = plan(
        config("gemma-4-12B-it"),
        npu="cpu:24GB",
        batch_size=1,
        max_seq_len=131_072,
        weight_bytes=8 * GIB,
    )
    assert found.fits
    assert kv_bytes(found) == 8 * 1024 * BF16 * 131_072 + 40 * 8 * 512 * BF16 * 1024


def test_windows_cost_the_same_at_64_thousand_tokens_and_at_93_thousand() -> None:
    # Report 43: layers with a window were charged the whole length.
    def at(max_seq_len: int) -> Plan:
        return plan(
            config("gemma-4-31B-it"),
            npu="RBLN-CR13x2",
            batch_size=1,
            max_seq_len=max_seq_len,
            weight_bytes=62 * 10**9,
        )

    short, long = at(65_536), at(93 * 1024)
    assert term(short, "fixed KV cache") == term(long, "fixed KV cache")
    per_token = 10 * 4 * 1024 * BF16
    assert short.model.full_bytes_per_token == per_token
    assert long.waterfall.bytes_per_block // long.kvcache_block_size == (
        short.waterfall.bytes_per_block // short.kvcache_block_size
    )


# Several devices


def test_heads_are_shared_out_over_the_devices_that_hold_them() -> None:
    # Report 48: Qwen3-32B on 4 devices had 814 blocks of 256 tokens; of heads shared out, 3,258.
    def per_block(npu: str) -> MemoryPlan:
        source = open_subject(config("Qwen3-32B"))
        assert isinstance(source, ModelSource)
        subject = ModelSubject.make(source, PlanSettings(), parse_target(npu))
        shapes = ResolvedOptions(
            batch_size=256,
            max_seq_len=40_960,
            attn_impl="flash_attn",
            kvcache_partition_len=256,
            kvcache_block_size=256,
            kvcache_num_blocks=None,
            prefill_chunk_size=128,
            decoder_batch_sizes=(256,),
        )
        return subject.model.memory(shapes).plan

    one, four = per_block("RBLN-CA25"), per_block("RBLN-CA25x4")
    assert one.bytes_per_block == ((64 * MIB,),)
    assert four.bytes_per_block == ((16 * MIB,),) * 4
    pool = 3_258 * four.bytes_per_block[0][0]
    assert pool // one.bytes_per_block[0][0] == 814
    assert (256 * 814, 256 * 3_258) == (208_384, 834_048)
    # What is rounded up to 2 MiB costs fewer than 16 of these blocks.
    bounds, budget = BlockBounds(minimum=161, full=40_960), four.static_bytes[0][0] + pool
    assert 3_258 - 16 < (largest_fitting(four, bounds, budget) or 0) <= 3_258


def test_weights_that_prefill_and_decoders_share_are_counted_once() -> None:
    # Report 54: Qwen3-1.7B; adding up what every program reports charged its weights twice.
    found = plan(config("Qwen3-1.7B"), npu="RBLN-CA25", batch_size=8, max_seq_len=4096)
    assert term(found, "Weight") == 1_720_574_976 * BF16
    memory = load_plan(QWEN3_CA25)
    assert memory.static["Weight"] == ((4_399_824_896,),) * 4


# The machine


@pytest.mark.parametrize("version", [1, 2])
def test_a_fraction_in_a_container_is_of_the_container(tmp_path: Path, version: int) -> None:
    # Report 58: a share of the host's 692 GiB, in a pod of 150 GiB, was killed.
    pod = "kubepods/burstable/pod1/container1"
    group, files = {
        1: (
            f"5:memory:/{pod}\n",
            {
                f"memory/{pod}/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/kubepods/burstable/pod1/memory.limit_in_bytes": f"{150 * GIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
        ),
        2: (
            f"0::/{pod}\n",
            {
                f"{pod}/memory.max": "max\n",
                "kubepods/burstable/pod1/memory.max": f"{150 * GIB}\n",
                "kubepods/memory.max": f"{680 * GIB}\n",
            },
        ),
    }[version]
    content = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    content["proc/meminfo"] = f"MemTotal: {692 * MIB} kB\n"
    content["proc/self/cgroup"] = group
    for name, text in content.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    device = read_cpu_device(str(tmp_path))
    assert device.dram_bytes == 150 * GIB
    assert parse_budget("30%").resolve(device.available_bytes) < 45 * GIB


# Before anything is compiled


def test_a_long_context_that_nobody_asked_for_is_refused_with_a_length_that_fits() -> None:
    # Report 63: without a length, Phi-3 with 131,072 tokens was laid out in full, and died.
    name = config("Phi-3-mini-128k-instruct")
    found = plan(name, npu="cpu:24GB")
    assert found.max_seq_len == 131_072
    assert not found.fits
    (length,) = [int(match[1]) for line in found.advice if (match := _LOWER_LENGTH.match(line))]
    assert plan(name, npu="cpu:24GB", max_seq_len=length).fits
    assert plan(name, npu="cpu:24GB", max_seq_len=4096).fits


def test_what_does_not_fit_is_said_before_it_is_compiled() -> None:
    # Report 65: an hour of compiling, and then "19.0 exceeds 16GB"; Llama-2-7B, 16 KiB a token
    # in a layer.
    found = plan(config("Llama-2-7b-hf"), npu="RBLN-CA25", batch_size=4)
    (layers,) = found.model.layers
    assert (layers.num_layers, layers.bytes_per_token) == (32, 16 * 1024)
    assert not found.fits
    needed = 6_738_415_616 * 2 + 2 * 256 * MIB + 4 * 4096 * 524_288
    assert found.needed_bytes == needed > found.waterfall.available_bytes
    assert "lower batch_size to 1" in found.advice
    assert plan(config("Llama-2-7b-hf"), npu="RBLN-CA25", batch_size=1).fits


def test_layers_that_only_draft_are_not_counted_into_the_cache() -> None:
    # Report 56: room was kept for a draft context as long as the one the model was trained on.
    text = (CONFIGS / "DeepSeek-V3.1" / "config.json").read_text()
    key = '"num_nextn_predict_layers": '
    without = text.replace(f"{key}1", f"{key}0")
    assert without != text
    specs = [parse_model_config(each, path="config.json") for each in (text, without)]
    assert {spec.bytes_per_token(BF16) for spec in specs} == {61 * 576 * BF16}
    said = [any("only draft tokens" in note for note in spec.notes) for spec in specs]
    assert said == [True, False]
