from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from reference_plans import ALL, read_config_bytes

from reblock.errors import UsageError
from reblock.rbln import (
    CacheMeta,
    FullAttentionKVCacheMeta,
    KVCacheMeta,
    LinearAttentionCacheMeta,
    RBLNDecoderOnlyModelForCausalLMConfig,
    SlidingWindowAttentionKVCacheMeta,
)

FULL = {
    "name": "past_key_values_0",
    "layer_index": 0,
    "shape": [40, 8, 8192, 128],
    "layer_type": "full_attention",
    "is_auto": True,
    "dtype": "bfloat16",
}


def make_config(**changes: Any) -> RBLNDecoderOnlyModelForCausalLMConfig:
    values = {"batch_size": 8, "max_seq_len": 40_960, "kvcache_block_size": 8_192, **changes}
    return RBLNDecoderOnlyModelForCausalLMConfig(**values)


def test_full_attention_of_an_open_count_is_resizable_and_compiled_with_one_block() -> None:
    meta = FullAttentionKVCacheMeta.from_config("kv", 3, 8, 128, "bfloat16", make_config())
    assert meta.shape == [40, 8, 8_192, 128]
    assert (meta.num_blocks, meta.block_size) == (40, 8_192)
    assert (meta.is_auto, meta.can_resize) == (True, True)
    assert meta.compile_shape == [1, 8, 8_192, 128]
    assert meta.layer_type == "full_attention"


def test_full_attention_of_a_given_count_is_fixed() -> None:
    config = make_config(kvcache_num_blocks=12)
    meta = FullAttentionKVCacheMeta.from_config("kv", 3, 8, 128, "bfloat16", config)
    assert meta.shape == meta.compile_shape == [12, 8, 8_192, 128]
    assert (meta.is_auto, meta.can_resize) == (False, False)


def test_sliding_window_holds_a_window_for_each_sequence_and_is_fixed() -> None:
    config = make_config(sliding_window=1_024)
    meta = SlidingWindowAttentionKVCacheMeta.from_config("kv", 3, 8, 128, "float16", config)
    assert meta.shape == meta.compile_shape == [8, 8, 1_024, 128]
    assert (meta.num_blocks, meta.block_size, meta.can_resize) == (8, 1_024, False)
    assert meta.layer_type == "sliding_attention"


def test_linear_attention_has_the_shape_that_the_model_gives() -> None:
    meta = LinearAttentionCacheMeta.from_config("state", 2, [4, 32, 16], "float32")
    assert meta.shape == meta.compile_shape == [4, 32, 16]
    assert not meta.can_resize
    assert not isinstance(meta, KVCacheMeta)
    assert meta.layer_type == "linear_attention"


def test_any_object_with_the_attributes_is_a_configuration() -> None:
    config = SimpleNamespace(
        kvcache_block_size=16, kvcache_num_blocks=0, num_full_blocks=5, is_auto_num_blocks=True
    )
    meta = FullAttentionKVCacheMeta.from_config("kv", 0, 1, 4, "float32", config)
    assert meta.shape == [5, 1, 16, 4]


@pytest.mark.parametrize(
    ("kind", "config", "option"),
    [
        (FullAttentionKVCacheMeta, {"kvcache_num_blocks": 4}, "kvcache_block_size"),
        (SlidingWindowAttentionKVCacheMeta, {}, "sliding_window"),
    ],
)
def test_cache_of_an_open_size_is_refused(kind: Any, config: dict[str, Any], option: str) -> None:
    rbln_config = RBLNDecoderOnlyModelForCausalLMConfig(**config)
    with pytest.raises(UsageError, match=f"{option} is not set"):
        kind.from_config("kv", 0, 1, 4, "float32", rbln_config)


def test_base_kinds_are_fixed() -> None:
    meta = CacheMeta("kv", 0, [3], "float32")
    assert (meta.can_resize, meta.compile_shape, meta.layer_type) == (False, [3], "cache")


@pytest.mark.parametrize(
    ("layer_type", "kind", "keeps_is_auto"),
    [
        ("full_attention", FullAttentionKVCacheMeta, True),
        ("sliding_attention", SlidingWindowAttentionKVCacheMeta, False),
        ("linear_attention", LinearAttentionCacheMeta, False),
    ],
)
def test_layer_type_chooses_the_kind(layer_type: str, kind: type, keeps_is_auto: bool) -> None:
    serialized = {**FULL, "layer_type": layer_type, "of_a_newer_version": 1}
    meta = CacheMeta.from_serialized(serialized)
    assert type(meta) is kind
    assert hasattr(meta, "is_auto") == keeps_is_auto
    written = meta._prepare_for_serialization()
    assert written == {**FULL, "layer_type": layer_type, "is_auto": keeps_is_auto}
    assert list(written) == list(FULL)


@pytest.mark.parametrize("name", ALL)
def test_caches_of_an_artifact_are_written_as_they_were_read(name: str) -> None:
    metas = json.loads(read_config_bytes(name))["cache_metas"]
    assert [CacheMeta.from_serialized(meta)._prepare_for_serialization() for meta in metas] == metas


@pytest.mark.parametrize("layer_type", ["chunked_attention", "cache", None])
def test_unknown_layer_type_is_refused_and_the_known_ones_are_listed(layer_type: Any) -> None:
    known = "'full_attention', 'linear_attention', 'sliding_attention'"
    with pytest.raises(ValueError, match=f"{layer_type!r}.*known are {known}"):
        CacheMeta.from_serialized({**FULL, "layer_type": layer_type})


@pytest.mark.parametrize("field", ["name", "layer_index", "shape", "dtype", "is_auto"])
def test_missing_field_is_an_error_and_no_default(field: str) -> None:
    serialized = {key: value for key, value in FULL.items() if key != field}
    with pytest.raises(UsageError, match=f"lacks {field}"):
        CacheMeta.from_serialized(serialized)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", 7),
        ("layer_index", -1),
        ("layer_index", True),
        ("layer_index", "0"),
        ("shape", [0, 8, 8192, 128]),
        ("shape", [40, 8, 8192]),
        ("shape", [40, 8, 8192.0, 128]),
        ("shape", (40, 8, 8192, 128)),
        ("shape", 40),
        ("dtype", None),
        ("is_auto", 1),
    ],
)
def test_bad_value_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=str(field) if field != "name" else "name"):
        CacheMeta.from_serialized({**FULL, field: value})
