from __future__ import annotations

import json
from typing import Any

import pytest
from reference_plans import (
    ALL,
    LLAMA2_EAGER,
    LLAMA2_FLASH,
    QWEN3_CR13,
    load_config,
    read_config_bytes,
)

from reblock.config import CacheMeta, RBLNConfig, parse_config
from reblock.errors import ArtifactMismatch, CorruptArtifact, InvalidBlockCount, UnknownFormat
from reblock.info import ReblockInfo, WeightsFile
from reblock.sizing import BlockBounds

DIGEST = "0123456789abcdef" * 4


def make_raw(**changes: object) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "cls_name": "RBLNLlamaForCausalLMConfig",
        "dtype": "float32",
        "_compile_cfgs": [
            {"compiled_model_name": "prefill", "npu": "cpu", "num_devices": None},
            {"compiled_model_name": "decoder_batch_4", "npu": "cpu", "num_devices": None},
        ],
        "batch_size": 4,
        "max_seq_len": 512,
        "attn_impl": "flash_attn",
        "kvcache_partition_len": 64,
        "kvcache_block_size": 64,
        "prefill_chunk_size": 128,
        "kvcache_num_blocks": 16,
        "sliding_window": None,
        "sliding_window_layers": [],
        "phases": ["prefill", "decode"],
        "decoder_batch_sizes": [4],
        "cache_metas": [make_cache("past_key_values_0"), make_cache("past_key_values_1")],
        "reblock": make_info(),
    }
    return {**raw, **changes}


def make_cache(name: str, **changes: object) -> dict[str, object]:
    cache: dict[str, object] = {
        "name": name,
        "layer_index": 0,
        "shape": [32, 2, 64, 16],
        "layer_type": "full_attention",
        "is_auto": True,
        "dtype": "float32",
    }
    return {**cache, **changes}


def make_info(**changes: object) -> dict[str, object]:
    info: dict[str, object] = {
        "format_version": 1,
        "reblock_version": "0.1.0",
        "backend": "torch",
        "torch_version": "2.13.0",
        "isa": "x86_64-avx2",
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "weights": {"weights.safetensors": make_weights()},
        "programs": {"prefill": {"sha256": DIGEST}, "decoder_batch_4": {"sha256": DIGEST[::-1]}},
    }
    return {**info, **changes}


def make_weights(**changes: object) -> dict[str, object]:
    return {"bytes": 538_060_288, "sha256": DIGEST, **changes}


def parse(raw: dict[str, Any]) -> RBLNConfig:
    return parse_config(json.dumps(raw), path="/a/rbln_config.json")


def for_npu(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as optimum-rbln would write it."""
    programs = [{**program, "npu": "RBLN-CA25"} for program in raw["_compile_cfgs"]]
    return {**without(raw, "reblock"), "_compile_cfgs": programs}


def without(raw: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name != key}


def test_config_of_our_own_is_read_in_full() -> None:
    config = parse(make_raw())
    assert config.backend == "torch"
    assert config.reblock == ReblockInfo(
        format_version=1,
        reblock_version="0.1.0",
        backend="torch",
        torch_version="2.13.0",
        isa="x86_64-avx2",
        model_type="llama",
        architecture="LlamaForCausalLM",
        weight_dtype=None,
        weights={"weights.safetensors": WeightsFile(num_bytes=538_060_288, sha256=DIGEST)},
        programs={"prefill": DIGEST, "decoder_batch_4": DIGEST[::-1]},
    )
    assert [program.name for program in config.programs] == ["prefill", "decoder_batch_4"]
    assert (config.npu, config.num_devices) == ("cpu", 1)
    assert config.bounds == BlockBounds(minimum=9, full=32)
    assert config.resizable == {"past_key_values_0": True, "past_key_values_1": True}
    assert config.cache_metas[0].shape == (32, 2, 64, 16)
    assert config.weight_dtype == config.dtype


def test_weights_of_a_type_of_their_own_are_read() -> None:
    raw = make_raw()
    config = parse(raw | {"reblock": make_info(weight_dtype="int8")})
    assert (config.dtype, config.weight_dtype) == (raw["dtype"], "int8")
    with pytest.raises(CorruptArtifact, match=r"weight_dtype.*'int3'; known are float32, bfloat16"):
        parse(raw | {"reblock": make_info(weight_dtype="int3")})


@pytest.mark.parametrize("name", ALL)
def test_config_of_optimum_rbln_is_written_back_byte_for_byte(name: str) -> None:
    text = read_config_bytes(name)
    assert parse_config(text, path=name).text.encode() == text


def test_config_of_optimum_rbln_is_read() -> None:
    config = load_config(QWEN3_CR13)
    assert (config.backend, config.reblock) == ("rbln", None)
    assert (config.npu, config.num_devices) == ("RBLN-CR13", 1)
    assert config.kvcache_num_blocks == 107
    # The shapes count the full batch, whatever is held.
    assert config.cache_metas[0].shape == (160, 8, 8192, 128)
    assert config.bounds == BlockBounds(minimum=33, full=160)
    flash = load_config(LLAMA2_FLASH)
    assert (flash.npu, flash.num_devices) == ("RBLN-CA22", 4)
    assert flash.decoder_batch_sizes == (16, 8, 1)


def test_cache_of_eager_attention_with_a_fixed_count_is_not_resizable() -> None:
    assert set(load_config(LLAMA2_EAGER).resizable.values()) == {False}


@pytest.mark.parametrize("final", ["", "\n"])
def test_final_newline_is_kept_as_it_was(final: str) -> None:
    text = json.dumps(make_raw(), indent=2) + final
    assert parse_config(text, path="/a").text == text
    assert parse_config(text.encode(), path="/a").text == text


def test_another_block_count_changes_one_number_of_the_file() -> None:
    config = load_config(QWEN3_CR13)
    before = read_config_bytes(QWEN3_CR13).decode().splitlines()
    changed = config.with_num_blocks(40)
    after = changed.text.splitlines()
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == [
        ('  "kvcache_num_blocks": 107,', '  "kvcache_num_blocks": 40,')
    ]
    assert parse_config(changed.text, path="/a") == changed
    assert config.kvcache_num_blocks == 107


def test_block_count_there_and_back_is_the_same_file() -> None:
    config = load_config(QWEN3_CR13)
    assert config.with_num_blocks(33).with_num_blocks(107) == config


def test_block_count_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidBlockCount):
        parse(make_raw()).with_num_blocks(0)


def test_unknown_keys_of_optimum_rbln_are_kept() -> None:
    raw = {**for_npu(make_raw()), "optimum_rbln_version": "0.13.0", "new": {"a": [1]}}
    raw["cache_metas"][0]["newer"] = None
    raw["_compile_cfgs"][0]["newest"] = 1.5
    assert json.loads(parse(raw).with_num_blocks(9).text) == {**raw, "kvcache_num_blocks": 9}


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (make_raw(surprise=1), "surprise"),
        (make_raw(reblock=make_info(surprise=1)), "reblock.surprise"),
        (make_raw(cache_metas=[make_cache("kv", surprise=1)]), r"cache_metas\[0\]\.surprise"),
        (
            make_raw(_compile_cfgs=[{"compiled_model_name": "a", "npu": "cpu", "surprise": 1}]),
            r"_compile_cfgs\[0\]\.surprise",
        ),
        (
            make_raw(reblock=make_info(weights={"w": make_weights(surprise=1)})),
            r"reblock\.weights\.w\.surprise",
        ),
        (
            make_raw(reblock=make_info(programs={"p": {"sha256": DIGEST, "surprise": 1}})),
            r"reblock\.programs\.p\.surprise",
        ),
    ],
)
def test_unknown_keys_of_our_own_format_are_refused(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(UnknownFormat, match=f"the key '{key}'"):
        parse(raw)


def test_newer_format_is_refused_before_its_unknown_keys_are() -> None:
    raw = make_raw(reblock=make_info(format_version=2, surprise=1), another=2)
    with pytest.raises(UnknownFormat, match=r"format_version 2.*reads up to 1; upgrade reblock"):
        parse(raw)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(UnknownFormat, match=r"reblock\.backend 'tpu' is not known"):
        parse(make_raw(reblock=make_info(backend="tpu")))


@pytest.mark.parametrize("key", [key for key in make_raw() if key != "reblock"])
def test_missing_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(CorruptArtifact, match=f"{key} is missing") as caught:
        parse(without(make_raw(), key))
    assert caught.value.path == "/a/rbln_config.json"


@pytest.mark.parametrize("key", list(make_info()))
def test_missing_key_of_reblock_is_refused_by_name(key: str) -> None:
    with pytest.raises(CorruptArtifact, match=rf"reblock\.{key} is missing"):
        parse(make_raw(reblock=without(make_info(), key)))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kvcache_num_blocks": "16"}, "kvcache_num_blocks must be a whole number"),
        ({"kvcache_num_blocks": 0}, "kvcache_num_blocks must be from 1"),
        ({"attn_impl": "sdpa"}, "attn_impl is 'sdpa'; known are 'eager' and 'flash_attn'"),
        ({"kvcache_block_size": 1024}, "kvcache_block_size is above max_seq_len, 512"),
        ({"decoder_batch_sizes": [8, 4]}, "decoder_batch_sizes goes above batch_size, 4"),
        ({"_compile_cfgs": []}, "_compile_cfgs names no compiled program"),
        ({"reblock": None}, "reblock must be an object"),
        ({"cache_metas": [make_cache("a"), make_cache("a")]}, "cache_metas has 'a' twice"),
        ({"cache_metas": [make_cache("a", shape=[])]}, r"cache_metas\[0\]\.shape has 0 dimensions"),
        ({"cache_metas": [make_cache("a", shape=[1, 0])]}, r"cache_metas\[0\]\.shape must be"),
        ({"cache_metas": [make_cache("a", dtype="int3")]}, r"dtype is 'int3'; known are float32"),
        ({"cache_metas": [make_cache("a", is_auto="yes")]}, "is_auto must be true or false"),
    ],
)
def test_value_that_makes_no_sense_is_refused_by_name(
    changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(CorruptArtifact, match=fault):
        parse(make_raw(**changes))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"decoder_batch_sizes": []}, "decoder_batch_sizes does not reach batch_size, 4"),
        ({"decoder_batch_sizes": [2, 1]}, "decoder_batch_sizes does not reach batch_size, 4"),
        ({"max_seq_len": 500}, "kvcache_block_size does not divide max_seq_len, 500"),
        ({"prefill_chunk_size": 513}, "prefill_chunk_size is above max_seq_len, 512"),
        ({"kvcache_partition_len": None}, "partition_len is None, but must be kvcache_block_size"),
        ({"kvcache_partition_len": 128}, "partition_len is 128, but must be kvcache_block_size"),
        (
            {"attn_impl": "eager", "kvcache_block_size": 512},
            "kvcache_partition_len is 64, but must be null with eager attention",
        ),
        (
            {"attn_impl": "eager", "kvcache_partition_len": None},
            "kvcache_block_size must with eager attention be max_seq_len, 512",
        ),
        ({"dtype": "float16"}, "dtype is 'float16'; known are float32, bfloat16"),
        ({"cache_metas": [make_cache("a", dtype="int8")]}, r"cache_metas\[0\]\.dtype is 'int8'"),
        (
            {"cache_metas": [make_cache("a", layer_type="chunked_attention")]},
            r"cache_metas\[0\]\.layer_type is 'chunked_attention'; known are full_attention",
        ),
        ({"cache_metas": [make_cache("a", shape=[32, 2, 64])]}, "shape has 3 dimensions, not 4"),
        (
            {"cache_metas": [make_cache("a", shape=[32, 2, 32, 16])]},
            "shape has blocks of 32 tokens, but kvcache_block_size is 64",
        ),
        ({"reblock": make_info(architecture="\x1b[31mLlama")}, "architecture must be printable"),
        (
            {"_compile_cfgs": [{"compiled_model_name": "a", "npu": "cpu", "num_devices": 2}]},
            "_compile_cfgs has num_devices 2 for one cpu",
        ),
    ],
)
def test_keys_of_our_own_format_that_contradict_each_other_are_refused(
    changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(CorruptArtifact, match=fault):
        parse(make_raw(**changes))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"weights": {}}, "reblock.weights names no file"),
        ({"weights": ["weights.safetensors"]}, "reblock.weights must be an object"),
        ({"weights": {"w": DIGEST}}, r"reblock\.weights\.w must be an object"),
        (
            {"weights": {"../w": make_weights()}},
            r"weights has '\.\./w', which is no",
        ),
        ({"weights": {"w": make_weights(bytes=0)}}, r"weights\.w\.bytes must be from 1"),
        ({"weights": {"w": make_weights(bytes=2**63)}}, r"weights\.w\.bytes must be from 1"),
        ({"weights": {"w": make_weights(bytes="1")}}, r"weights\.w\.bytes must be a whole number"),
        ({"weights": {"w": make_weights(sha256=DIGEST[1:])}}, r"weights\.w\.sha256 must be 64"),
        ({"weights": {"w": make_weights(sha256=DIGEST + "0")}}, r"weights\.w\.sha256 must be 64"),
        ({"weights": {"w": make_weights(sha256=DIGEST.upper())}}, r"weights\.w\.sha256 must be 64"),
        ({"weights": {"w": make_weights(sha256=1)}}, r"weights\.w\.sha256 must be text"),
        ({"weights": {"w": {"bytes": 1}}}, r"weights\.w\.sha256 is missing"),
        ({"weights": {"w": {"sha256": DIGEST}}}, r"weights\.w\.bytes is missing"),
        ({"programs": {"prefill": DIGEST}}, r"reblock\.programs\.prefill must be an object"),
        ({"programs": {"prefill": {}}}, r"reblock\.programs\.prefill\.sha256 is missing"),
        (
            {"programs": {"a/b": {"sha256": DIGEST}}},
            "programs has 'a/b', which is no",
        ),
        ({"programs": {"prefill": {"sha256": DIGEST}}}, "reblock.programs lacks 'decoder_batch_4'"),
        (
            {
                "programs": {
                    name: {"sha256": DIGEST} for name in ("prefill", "decoder_batch_4", "other")
                }
            },
            "reblock.programs has 'other', which _compile_cfgs does not name",
        ),
    ],
)
def test_checksums_that_make_no_sense_are_refused_by_name(
    changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(CorruptArtifact, match=fault):
        parse(make_raw(reblock=make_info(**changes)))


def test_weights_may_be_larger_than_31_bits_can_say() -> None:
    weights = {"a": make_weights(bytes=2**40), "b.safetensors": make_weights(bytes=1)}
    text = json.dumps(make_raw(reblock=make_info(weights=weights)), indent=2)
    config = parse_config(text, path="/a")
    assert config.reblock is not None
    assert {name: file.num_bytes for name, file in config.reblock.weights.items()} == {
        "a": 2**40,
        "b.safetensors": 1,
    }
    assert config.text == text


def test_shapes_that_our_compiler_never_writes_are_accepted_of_optimum_rbln() -> None:
    raw = for_npu(make_raw(dtype="float16", decoder_batch_sizes=[2]))
    assert parse(raw).decoder_batch_sizes == (2,)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_eager_attention_has_blocks_of_whole_sequences_and_windows_of_any_length(
    layer_type: str,
) -> None:
    tokens = 512 if layer_type == "full_attention" else 48
    is_auto = layer_type == "full_attention"
    cache = make_cache("a", shape=[4, 2, tokens, 16], layer_type=layer_type, is_auto=is_auto)
    changes = {"kvcache_partition_len": None, "kvcache_block_size": 512, "cache_metas": [cache]}
    assert parse(make_raw(attn_impl="eager", **changes)).resizable == {"a": is_auto}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../prefill", "/etc/passwd", "a/b", "a\\b", "a\0b", ".hidden", "a\n"]
)
def test_program_name_that_leads_out_of_the_artifact_is_refused(name: str) -> None:
    programs = [{"compiled_model_name": name, "npu": "cpu", "num_devices": 1}]
    with pytest.raises(CorruptArtifact, match=r"no plain file name|must be printable text"):
        parse(make_raw(_compile_cfgs=programs))


def test_program_named_twice_is_refused() -> None:
    program = {"compiled_model_name": "prefill", "npu": "cpu", "num_devices": 1}
    with pytest.raises(CorruptArtifact, match="_compile_cfgs has 'prefill' twice"):
        parse(make_raw(_compile_cfgs=[program, program]))


def test_programs_for_different_devices_are_refused() -> None:
    programs = [
        {"compiled_model_name": "prefill", "npu": "RBLN-CA22", "num_devices": 4},
        {"compiled_model_name": "decoder", "npu": "RBLN-CA22", "num_devices": 8},
    ]
    with pytest.raises(ArtifactMismatch, match="programs for different devices"):
        parse(make_raw(_compile_cfgs=programs))


def test_count_that_stands_in_the_json_twice_is_refused() -> None:
    text = json.dumps(make_raw())[:-1] + ', "kvcache_num_blocks": 40}'
    with pytest.raises(CorruptArtifact, match="'kvcache_num_blocks' stands there twice"):
        parse_config(text, path="/a")


@pytest.mark.parametrize(
    ("layer_type", "is_auto", "is_resizable"),
    [
        ("full_attention", True, True),
        ("full_attention", False, False),
        ("sliding_attention", True, False),
        ("sliding_attention", False, False),
    ],
)
def test_cache_is_resizable_where_it_is_sized_automatically_and_attends_to_everything(
    layer_type: str, is_auto: bool, is_resizable: bool
) -> None:
    cache = make_cache("kv", layer_type=layer_type, is_auto=is_auto)
    meta = parse(make_raw(cache_metas=[cache])).cache_metas[0]
    assert meta.is_resizable is is_resizable
    per_block = 2 * 64 * 16 * 4
    assert meta.bytes_at(5) == (5 if is_resizable else 32) * per_block


def model_caches(
    *, layers: int, heads: int, head_dim: int, tokens: int, num_tensors: int = 2, layer_type: str
) -> list[CacheMeta]:
    return [
        CacheMeta(
            name=f"{layer_type}_{index}",
            layer_index=index // num_tensors,
            shape=(1, heads, tokens, head_dim),
            layer_type=layer_type,
            is_auto=layer_type == "full_attention",
            dtype="bfloat16",
        )
        for index in range(layers * num_tensors)
    ]


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "num_tensors", "bytes_per_token"),
    [
        pytest.param(32, 32, 128, 2, 524_288, id="Llama-2-7B"),
        pytest.param(32, 8, 128, 2, 131_072, id="Llama-3.1-8B"),
        pytest.param(28, 8, 128, 2, 114_688, id="Qwen3-0.6B"),
        pytest.param(36, 8, 128, 2, 147_456, id="Qwen3-4B"),
        pytest.param(36, 8, 64, 2, 73_728, id="gpt-oss-120b, all layers"),
        pytest.param(18, 8, 64, 2, 36_864, id="gpt-oss-120b, full layers"),
        pytest.param(61, 1, 576, 1, 70_272, id="DeepSeek-V3.1, one latent tensor a layer"),
    ],
)
def test_bytes_per_token_are_those_of_published_models(
    layers: int, heads: int, head_dim: int, num_tensors: int, bytes_per_token: int
) -> None:
    metas = model_caches(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        tokens=1,
        num_tensors=num_tensors,
        layer_type="full_attention",
    )
    assert sum(meta.bytes_at(1) for meta in metas) == bytes_per_token


def test_sliding_layers_hold_their_window_and_not_the_whole_sequence() -> None:
    # Gemma-3-27B at 131,072 tokens: 10 full layers and 52 of a window of 1,024.
    full = model_caches(
        layers=10, heads=16, head_dim=128, tokens=131_072, layer_type="full_attention"
    )
    sliding = model_caches(
        layers=52, heads=16, head_dim=128, tokens=1_024, layer_type="sliding_attention"
    )
    held = sum(meta.bytes_at(1) for meta in [*full, *sliding])
    assert held * 1000 // 2**30 == 10_406


def test_programs_for_the_cpu_without_what_reblock_notes_are_refused() -> None:
    with pytest.raises(CorruptArtifact, match="reblock is missing"):
        parse(without(make_raw(), "reblock"))
