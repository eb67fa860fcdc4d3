"""Public models, from their published `config.json`, and what each keeps of a token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reblock.errors import CorruptArtifact, UnsupportedModel
from reblock.model_spec import ModelSpec, parse_model_config
from reblock.model_spec.families import UNCHECKED
from small_configs import SMALL_CONFIGS, SmallConfig

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
BF16 = 2
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Model:
    """Elements of a token in layers that keep all of them and in layers that keep a window."""

    name: str
    layers: int
    full: int
    windowed: int
    window: int | None
    state: int
    parameters: int


# Layers * KV heads * (key + value). The parameters are the published ones wherever the publisher
# counts the same; tests/full/test_model_spec_truth.py holds them against transformers.
MODELS = [
    Model("bloom-560m", 24, 24 * 16 * (64 + 64), 0, None, 0, 559_214_592),
    Model(
        "c4ai-command-r7b-12-2024",
        32,
        8 * 8 * (128 + 128),
        24 * 8 * (128 + 128),
        4096,
        0,
        8_028_033_024,
    ),
    Model("DeepSeek-V2-Lite", 27, 27 * 1 * (576 + 0), 0, None, 0, 15_706_484_224),
    Model("DeepSeek-V3.1", 61, 61 * 1 * (576 + 0), 0, None, 0, 671_026_404_352),
    Model("falcon-40b", 60, 60 * 8 * (64 + 64), 0, None, 0, 41_303_293_952),
    Model("falcon-7b", 32, 32 * 1 * (64 + 64), 0, None, 0, 6_921_720_704),
    Model("Falcon-H1-7B-Instruct", 44, 44 * 2 * (128 + 128), 0, None, 44 * 800_768, 7_585_513_568),
    Model("gemma-2-9b", 42, 21 * 8 * (256 + 256), 21 * 8 * (256 + 256), 4096, 0, 9_241_705_984),
    Model("gemma-3-1b-it", 26, 4 * 1 * (256 + 256), 22 * 1 * (256 + 256), 512, 0, 999_885_952),
    Model(
        "gemma-3-27b-it", 62, 10 * 16 * (128 + 128), 52 * 16 * (128 + 128), 1024, 0, 27_009_346_304
    ),
    Model("gemma-3-4b-it", 34, 5 * 4 * (256 + 256), 29 * 4 * (256 + 256), 1024, 0, 3_880_263_168),
    Model("gemma-3n-E4B-it", 35, 4 * 2 * (256 + 256), 16 * 2 * (256 + 256), 512, 0, 6_835_235_568),
    Model("gemma-4-12B-it", 48, 8 * 1 * (512 + 512), 40 * 8 * (256 + 256), 1024, 0, 11_907_350_272),
    Model(
        "gemma-4-31B-it", 60, 10 * 4 * (512 + 512), 50 * 16 * (256 + 256), 1024, 0, 30_697_345_280
    ),
    Model("GLM-4.5", 92, 92 * 8 * (128 + 128), 0, None, 0, 352_797_814_784),
    Model("GLM-5", 78, 78 * 1 * (576 + 0) + 78 * 128, 0, None, 0, 743_911_199_232),
    Model("gpt-oss-120b", 36, 18 * 8 * (64 + 64), 18 * 8 * (64 + 64), 128, 0, 116_829_156_672),
    Model("gpt-oss-20b", 24, 12 * 8 * (64 + 64), 12 * 8 * (64 + 64), 128, 0, 20_914_757_184),
    Model("gpt2", 12, 12 * 12 * (64 + 64), 0, None, 0, 124_439_808),
    Model("granite-3.1-8b-base", 40, 40 * 8 * (128 + 128), 0, None, 0, 8_170_835_968),
    Model("granite-4.0-h-small", 40, 4 * 8 * (128 + 128), 0, None, 36 * 1_082_368, 32_207_337_984),
    Model("Jamba-v0.1", 32, 4 * 8 * (128 + 128), 0, None, 28 * 163_840, 51_570_323_328),
    Model("Kimi-K2-Instruct", 61, 61 * 1 * (576 + 0), 0, None, 0, 1_026_408_209_408),
    Model(
        "Kimi-Linear-48B-A3B-Instruct", 27, 7 * 1 * (576 + 0), 0, None, 20 * 573_440, 49_122_675_072
    ),
    Model("LFM2-1.2B", 16, 6 * 8 * (64 + 64), 0, None, 10 * 6_144, 1_170_340_608),
    Model("Llama-2-7b-hf", 32, 32 * 32 * (128 + 128), 0, None, 0, 6_738_415_616),
    Model("Llama-3.1-70B", 80, 80 * 8 * (128 + 128), 0, None, 0, 70_553_706_496),
    Model("Llama-3.1-8B", 32, 32 * 8 * (128 + 128), 0, None, 0, 8_030_261_248),
    Model(
        "Llama-4-Scout-17B-16E",
        48,
        12 * 8 * (128 + 128),
        36 * 8 * (128 + 128),
        8192,
        0,
        107_769_861_120,
    ),
    Model("mamba-130m-hf", 24, 0, 0, None, 24 * 30_720, 129_135_360),
    Model("Mamba-Codestral-7B-v0.1", 64, 0, 0, None, 64 * 1_089_536, 7_285_403_648),
    Model("MiniMax-M2", 62, 62 * 8 * (128 + 128), 0, None, 0, 228_689_748_992),
    Model("MiniMax-Text-01", 80, 10 * 8 * (128 + 128), 0, None, 70 * 1_048_576, 456_089_655_296),
    Model("Mistral-7B-v0.1", 32, 0, 32 * 8 * (128 + 128), 4096, 0, 7_241_732_096),
    Model("Mistral-7B-v0.3", 32, 32 * 8 * (128 + 128), 0, None, 0, 7_248_023_552),
    Model("Mixtral-8x7B-v0.1", 32, 32 * 8 * (128 + 128), 0, None, 0, 46_702_792_704),
    Model(
        "NVIDIA-Nemotron-3-Nano-30B-A3B",
        52,
        6 * 2 * (128 + 128),
        0,
        None,
        23 * 548_864,
        31_577_937_344,
    ),
    Model("OLMo-2-1124-7B", 32, 32 * 32 * (128 + 128), 0, None, 0, 7_298_617_344),
    Model(
        "Olmo-3-1025-7B", 32, 8 * 32 * (128 + 128), 24 * 32 * (128 + 128), 4096, 0, 7_298_011_136
    ),
    Model("opt-125m", 12, 12 * 12 * (64 + 64), 0, None, 0, 125_239_296),
    Model("phi-2", 32, 32 * 32 * (80 + 80), 0, None, 0, 2_779_683_840),
    Model("Phi-3-mini-128k-instruct", 32, 32 * 32 * (96 + 96), 0, None, 0, 3_821_079_552),
    Model("phi-4", 40, 40 * 10 * (128 + 128), 0, None, 0, 14_659_507_200),
    Model("pythia-160m", 12, 12 * 12 * (64 + 64), 0, None, 0, 162_322_944),
    Model("Qwen2.5-7B", 28, 28 * 4 * (128 + 128), 0, None, 0, 7_615_616_512),
    Model("Qwen3-0.6B", 28, 28 * 8 * (128 + 128), 0, None, 0, 596_049_920),
    Model("Qwen3-1.7B", 28, 28 * 8 * (128 + 128), 0, None, 0, 1_720_574_976),
    Model("Qwen3-30B-A3B", 48, 48 * 4 * (128 + 128), 0, None, 0, 30_532_122_624),
    Model("Qwen3-32B", 64, 64 * 8 * (128 + 128), 0, None, 0, 32_762_123_264),
    Model("Qwen3-4B", 36, 36 * 8 * (128 + 128), 0, None, 0, 4_022_468_096),
    Model("Qwen3-8B", 36, 36 * 8 * (128 + 128), 0, None, 0, 8_190_735_360),
    Model(
        "Qwen3-Next-80B-A3B-Instruct",
        48,
        12 * 2 * (256 + 256),
        0,
        None,
        36 * 557_056,
        79_674_391_296,
    ),
    Model("Qwen3.5-27B", 64, 16 * 4 * (256 + 256), 0, None, 48 * 827_392, 26_895_998_464),
    Model("recurrentgemma-2b", 26, 0, 8 * 1 * (256 + 256), 2048, 18 * 10_240, 2_682_862_080),
    Model("SmolLM2-135M", 30, 30 * 3 * (64 + 64), 0, None, 0, 134_515_008),
    Model("SmolLM3-3B", 36, 36 * 4 * (128 + 128), 0, None, 0, 3_075_098_624),
    Model("starcoder", 40, 40 * 1 * (128 + 128), 0, None, 0, 15_517_456_384),
    Model("starcoder2-3b", 30, 0, 30 * 2 * (128 + 128), 4096, 0, 3_030_371_328),
]


def read(name: str) -> ModelSpec:
    path = CONFIGS / name / "config.json"
    return parse_model_config(path.read_bytes(), path=str(path))


def parse(**values: Any) -> ModelSpec:
    return parse_model_config(json.dumps(values), path="/m/config.json")


def llama(**values: Any) -> ModelSpec:
    base = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 100,
    }
    return parse(**(base | values))


def kinds(spec: ModelSpec) -> str:
    """Return a letter for every layer: f(ull), s(liding), c(hunked), r(ecurrent), l(atent)..."""
    return "".join(layer.kind[0] for layer in spec.layers)


def test_every_public_config_is_in_the_table_and_there_are_more_than_thirty() -> None:
    assert sorted(model.name for model in MODELS) == sorted(p.name for p in CONFIGS.iterdir())
    assert len({read(model.name).model_type for model in MODELS}) > 30


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_public_model_has_the_published_cache_and_parameters(model: Model) -> None:
    spec = read(model.name)
    assert len(spec.layers) == model.layers
    assert spec.bytes_per_token(BF16) == BF16 * (model.full + model.windowed)
    assert spec.full_bytes_per_token(BF16) == BF16 * model.full
    assert {layer.window for layer in spec.layers if layer.window} == (
        {model.window} if model.window else set()
    )
    assert sum(layer.state_elements for layer in spec.layers) == model.state
    assert spec.num_parameters == model.parameters


# --- the numbers at the end of the field reports, and the rows about what layers really keep


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("Llama-2-7b-hf", 524_288),
        ("Llama-3.1-8B", 131_072),
        ("Qwen3-0.6B", 114_688),
        ("Qwen3-1.7B", 114_688),
        ("Qwen3-4B", 147_456),
        ("gpt-oss-120b", 73_728),
        ("DeepSeek-V3.1", 70_272),
    ],
)
def test_bytes_per_token_are_those_of_the_field_reports(name: str, num_bytes: int) -> None:
    assert read(name).bytes_per_token(BF16) == num_bytes


@pytest.mark.parametrize(
    ("name", "num_tokens", "gib"),
    [
        ("Qwen3-0.6B", 40_960, 4.375),
        ("gemma-3-27b-it", 131_072, 10.406),
        ("DeepSeek-V3.1", 163_840, 10.723),
        ("Qwen3.5-27B", 262_144, 16.00),
        # Kimi-K2.5 at its full context.
        ("Kimi-K2-Instruct", 262_144, 17.16),
    ],
)
def test_row_31_one_sequence_takes_what_every_kind_of_layer_keeps(
    name: str, num_tokens: int, gib: float
) -> None:
    spec = read(name)
    num_bytes = spec.cache_bytes(num_tokens, BF16) - spec.state_bytes(BF16)
    assert num_bytes / GIB == pytest.approx(gib, abs=0.005 if gib > 16 else 0.0005)


def test_row_31_sparse_attention_keeps_an_index_key_beside_the_latent() -> None:
    spec = read("GLM-5")
    latents = 78 * (512 + 64) * BF16
    assert spec.bytes_per_token(BF16) == latents + 78 * 128 * BF16
    # The report has the layer that drafts in it, and no index.
    assert latents // 78 * 79 * 202_752 / GIB == pytest.approx(17.18, abs=0.01)
    assert any("index key" in note for note in spec.notes)
    assert any("only draft" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "wrong"),
    [("Qwen3-4B", 8, 128, 2560 // 32), ("GLM-4.5", 8, 128, 5120 // 96)],
)
def test_row_32_head_size_is_what_the_file_says_not_hidden_by_heads(
    name: str, kv_heads: int, head_dim: int, wrong: int
) -> None:
    assert wrong != head_dim
    for layer in read(name).layers:
        assert (layer.num_kv_heads, layer.key_width, layer.value_width) == (
            kv_heads,
            head_dim,
            head_dim,
        )


def test_row_33_query_heads_are_no_factor() -> None:
    assert llama(num_key_value_heads=1).bytes_per_token(BF16) == 4 * 2 * 64 * BF16
    assert llama(num_key_value_heads=8).bytes_per_token(BF16) == 4 * 8 * 2 * 64 * BF16


def test_row_35_sliding_layers_are_not_dropped() -> None:
    spec = read("gpt-oss-120b")
    assert (spec.bytes_per_token(BF16), spec.full_bytes_per_token(BF16)) == (73_728, 36_864)
    assert round(78_384 * spec.bytes_per_token(BF16) / GIB, 2) == 5.38


def test_row_37_every_layer_has_heads_and_widths_of_its_own() -> None:
    spec = read("gemma-4-12B-it")
    assert kinds(spec) == "sssssf" * 8
    assert {(layer.num_kv_heads, layer.key_width) for layer in spec.layers} == {(8, 256), (1, 512)}
    # 16 KiB for every further token, as was measured, and 320 MiB for the windows.
    assert spec.full_bytes_per_token(BF16) == 16_384
    assert spec.cache_bytes(131_072, BF16) == 131_072 * 16_384 + 1_024 * 40 * 8 * 512 * BF16


def test_row_40_both_pools_of_a_model_with_windows_are_summed() -> None:
    spec = read("gemma-3-4b-it")
    full = 131_072 * spec.full_bytes_per_token(BF16)
    assert full == 2_560 * MIB
    assert spec.cache_bytes(131_072, BF16) == full + 1_024 * 29 * 4 * 512 * BF16


@pytest.mark.parametrize(
    ("name", "per_token", "fixed"),
    [
        ("Qwen3-Next-80B-A3B-Instruct", 24_576, 36 * (32 * 128 * 128 + 8_192 * 4) * BF16),
        ("granite-4.0-h-small", 16_384, 36 * (8_192 * 128 + 8_448 * 4) * BF16),
        # Its file fixes the type of the states.
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 6_144, 23 * (4_096 * 128 + 6_144 * 4) * 4),
        ("mamba-130m-hf", 0, 24 * 1_536 * (16 + 4) * BF16),
    ],
)
def test_row_42_hybrids_have_a_part_per_token_and_a_part_that_is_fixed(
    name: str, per_token: int, fixed: int
) -> None:
    spec = read(name)
    assert spec.full_bytes_per_token(BF16) == per_token
    assert spec.state_bytes(BF16) == fixed
    for num_tokens in (1, 1_000, 100_000):
        assert spec.cache_bytes(num_tokens, BF16) == num_tokens * per_token + fixed


def test_row_43_sliding_layers_are_charged_their_window_not_the_context() -> None:
    spec = read("gemma-4-31B-it")
    assert kinds(spec).count("s") == 50
    window = 1_024 * 50 * 16 * 512 * BF16
    assert spec.cache_bytes(65_536, BF16) == 65_536 * 10 * 4 * 1_024 * BF16 + window


def test_row_45_only_sliding_layers_are_capped_by_the_window() -> None:
    spec = read("gemma-3-1b-it")
    assert {layer.window for layer in spec.layers if layer.kind == "sliding"} == {512}
    assert {layer.window for layer in spec.layers if layer.kind == "full"} == {None}
    assert spec.cache_bytes(750, BF16) - spec.cache_bytes(512, BF16) == 238 * 4 * 512 * BF16


def test_row_46_bytes_follow_the_type_of_the_cache() -> None:
    spec = read("gemma-4-31B-it")
    assert spec.cache_bytes(4_096, 1) * 2 == spec.cache_bytes(4_096, 2)


# --- what keys mean


def test_layers_that_share_a_cache_name_the_layer_that_has_it() -> None:
    spec = read("gemma-3n-E4B-it")
    shared = {layer.shares_with for layer in spec.layers[20:]}
    assert kinds(spec)[20:] == "s" * 15
    assert {layer.kind for layer in spec.layers[20:]} == {"shared"}
    assert shared == {18, 19}
    assert (spec.layers[18].kind, spec.layers[19].kind) == ("sliding", "full")
    assert spec.layers[24].shares_with == 19


def test_null_and_absent_are_not_the_same() -> None:
    mistral = {"model_type": "mistral", "num_hidden_layers": 2}
    assert kinds(parse(**mistral, sliding_window=None)) == "ff"
    assert kinds(parse(**mistral)) == "ss"
    assert parse(**mistral).layers[0].window == 4096


def test_defaults_of_a_model_type_are_used_and_said() -> None:
    spec = read("gemma-3-4b-it")
    assert {layer.num_kv_heads for layer in spec.layers} == {4}
    assert "config.json does not say num_key_value_heads; gemma3_text has 4 where it does not." in (
        spec.notes
    )


def test_window_is_ignored_where_it_is_switched_off() -> None:
    assert {layer.kind for layer in read("Qwen2.5-7B").layers} == {"full"}
    qwen = {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "sliding_window": 16,
        "max_window_layers": 3,
        "vocab_size": 8,
    }
    assert kinds(parse(**qwen)) == "ffff"
    assert kinds(parse(**qwen, use_sliding_window=True)) == "fffs"


def test_window_longer_than_the_context_is_none() -> None:
    spec = read("Phi-3-mini-128k-instruct")
    assert {layer.window for layer in spec.layers} == {None}
    assert any("never full" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}, "fsfs"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "ffff"),
        ({"layer_types": ["full_attention"] * 5}, "ffff"),
        ({"sliding_window_pattern": 2, "sliding_window": 8}, "sfsf"),
        ({"sliding_window_pattern": "LLG", "sliding_window": 8}, "ssfs"),
        ({"sliding_window": 8}, "ssss"),
        ({"sliding_window": 8, "use_sliding_window": False}, "ffff"),
        ({"sliding_window": 0}, "ffff"),
        ({"attention_chunk_size": 8}, "cccc"),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]}, "cfcf"),
        ({"no_rope_layers": [1, 0, 1, 0]}, "ffff"),
        ({"attn_type_list": [0, 1, 1, 0]}, "rffr"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 8}, "fssf"),
        ({"full_attn_idxs": [1]}, "rfrr"),
        ({"attn_layer_indices": [0, 3]}, "frrf"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, "rfrf"),
        ({"full_attention_interval": 2}, "rfrf"),
        ({"cross_attention_layers": [1]}, "fnff"),
        ({"hybrid_override_pattern": "M-*E"}, "rnfn"),
        ({"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4]}}, "rfrr"),
        ({"layer_types": ["recurrent", "attention", "mamba", "mlp"]}, "rfrn"),
    ],
)
def test_kinds_of_layers_are_read_in_whatever_way_they_are_said(
    values: dict[str, Any], expected: str
) -> None:
    assert kinds(llama(**values)) == expected


@pytest.mark.parametrize(
    ("model_type", "values", "expected"),
    [
        ("bamba", {}, "rrrr"),
        ("cwm", {}, "fsss"),
        ("deepseek_v4", {}, "ffff"),
        ("exaone4", {"sliding_window_pattern": None}, "sssf"),
        ("gemma2", {}, "sfsf"),
        ("gemma4_text", {}, "sssf"),
        ("gpt_neo", {}, "fsfs"),
        ("gpt_neo", {"attention_layers": ["local", "global", "local", "global"]}, "sfsf"),
        ("gpt_oss", {}, "sfsf"),
        ("granitemoehybrid", {}, "rrrr"),
        ("llama4_text", {}, "cccf"),
        ("longcat_flash", {}, "llllllll"),
        ("mamba", {}, "rrrr"),
        ("mimo_v2_flash", {}, "fsss"),
        ("minimax", {}, "frfr"),
        ("qwen3_next", {}, "rrrf"),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}, "rsrs"),
        ("recurrent_gemma", {}, "rrsr"),
        ("zamba", {"num_hidden_layers": 9}, "rrfrrrrfr"),
    ],
)
def test_kinds_of_layers_of_a_type_are_known_where_the_file_says_nothing(
    model_type: str, values: dict[str, Any], expected: str
) -> None:
    assert kinds(llama(model_type=model_type, **values)) == expected


def test_sliding_layers_may_have_heads_and_widths_of_their_own() -> None:
    spec = llama(
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=8,
        num_key_value_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        swa_v_head_dim=16,
    )
    assert [
        (layer.num_kv_heads, layer.key_width, layer.value_width) for layer in spec.layers[:2]
    ] == [(4, 64, 64), (2, 32, 16)]


def test_widths_can_be_a_list_with_an_entry_for_every_layer() -> None:
    assert [layer.key_width for layer in llama(head_dim=[16, 32, 64, 128]).layers] == [
        16,
        32,
        64,
        128,
    ]


def test_wide_heads_of_gemma_4_are_as_many_as_in_other_layers_unless_keys_are_values() -> None:
    spec = llama(model_type="gemma4_text", num_key_value_heads=2, head_dim=64)
    assert [(layer.num_kv_heads, layer.key_width) for layer in spec.layers[2:]] == [
        (2, 64),
        (2, 512),
    ]
    equal = llama(model_type="gemma4_text", num_key_value_heads=2, attention_k_eq_v=True)
    assert equal.layers[3].num_kv_heads == 2


def test_attention_of_zamba_is_twice_as_wide() -> None:
    layer = llama(model_type="zamba").layers[2]
    assert layer.key_width == 2 * 512 // 8
    assert layer.state_elements == 1_024 * (16 + 4)
    layer = llama(
        model_type="zamba2",
        layers_block_type=["mamba", "hybrid"] * 2,
        kv_channels=64,
        attention_head_dim=128,
    ).layers[1]
    assert (layer.kind, layer.key_width) == ("full", 128)
    assert layer.state_elements > 0


def test_layers_that_share_an_index_keep_none() -> None:
    spec = parse(
        model_type="glm_moe_dsa",
        num_hidden_layers=2,
        num_attention_heads=4,
        indexer_types=["full", "shared"],
    )
    assert [layer.index_width for layer in spec.layers] == [128, 0]
    assert [layer.elements_per_token for layer in spec.layers] == [704, 576]


def test_latent_without_the_width_of_its_rotary_part_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="qk_rope_head_dim"):
        llama(kv_lora_rank=512)
    assert llama(kv_lora_rank=512, qk_rope_head_dim=0).layers[0].key_width == 512


def test_state_that_is_not_known_is_said() -> None:
    spec = llama(layer_types=["linear_attention", "full_attention"] * 2)
    assert spec.state_bytes(BF16) == 0
    assert any("recurrent state of llama is not known" in note for note in spec.notes)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "opt", "word_embed_proj_dim": 256},
        {"qk_layernorm": True},
        {"vocab_size": None},
        {"per_layer_config": {"0": {"head_dim": 32}}},
        {"layer_types": ["mlp", "full_attention"] * 2},
    ],
)
def test_parameters_are_not_guessed_where_a_model_is_unlike_its_family(
    values: dict[str, Any],
) -> None:
    assert llama(**values).num_parameters is None


@pytest.mark.parametrize("small", SMALL_CONFIGS, ids=str)
def test_parameters_of_small_models_are_counted(small: SmallConfig) -> None:
    spec = parse(model_type=small.model_type, **small.values)
    assert spec.num_parameters == small.parameters


# Of model types that transformers does not have: their files, and what their publishers count.
SEVEN_B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
}
UNCONFIRMED: dict[str, tuple[dict[str, Any], float]] = {
    "baichuan": (SEVEN_B | {"vocab_size": 64000}, 7.00e9),
    "chatglm": (
        {
            "add_qkv_bias": True,
            "ffn_hidden_size": 13696,
            "hidden_size": 4096,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "num_attention_heads": 32,
            "num_layers": 28,
            "padded_vocab_size": 65024,
        },
        6.243e9,
    ),
    "deepseek": (
        {
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "vocab_size": 102400,
        },
        16.38e9,
    ),
    "internlm": (SEVEN_B | {"bias": True, "vocab_size": 103168}, 7.32e9),
    "internlm2": (
        SEVEN_B
        | {
            "bias": False,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "vocab_size": 92544,
        },
        7.74e9,
    ),
    "minimax_text_01": (
        json.loads((CONFIGS / "MiniMax-Text-01" / "config.json").read_text()),
        456e9,
    ),
    "qwen": (SEVEN_B | {"intermediate_size": 22016, "vocab_size": 151936}, 7.721e9),
}


@pytest.mark.parametrize("model_type", UNCONFIRMED)
def test_parameters_that_transformers_cannot_confirm_are_as_published_and_said_to_be_unchecked(
    model_type: str,
) -> None:
    values, published = UNCONFIRMED[model_type]
    spec = parse(**(values | {"model_type": model_type}))
    assert spec.num_parameters == pytest.approx(published, rel=0.001)
    assert any("not checked against transformers" in note for note in spec.notes)


def test_every_model_type_that_is_said_to_be_unchecked_has_a_published_size_here() -> None:
    assert set(UNCONFIRMED) == UNCHECKED


def test_parameters_that_transformers_confirms_have_no_such_note() -> None:
    assert not any("not checked" in note for note in llama().notes)


def test_layers_that_attend_to_images_are_counted_with_their_norms_and_gates() -> None:
    values = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    without = llama(model_type="mllama_text_model", **values).num_parameters
    spec = llama(model_type="mllama_text_model", **values, cross_attention_layers=[1, 3])
    assert without is not None
    assert spec.num_parameters == without + 2 * (2 * 16 + 2)


def test_experts_are_in_the_layers_that_a_list_names() -> None:
    base = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": None,
        "vocab_size": 100,
    }
    one = parse(**base, moe_layer_freq=[0, 0, 0, 1]).num_parameters
    two = parse(**base, moe_layer_freq=[0, 1, 0, 1]).num_parameters
    assert one is not None
    assert two == one + 4 * 64 + 4 * 3 * 64 * 32 - 3 * 64 * 96
    with pytest.raises(CorruptArtifact, match="moe_layer_freq"):
        parse(**base, moe_layer_freq=[0, 1])


def test_widths_of_feed_forward_parts_can_be_a_list_with_an_entry_for_every_layer() -> None:
    wide = llama(intermediate_size=[100, 100, 100, 101]).num_parameters
    assert wide == (llama(intermediate_size=100).num_parameters or 0) + 3 * 512


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("opt", {"enable_bias": False}),
        ("opt", {"do_layer_norm_before": False}),
        ("stablelm", {"use_parallel_residual": True}),
        ("llama", {"cross_attention_layers": [1]}),
        ("llama", {"kv_lora_rank": 8, "qk_rope_head_dim": 4}),
        ("deepseek_v32", {"index_n_heads": None}),
    ],
)
def test_parameters_are_not_counted_where_a_part_is_unusual_or_not_said(
    model_type: str, values: dict[str, Any]
) -> None:
    assert llama(model_type=model_type, **values).num_parameters is None


@pytest.mark.parametrize(
    ("model_type", "values", "more"),
    [
        # A norm over all queries and keys, in each of 4 layers.
        ("cohere", {"use_qk_norm": True}, 4 * 2 * 512),
        # A mixture instead of nothing: router, and three matrices for every expert.
        (
            "granitemoehybrid",
            {"num_local_experts": 2, "layer_types": ["attention"] * 4},
            4 * (2 * 512 + 2 * 3 * 512 * 1_024),
        ),
        ("deepseek_v2", {"mlp_bias": True}, 4 * (2 * 128 + 512)),
        # Every second layer has one wide part in place of a router, an expert and a shared one.
        (
            "llama4_text",
            {"interleave_moe_layer_step": 2},
            2 * 3 * 512 * 2_048 - 2 * (512 + 2 * 3 * 512 * 1_024),
        ),
    ],
)
def test_parameters_follow_what_a_family_may_have(
    model_type: str, values: dict[str, Any], more: int
) -> None:
    base = {
        "model_type": model_type,
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 1_024,
        "intermediate_size_mlp": 2_048,
        "moe_intermediate_size": None if model_type == "llama4_text" else 128,
        "n_shared_experts": 1,
        "num_local_experts": {"llama4_text": 1, "deepseek_v2": 4}.get(model_type, 0),
        "layer_types": ["full_attention"] * 4,
        "vocab_size": 100,
    }
    without = parse(**base).num_parameters
    assert without is not None
    assert parse(**(base | values)).num_parameters == without + more


@pytest.mark.parametrize(
    ("values", "with_experts"),
    [
        ({}, 4),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"decoder_sparse_step": 2}, 2),
        ({"first_k_dense_replace": 3}, 1),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, 2),
    ],
)
def test_experts_are_counted_in_the_layers_that_have_them(
    values: dict[str, Any], with_experts: int
) -> None:
    base = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_size": 512,
        "intermediate_size": 1_024,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "vocab_size": 100,
    }
    expert, dense = 16 * 512 + 16 * 3 * 512 * 128, 3 * 512 * 1_024
    outside = parse(**base, mlp_only_layers=[0, 1, 2, 3]).num_parameters
    assert outside is not None
    assert parse(**(base | values)).num_parameters == outside + with_experts * (expert - dense)


def test_unknown_kind_of_layer_is_counted_in_full_and_said() -> None:
    spec = llama(layer_types=["full_attention", "spectral"] * 2)
    assert kinds(spec) == "ffff"
    assert any("'spectral'" in note for note in spec.notes)


def test_list_of_layers_counts_them_where_the_file_does_not() -> None:
    spec = parse(model_type="nemotron_h", layers_block_type=["mamba", "moe", "attention", "mlp"])
    assert kinds(spec) == "rnfn"


def test_heads_can_be_a_list_with_an_entry_for_every_layer() -> None:
    spec = llama(num_key_value_heads=[1, 2, 4, 8])
    assert [layer.num_kv_heads for layer in spec.layers] == [1, 2, 4, 8]
    assert spec.num_parameters is None


def test_single_layers_can_be_overridden() -> None:
    spec = llama(per_layer_config={"01": {"head_dim": 96, "num_key_value_heads": 2}})
    assert [(layer.num_kv_heads, layer.key_width) for layer in spec.layers[:2]] == [
        (8, 64),
        (2, 96),
    ]


def test_pruned_models_may_lack_attention_in_a_layer() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
    ]
    spec = parse(
        model_type="nemotron-nas", block_configs=blocks, hidden_size=512, num_attention_heads=8
    )
    assert [(layer.kind, layer.num_kv_heads) for layer in spec.layers] == [("full", 2), ("none", 0)]


def test_one_head_is_kept_where_all_queries_share_it() -> None:
    assert {layer.num_kv_heads for layer in read("falcon-7b").layers} == {1}
    assert {layer.num_kv_heads for layer in read("falcon-40b").layers} == {8}
    assert {layer.num_kv_heads for layer in read("starcoder").layers} == {1}


def test_values_may_be_narrower_than_keys_and_windows_have_more_heads() -> None:
    layers = parse(
        model_type="mimo_v2_flash", num_hidden_layers=2, num_attention_heads=64, hidden_size=4096
    ).layers
    assert [(layer.num_kv_heads, layer.key_width, layer.value_width) for layer in layers] == [
        (4, 192, 128),
        (8, 192, 128),
    ]


def test_state_and_keys_can_be_in_one_layer() -> None:
    layer = read("Falcon-H1-7B-Instruct").layers[0]
    assert (layer.kind, layer.num_kv_heads) == ("full", 2)
    assert layer.state_elements == 3_072 * 256 + (3_072 + 2 * 256) * 4


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_language_model_within_another_model_is_found(key: str) -> None:
    inner = json.loads((CONFIGS / "Llama-3.1-8B" / "config.json").read_text())
    spec = parse(model_type="some_vision_model", **{key: inner})
    assert spec.bytes_per_token(BF16) == 131_072
    assert spec.model_type == "some_vision_model"
    assert any("language model alone" in note for note in spec.notes)


def test_part_without_a_type_of_its_own_is_read_as_the_part_of_the_whole() -> None:
    spec = parse(model_type="gemma3", text_config={"num_hidden_layers": 6})
    assert kinds(spec) == "sssssf"
    assert any("language model alone" in note for note in spec.notes)


def test_language_model_two_levels_down_is_found() -> None:
    inner = json.loads((CONFIGS / "Qwen3-4B" / "config.json").read_text())
    spec = parse(model_type="omni", thinker_config={"text_config": inner})
    assert spec.bytes_per_token(BF16) == 147_456


def test_language_model_too_far_down_is_not_looked_for() -> None:
    values: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1}
    for _ in range(5):
        values = {"text_config": values}
    with pytest.raises(UnsupportedModel):
        parse(**values)


def test_old_names_of_keys_are_read() -> None:
    spec = parse(
        model_type="chatglm",
        num_layers=28,
        hidden_size=4096,
        num_attention_heads=32,
        kv_channels=128,
        multi_query_attention=True,
        multi_query_group_num=2,
        padded_vocab_size=65024,
        seq_length=32768,
    )
    assert spec.bytes_per_token(BF16) == 28_672
    assert spec.max_position_embeddings == 32_768
    assert any("'chatglm'" in note for note in spec.notes)


def test_heads_within_an_attention_configuration_are_read() -> None:
    spec = parse(
        model_type="dbrx",
        n_layers=40,
        n_heads=48,
        d_model=6144,
        max_seq_len=32768,
        attn_config={"kv_n_heads": 8},
    )
    assert spec.bytes_per_token(BF16) == 163_840


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({}, None),
        ({"torch_dtype": None}, None),
    ],
)
def test_type_of_the_checkpoint_is_what_it_says(values: dict[str, Any], dtype: str | None) -> None:
    assert llama(**values).dtype == dtype


def test_quantized_checkpoints_are_told_apart() -> None:
    assert read("gpt-oss-20b").is_quantized
    assert not read("Qwen3-8B").is_quantized


def test_tied_embeddings_are_counted_once() -> None:
    assert (
        llama(tie_word_embeddings=False).num_parameters - 100 * 512  # type: ignore[operator]
        == llama(tie_word_embeddings=True).num_parameters
    )


def test_unknown_model_type_is_read_by_the_usual_keys_and_said() -> None:
    spec = llama(model_type="brand_new")
    assert spec.bytes_per_token(BF16) == 4 * 8 * 2 * 64 * BF16
    assert spec.num_parameters is None
    assert any("'brand_new'" in note for note in spec.notes)
    assert any("not counted" in note for note in spec.notes)


# --- laws


@given(
    name=st.sampled_from([model.name for model in MODELS]),
    num_tokens=st.integers(1, 300_000),
    kv_dtype_bytes=st.sampled_from([1, 2, 4]),
)
def test_cache_lies_between_the_full_layers_and_all_layers(
    name: str, num_tokens: int, kv_dtype_bytes: int
) -> None:
    spec = read(name)
    fixed = spec.state_bytes(kv_dtype_bytes)
    num_bytes = spec.cache_bytes(num_tokens, kv_dtype_bytes)
    assert num_bytes >= fixed + num_tokens * spec.full_bytes_per_token(kv_dtype_bytes)
    assert num_bytes <= fixed + num_tokens * spec.bytes_per_token(kv_dtype_bytes)
    assert num_bytes <= spec.cache_bytes(num_tokens + 1, kv_dtype_bytes)


# --- what is refused


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 12},
        {"model_type": "t5", "num_layers": 6, "d_model": 512},
        {"model_type": "new", "is_encoder_decoder": True},
        {"model_type": "clip", "text_config": {"num_hidden_layers": 12}},
        {"model_type": "new", "architectures": ["NewForMaskedLM"]},
    ],
)
def test_models_that_do_not_decode_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="no decoder-only language model") as caught:
        parse(**values)
    assert caught.value.model == "/m/config.json"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model_type": "new"},
        {"model_type": "new", "num_hidden_layers": 2},
        {"model_type": "new", "num_hidden_layers": 2, "num_attention_heads": 2},
        {"model_type": "new", "num_hidden_layers": 2, "hidden_size": 8},
        {"num_hidden_layers": 2, "hidden_size": 9, "num_attention_heads": 2},
        {"model_type": "zamba2", "num_hidden_layers": 54, "hidden_size": 2560},
    ],
)
def test_models_without_layers_heads_or_widths_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"/m/config\.json: config\.json"):
        parse(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": "4"},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2**31},
        {"num_hidden_layers": 100_000},
        {"num_hidden_layers": 4.0},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": [1, 2]},
        {"num_key_value_heads": [1, 2, 3, "4"]},
        {"head_dim": {}},
        {"layer_types": ["full_attention"]},
        {"layer_types": []},
        {"layer_types": "full_attention"},
        {"layer_types": [1, 2, 3, 4]},
        {"model_type": 3},
        {"architectures": "LlamaForCausalLM"},
        {"torch_dtype": 2},
        {"sliding_window": -1},
        {"sliding_window": "wide"},
        {"num_kv_shared_layers": 4},
        {"num_kv_shared_layers": 5},
        {"attn_type_list": [-1, 0, 0, 0]},
        {"hybrid_override_pattern": ""},
        {"hybrid_override_pattern": "M" * 300},
        {"per_layer_config": []},
        {"linear_attn_config": 1},
        {"block_configs": [1]},
        {"block_configs": [{}] * 4_097},
        {
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            "sliding_window": 8,
        },
        {"tie_word_embeddings": "yes"},
        {"vocab_size": -1},
    ],
)
def test_values_that_are_not_what_they_must_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CorruptArtifact, match=r"/m/config\.json: "):
        llama(**values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        b"\xff\xfe",
        '{"a": 1, "a": 2}',
        '{"text_config": ' * 40 + "{}" + "}" * 40,
        " " * (4 * MIB + 1),
    ],
)
def test_text_that_is_no_configuration_is_refused(text: str | bytes) -> None:
    with pytest.raises(CorruptArtifact, match=r"/m/config\.json: "):
        parse_model_config(text, path="/m/config.json")


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "model_type",
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "layer_types",
                "sliding_window",
                "kv_lora_rank",
                "text_config",
                "linear_attn_config",
                "num_kv_shared_layers",
                "attention_chunk_size",
                "block_configs",
                "mamba_d_state",
                "vocab_size",
                "intermediate_size",
                "moe_layer_freq",
                "num_experts",
                "block_ffn_dim_multiplier",
                "cross_attention_layers",
            ]
        ),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-2, 5),
            st.sampled_from(
                [
                    "llama",
                    "gemma3",
                    "gemma4",
                    "lfm2",
                    "mllama",
                    "qwen3_next",
                    "mamba2",
                    "falcon",
                    "x",
                ]
            ),
            st.lists(st.sampled_from(["full_attention", "sliding_attention", 3]), max_size=3),
            st.dictionaries(st.sampled_from(["model_type", "head_dim"]), st.integers(0, 3)),
        ),
    )
)
def test_whatever_a_file_says_it_is_read_or_refused(values: dict[str, Any]) -> None:
    try:
        spec = parse(**values)
    except (CorruptArtifact, UnsupportedModel):
        return
    assert spec.cache_bytes(10, BF16) >= 0
