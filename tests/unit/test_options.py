from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.errors import (
    BelowMinimum,
    InvalidBlockCount,
    InvalidBudget,
    InvalidOption,
    UsageError,
)
from reblock.options import CompileOptions, ResolvedOptions, resolve_weight_dtype
from reblock.sizing import BlockBounds


def resolve(max_position_embeddings: int | None = 2048, **options: Any) -> ResolvedOptions:
    return CompileOptions(**options).resolve(max_position_embeddings=max_position_embeddings)


def test_keys_are_read_with_dashes_and_with_underscores() -> None:
    options = CompileOptions.from_keys(
        {
            "batch-size": "8",
            "max_seq_len": "1024",
            "dtype": "bfloat16",
            "weight-dtype": "int8",
            "attn-impl": "flash_attn",
            "kvcache-partition-len": "64",
            "kvcache_block_size": "64",
            "prefill-chunk-size": "32",
            "decoder-batch-sizes": "8,4,1",
            "memory-budget": "80%",
            "npu": "cpu",
        }
    )
    assert options.memory_budget is not None
    assert options.memory_budget.amount == Fraction(4, 5)
    assert options == CompileOptions(
        batch_size=8,
        max_seq_len=1024,
        dtype="bfloat16",
        weight_dtype="int8",
        attn_impl="flash_attn",
        kvcache_partition_len=64,
        kvcache_block_size=64,
        prefill_chunk_size=32,
        decoder_batch_sizes=(8, 4, 1),
        memory_budget=options.memory_budget,
        npu="cpu",
    )


def test_no_keys_are_the_defaults() -> None:
    assert CompileOptions.from_keys({}) == CompileOptions()


def test_block_count_is_read() -> None:
    assert CompileOptions.from_keys({"kvcache-num-blocks": "40"}).kvcache_num_blocks == 40


@pytest.mark.parametrize("text", ["4,2,1", "[4,2,1]", "[4, 2, 1]", " 4 , 2 , 1 "])
def test_decoder_batch_sizes_are_read_as_people_write_lists(text: str) -> None:
    options = CompileOptions.from_keys({"batch_size": "4", "decoder_batch_sizes": text})
    assert options.decoder_batch_sizes == (4, 2, 1)


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("batch-sise", "batch_size"),
        ("max_len", "max_seq_len"),
        ("kvcache-blocks", "kvcache_num_blocks"),
        ("memory_buget", "memory_budget"),
    ],
)
def test_unknown_key_is_answered_with_the_nearest(written: str, nearest: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        CompileOptions.from_keys({written: "1"})
    assert caught.value.nearest == nearest
    assert f"option {written!r} is unknown; the nearest known one is {nearest!r}" in str(
        caught.value
    )
    assert "prefill_chunk_size" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("tensor-parallel-size", "the cpu is one device"),
        ("num_devices", "the cpu is one device"),
        ("lora_config", "merge the adapter into the model first"),
        ("quantization", "choose weight_dtype=int8"),
        ("use_inputs_embeds", "the programs take token ids"),
        ("use-attention-mask", "always compiled in one way"),
        ("create_runtimes", "belongs to RBLN devices"),
        ("sliding_window", "the model's own configuration"),
        ("cls_name", "the model's own configuration"),
        ("_compile_cfgs", "the compiler writes it"),
        ("optimum_rbln_version", "the compiler writes it"),
    ],
)
def test_key_that_means_nothing_on_the_cpu_is_refused_with_the_reason(
    key: str, reason: str
) -> None:
    with pytest.raises(InvalidOption, match=f"option {key!r} is not supported here") as caught:
        CompileOptions.from_keys({key: "1"})
    assert reason in str(caught.value)


def test_key_given_in_both_spellings_is_refused() -> None:
    with pytest.raises(InvalidOption, match="batch_size is given twice"):
        CompileOptions.from_keys({"batch-size": "1", "batch_size": "2"})


@pytest.mark.parametrize(
    ("key", "text", "fault"),
    [
        ("batch_size", "0", "batch_size=0 must be a whole number from 1"),
        ("batch_size", "-1", "batch_size='-1' must be a whole number"),
        ("batch_size", "", "batch_size='' must be a whole number"),
        ("batch_size", "1.5", "batch_size='1.5' must be a whole number"),
        ("batch_size", "\N{ARABIC-INDIC DIGIT THREE}", "must be a whole number"),
        ("batch_size", "9" * 5000, "must be a whole number"),
        ("max_seq_len", "2147483648", "max_seq_len=2147483648 must be a whole number"),
        ("dtype", "float8", "dtype='float8' is not supported; choose float32 or bfloat16"),
        ("attn_impl", "sdpa", "attn_impl='sdpa' is not supported; choose eager or flash_attn"),
        ("npu", "RBLN-CA25", "npu='RBLN-CA25' is not supported: programs are compiled for 'cpu'"),
        ("decoder_batch_sizes", "", "decoder_batch_sizes='' must be a whole number"),
        ("decoder_batch_sizes", "1,0", "decoder_batch_sizes=0 must be a whole number"),
        ("decoder_batch_sizes", "1,1", r"decoder_batch_sizes=\[1, 1\] has a size twice"),
        ("decoder_batch_sizes", "2,1", r"\[2, 1\] must have batch_size=1 as its largest"),
    ],
)
def test_value_that_is_not_accepted_is_refused_by_name(key: str, text: str, fault: str) -> None:
    with pytest.raises(InvalidOption, match=fault) as caught:
        CompileOptions.from_keys({key: text})
    assert caught.value.option == key
    assert caught.value.exit_code == 2


def test_budget_and_count_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InvalidBudget):
        CompileOptions.from_keys({"memory_budget": "10G"})
    with pytest.raises(InvalidBlockCount):
        CompileOptions.from_keys({"kvcache_num_blocks": "many"})


def test_values_from_python_are_checked_too() -> None:
    with pytest.raises(InvalidOption, match="batch_size=True"):
        CompileOptions(batch_size=True)
    with pytest.raises(InvalidOption, match="prefill_chunk_size=0"):
        CompileOptions(prefill_chunk_size=0)
    with pytest.raises(InvalidBlockCount):
        CompileOptions(kvcache_num_blocks=0)
    with pytest.raises(InvalidOption, match=r"decoder_batch_sizes=\[\] must have batch_size=1"):
        CompileOptions(decoder_batch_sizes=())


def test_keys_take_values_of_their_own_types_as_well_as_texts() -> None:
    options = CompileOptions.from_keys(
        {
            "batch_size": 8,
            "max-seq-len": "1024",
            "decoder_batch_sizes": [8, 4],
            "memory_budget": 0.5,
            "dtype": None,
        }
    )
    assert (options.batch_size, options.max_seq_len) == (8, 1024)
    assert options.decoder_batch_sizes == (8, 4)
    assert options.memory_budget is not None
    assert options.memory_budget.amount == Fraction(1, 2)
    assert options.dtype is None


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("batch_size", 1.5, "batch_size=1.5 must be a whole number"),
        ("batch_size", True, "batch_size=True must be a whole number"),
        ("decoder_batch_sizes", 8, "decoder_batch_sizes=8 must be a list of whole numbers"),
        ("decoder_batch_sizes", ["8"], "decoder_batch_sizes='8' must be a whole number"),
        ("npu", 3, "npu=3 is not supported"),
        ("dtype", 3, "dtype=3 is not supported"),
        ("weight_dtype", 8, "weight_dtype=8 is not supported; choose float32 or bfloat16 or int8"),
    ],
)
def test_value_of_another_type_is_refused_by_name(key: str, value: object, fault: str) -> None:
    with pytest.raises(InvalidOption, match=fault) as caught:
        CompileOptions.from_keys({key: value})
    assert caught.value.option == key


def test_budget_and_count_exclude_each_other() -> None:
    with pytest.raises(UsageError) as caught:
        CompileOptions.from_keys({"memory_budget": "80%", "kvcache_num_blocks": "40"})
    assert isinstance(caught.value, ValueError)
    assert "memory_budget='80%' and kvcache_num_blocks=40 exclude each other" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "kept_in"),
    [
        ("float32", None, "float32"),
        ("bfloat16", None, "bfloat16"),
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "int8", "int8"),
        ("bfloat16", "int8", "int8"),
    ],
)
def test_weights_are_kept_in_what_was_asked_for_else_as_the_programs_compute(
    dtype: Any, weight_dtype: Any, kept_in: str
) -> None:
    assert resolve_weight_dtype(weight_dtype, dtype) == kept_in


def test_weights_wider_than_what_the_programs_compute_in_are_refused() -> None:
    with pytest.raises(
        InvalidOption, match=r"wider than dtype='bfloat16'.*dtype=float32"
    ) as caught:
        CompileOptions.from_keys({"dtype": "bfloat16", "weight_dtype": "float32"})
    assert caught.value.option == "weight_dtype"
    # What the model is in is not known yet.
    assert CompileOptions(weight_dtype="float32").dtype is None


def test_everything_left_open_is_settled_from_the_model() -> None:
    assert resolve(2048) == ResolvedOptions(
        batch_size=1,
        max_seq_len=2048,
        attn_impl="flash_attn",
        kvcache_partition_len=128,
        kvcache_block_size=128,
        kvcache_num_blocks=None,
        prefill_chunk_size=128,
        decoder_batch_sizes=(1,),
    )


@pytest.mark.parametrize(
    ("max_seq_len", "attn_impl", "block_size"),
    [
        (4096, "flash_attn", 128),
        (256, "flash_attn", 128),
        (128, "flash_attn", 64),
        (192, "flash_attn", 64),
        (96, "flash_attn", 32),
        (48, "flash_attn", 16),
        (32, "flash_attn", 16),
        (16, "eager", 16),
        (1000, "eager", 1000),
        (1001, "eager", 1001),
        (1, "eager", 1),
    ],
)
def test_attention_is_flash_where_a_partition_divides_the_sequence(
    max_seq_len: int, attn_impl: str, block_size: int
) -> None:
    resolved = resolve(None, max_seq_len=max_seq_len)
    assert (resolved.attn_impl, resolved.kvcache_block_size) == (attn_impl, block_size)
    assert resolved.kvcache_partition_len == (block_size if attn_impl == "flash_attn" else None)


@pytest.mark.parametrize(
    ("options", "attn_impl", "block_size"),
    [
        ({"kvcache_partition_len": 512}, "flash_attn", 512),
        ({"kvcache_block_size": 512}, "flash_attn", 512),
        ({"kvcache_block_size": 16, "kvcache_partition_len": 16}, "flash_attn", 16),
        ({"kvcache_block_size": 2048}, "eager", 2048),
        ({"attn_impl": "eager"}, "eager", 2048),
        ({"attn_impl": "eager", "kvcache_block_size": 2048}, "eager", 2048),
        ({"attn_impl": "flash_attn"}, "flash_attn", 128),
        ({"attn_impl": "flash_attn", "kvcache_block_size": 1024}, "flash_attn", 1024),
    ],
)
def test_attention_follows_what_was_asked(
    options: dict[str, Any], attn_impl: str, block_size: int
) -> None:
    resolved = resolve(2048, **options)
    assert (resolved.attn_impl, resolved.kvcache_block_size) == (attn_impl, block_size)


@pytest.mark.parametrize(
    ("options", "option", "fault"),
    [
        ({"max_seq_len": 4096}, "max_seq_len", "more than the 2048 positions"),
        ({"prefill_chunk_size": 4096}, "prefill_chunk_size", "more than max_seq_len=2048"),
        ({"kvcache_partition_len": 8}, "kvcache_partition_len", "below 16, the least"),
        ({"kvcache_block_size": 8}, "kvcache_block_size", "below 16, the least"),
        ({"kvcache_partition_len": 2048}, "kvcache_partition_len", "twice it at least"),
        ({"kvcache_partition_len": 100}, "kvcache_partition_len", "must be a multiple of"),
        ({"kvcache_block_size": 4096}, "kvcache_block_size", "must be a multiple of"),
        (
            {"kvcache_partition_len": 64, "kvcache_block_size": 128},
            "kvcache_block_size",
            "kvcache_block_size=128 must equal kvcache_partition_len=64",
        ),
        (
            {"attn_impl": "flash_attn", "kvcache_block_size": 2048},
            "kvcache_block_size",
            "twice it at least",
        ),
        (
            {"attn_impl": "flash_attn", "max_seq_len": 1000},
            "max_seq_len",
            "choose a max_seq_len that is a multiple of 16",
        ),
        (
            {"attn_impl": "eager", "kvcache_partition_len": 64},
            "kvcache_partition_len",
            "eager attention has no partitions",
        ),
        (
            {"attn_impl": "eager", "kvcache_block_size": 64},
            "kvcache_block_size",
            "must be max_seq_len=2048 with attn_impl='eager'",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, Any], option: str, fault: str
) -> None:
    with pytest.raises(InvalidOption, match=fault) as caught:
        resolve(2048, **options)
    assert caught.value.option == option


def test_model_that_does_not_say_its_length_needs_one_given() -> None:
    with pytest.raises(InvalidOption, match="give max_seq_len"):
        resolve(None)
    assert resolve(None, max_seq_len=512).max_seq_len == 512


def test_chunk_is_never_longer_than_a_sequence() -> None:
    assert resolve(64).prefill_chunk_size == 64
    assert resolve(2048, prefill_chunk_size=2048).prefill_chunk_size == 2048


def test_decoders_are_sorted_from_the_largest() -> None:
    assert resolve(batch_size=8, decoder_batch_sizes=(1, 8, 4)).decoder_batch_sizes == (8, 4, 1)
    assert resolve(batch_size=8).decoder_batch_sizes == (8,)


def test_block_count_below_the_minimum_is_refused_before_anything_is_compiled() -> None:
    # 256 blocks of 16 tokens hold 4,096, which is far from one sequence of 131,072.
    with pytest.raises(BelowMinimum) as caught:
        resolve(131_072, kvcache_block_size=16, kvcache_num_blocks=256)
    assert (caught.value.num_blocks, caught.value.num_min_blocks) == (256, 8192)
    assert "kvcache_num_blocks=256 is below 8192" in str(caught.value)
    assert "raise it to 8192, or lower max_seq_len or batch_size" in str(caught.value)


def test_block_count_of_the_minimum_is_accepted() -> None:
    resolved = resolve(2048, batch_size=4, kvcache_num_blocks=17)
    assert resolved.kvcache_num_blocks == 17
    assert resolved.bounds == BlockBounds(minimum=17, full=64)


@given(max_seq_len=st.integers(1, 100_000), batch_size=st.integers(1, 64))
def test_whatever_the_length_the_settled_shapes_hold_together(
    max_seq_len: int, batch_size: int
) -> None:
    resolved = resolve(None, max_seq_len=max_seq_len, batch_size=batch_size)
    assert max_seq_len % resolved.kvcache_block_size == 0
    assert 1 <= resolved.prefill_chunk_size <= max_seq_len
    assert 1 <= resolved.bounds.minimum <= resolved.bounds.full
    if resolved.attn_impl == "flash_attn":
        assert 16 <= resolved.kvcache_block_size <= 128
        assert max_seq_len // resolved.kvcache_block_size >= 2
    else:
        assert max_seq_len < 32 or max_seq_len % 16
