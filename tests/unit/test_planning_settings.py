"""What is left open of a planned compilation, and what becomes of it on each device."""

from __future__ import annotations

from typing import Any

import pytest

from reblock.errors import InvalidBlockCount, InvalidOption
from reblock.planning import PlanSettings, parse_target
from reblock.planning.settings import resolve_shapes

CONTEXT = 131_072


def resolve(npu: str, **settings: Any) -> tuple[str, int | None, int, int]:
    """Return attention, partition length, block size and chunk of programs for one request."""
    shapes = resolve_shapes(
        PlanSettings(**settings),
        parse_target(npu),
        batch_size=1,
        max_position_embeddings=CONTEXT,
    )
    return (
        shapes.attn_impl,
        shapes.kvcache_partition_len,
        shapes.kvcache_block_size,
        shapes.prefill_chunk_size,
    )


@pytest.mark.parametrize(
    ("npu", "settings", "expected"),
    [
        # optimum-rbln takes eager attention wherever the device can.
        ("RBLN-CA25", {"max_seq_len": 32_768}, ("eager", None, 32_768, 128)),
        ("RBLN-CA25", {"max_seq_len": 65_536}, ("flash_attn", 16_384, 16_384, 128)),
        ("RBLN-CR13", {"max_seq_len": 8_192}, ("eager", None, 8_192, 512)),
        ("RBLN-CR13", {"max_seq_len": 16_384}, ("eager", None, 16_384, 512)),
        ("RBLN-CR13", {"max_seq_len": 32_768}, ("flash_attn", 8_192, 8_192, 512)),
        ("RBLN-CR13", {"max_seq_len": 256}, ("eager", None, 256, 256)),
        # The default partition is halved until it divides.
        ("RBLN-CR13", {"max_seq_len": 20_480}, ("flash_attn", 4_096, 4_096, 512)),
        ("RBLN-CR13", {}, ("flash_attn", 8_192, 8_192, 512)),
        (
            "RBLN-CA25",
            {"max_seq_len": 40_960, "kvcache_partition_len": 8_192},
            ("flash_attn", 8_192, 8_192, 128),
        ),
        (
            "RBLN-CA25",
            {"max_seq_len": 40_960, "kvcache_block_size": 8_192},
            ("flash_attn", 8_192, 8_192, 128),
        ),
        (
            "RBLN-CA25",
            {"max_seq_len": 8_192, "kvcache_block_size": 8_192},
            ("eager", None, 8_192, 128),
        ),
        (
            "RBLN-CR13",
            {"max_seq_len": 16_384, "attn_impl": "flash_attn"},
            ("flash_attn", 8_192, 8_192, 512),
        ),
        # For the cpu, what `reblock compile` takes.
        ("cpu", {"max_seq_len": 8_192}, ("flash_attn", 128, 128, 128)),
        ("cpu", {"max_seq_len": 96}, ("flash_attn", 32, 32, 96)),
        ("cpu", {"max_seq_len": 8_192, "attn_impl": "eager"}, ("eager", None, 8_192, 128)),
    ],
)
def test_what_is_left_open_becomes_what_the_compiler_of_the_device_takes(
    npu: str, settings: dict[str, Any], expected: tuple[str, int | None, int, int]
) -> None:
    assert resolve(npu, **settings) == expected


@pytest.mark.parametrize(
    ("npu", "settings", "message"),
    [
        ("RBLN-CA25", {"max_seq_len": 65_536, "attn_impl": "eager"}, "32768 tokens of eager"),
        ("RBLN-CR13", {"max_seq_len": 32_768, "attn_impl": "eager"}, "16384 tokens of eager"),
        ("RBLN-CR13", {"max_seq_len": 20_000}, "does not divide into partitions of 1024"),
        ("RBLN-CR13", {"max_seq_len": 65_536, "kvcache_partition_len": 512}, "1024 to 16384"),
        ("RBLN-CR13", {"max_seq_len": 65_536, "kvcache_block_size": 32_768}, "1024 to 16384"),
        ("RBLN-CR13", {"max_seq_len": 32_768, "prefill_chunk_size": 100}, "multiple of 64"),
        ("RBLN-CA25", {"max_seq_len": 262_144}, "more than the 131072 positions"),
        (
            "RBLN-CA25",
            {"max_seq_len": 65_536, "kvcache_partition_len": 8_192, "kvcache_block_size": 4_096},
            "must equal",
        ),
        ("cpu", {"max_seq_len": 2_048, "kvcache_block_size": 8}, "below 16"),
        # Sizes that other engines list and that their kernels then refuse.
        ("cpu", {"max_seq_len": 2_048, "kvcache_block_size": 1}, "below 16"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    npu: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        resolve(npu, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"max_seq_len": -1}, "max_seq_len=-1"),
        ({"dtype": "float8"}, "dtype='float8' is not known; choose one of float32"),
        ({"kv_dtype": "q4"}, "kv_dtype='q4' is not known"),
        ({"weight_dtype": "int4"}, "'int4' is not known; choose one of float32, bfloat16, int8$"),
        ({"weight_dtype": ""}, "choose one of float32, bfloat16, int8$"),
        ({"weight_dtype": "fp16"}, "'fp16' is not known; choose one of float32, bfloat16, int8$"),
        ({"weight_bytes": 0}, "must be a whole number of bytes"),
    ],
)
def test_a_value_that_is_not_accepted_is_refused_at_once(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        PlanSettings(**settings)


def test_a_count_that_is_no_count_is_refused() -> None:
    with pytest.raises(InvalidBlockCount):
        PlanSettings(num_blocks=0)


@pytest.mark.parametrize(
    ("written", "name"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp8", "float8_e4m3fn"), ("int8", "int8")],
)
def test_the_short_names_of_types_are_read(written: str, name: str) -> None:
    assert PlanSettings(dtype=written, kv_dtype=written).kv_dtype == name


def test_given_names_what_was_given() -> None:
    assert PlanSettings(batch_size=4, kv_dtype="fp8").given == ("batch_size", "kv_dtype")
