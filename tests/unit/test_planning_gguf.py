"""The header of a GGUF file is read without its package, and wrong ones are refused at once."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
from gguf_bytes import (
    BOOL,
    F16,
    F32,
    INT32,
    LLAMA,
    Q8_0,
    STRING,
    Typed,
    gguf,
    keys_bytes,
    start,
    tensor_bytes,
    text,
)
from hypothesis import given
from hypothesis import strategies as st

from reblock.errors import CorruptArtifact, ReblockError, UnsupportedModel
from reblock.model_spec import ModelSpec, WeightBytes, parse_model_config
from reblock.planning.gguf_file import GGUFModel, read_gguf

if TYPE_CHECKING:
    from pathlib import Path


def read(tmp_path: Path, data: bytes) -> GGUFModel:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(str(path))


def config(tmp_path: Path, architecture: str, *tensors: str, **keys: object) -> dict[str, object]:
    """Return the configuration of a model with these keys of its architecture."""
    named: dict[str, object] = {"general.architecture": architecture}
    named |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    infos = tuple((name, [1], F32, 32 * index) for index, name in enumerate(tensors))
    return read(tmp_path, gguf(named, infos, num_data_bytes=32 * len(tensors))).config


def spec(values: dict[str, object]) -> ModelSpec:
    return parse_model_config(json.dumps(values), path="model.gguf")


# --- what is read


def test_keys_become_those_of_a_model_config(tmp_path: Path) -> None:
    found = read(tmp_path, gguf(LLAMA)).config
    assert {key: value for key, value in found.items() if value is not None} == {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 3,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_qk_norm": False,
    }


def test_weights_are_the_tensors_without_the_space_between_them(tmp_path: Path) -> None:
    tensors = (
        ("token_embd.weight", [64, 3], F16, 0),
        ("output.weight", [64, 3], Q8_0, 384),
        ("output_norm.weight", [1], F32, 608),
    )
    model = read(tmp_path, gguf(LLAMA, tensors, num_data_bytes=612))
    expected = WeightBytes(
        num_bytes=64 * 3 * 2 + 64 * 3 // 32 * 34 + 4, num_elements=2 * 64 * 3 + 1, source="gguf"
    )
    assert model.weights == expected
    assert model.config["tie_word_embeddings"] is False


def test_version_2_is_read_alike(tmp_path: Path) -> None:
    assert read(tmp_path, gguf(LLAMA, version=2)) == read(tmp_path, gguf(LLAMA))


def test_stated_vocabulary_comes_before_the_number_of_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, gguf({**LLAMA, "llama.vocab_size": 7})).config["vocab_size"] == 7


def test_signed_numbers_and_long_texts_are_read(tmp_path: Path) -> None:
    keys = {
        **LLAMA,
        "llama.block_count": Typed(INT32, 5),
        "tokenizer.chat_template": "x" * 5_000,
        "tokenizer.ggml.token_type": [1] * 5_000,
    }
    assert read(tmp_path, gguf(keys)).config["num_hidden_layers"] == 5


def test_space_in_front_of_the_data_is_as_the_file_says(tmp_path: Path) -> None:
    keys = {**LLAMA, "general.alignment": 4096}
    data = gguf(keys, (("a", [1], F32, 0),), num_data_bytes=4)
    assert len(data) == 4096 + 4
    assert read(tmp_path, data).weights.num_bytes == 4
    with pytest.raises(CorruptArtifact, match="its tensors end at 4,100: it is cut off"):
        read(tmp_path, data[:-1])


def test_every_kv_head_is_counted_where_the_file_does_not_say_them(tmp_path: Path) -> None:
    keys = {key: value for key, value in LLAMA.items() if not key.endswith("head_count_kv")}
    assert read(tmp_path, gguf(keys)).config["num_key_value_heads"] == 4


def test_widths_of_keys_and_values_may_differ(tmp_path: Path) -> None:
    keys = {**LLAMA, "llama.attention.key_length": 24, "llama.attention.value_length": 8}
    found = read(tmp_path, gguf(keys)).config
    assert (found["head_dim"], found["v_head_dim"]) == (24, 8)
    assert spec(found).bytes_per_token(2) == 2 * 2 * (24 + 8) * 2


def test_layers_with_heads_of_their_own_are_listed(tmp_path: Path) -> None:
    found = read(tmp_path, gguf({**LLAMA, "llama.attention.head_count_kv": [1, 4]})).config
    assert found["num_key_value_heads"] == [1, 4]
    assert spec(found).bytes_per_token(2) == (1 + 4) * (16 + 16) * 2


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("command-r", "cohere"),
        ("gemma3", "gemma3_text"),
        ("gpt-oss", "gpt_oss"),
        ("phi3", "phi3"),
        ("qwen2moe", "qwen2_moe"),
        ("qwen3", "qwen3"),
        ("something-new", "something-new"),
    ],
)
def test_model_type_is_that_of_the_architecture(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    found = config(tmp_path, architecture, block_count=2, attention__head_count=4)
    assert (found["model_type"], found["num_hidden_layers"]) == (model_type, 2)


def test_llama_with_experts_is_mixtral(tmp_path: Path) -> None:
    found = config(tmp_path, "llama", block_count=2, expert_count=8)
    assert (found["model_type"], found["num_local_experts"]) == ("mixtral", 8)


def test_architecture_that_is_not_known_is_read_by_the_usual_keys(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "something-new",
        block_count=3,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=1,
    )
    assert spec(found).bytes_per_token(2) == 3 * (16 + 16) * 2
    assert any("something-new" in note for note in spec(found).notes)


def test_window_of_0_is_no_window(tmp_path: Path) -> None:
    found = config(tmp_path, "phi3", block_count=2, attention__sliding_window=0)
    assert found["sliding_window"] is None


@pytest.mark.parametrize(
    ("architecture", "window"), [("exaone4", None), ("gemma3", None), ("gemma2", 4096)]
)
def test_window_that_the_file_does_not_say_is_none_but_for_gemma_2(
    tmp_path: Path, architecture: str, window: int | None
) -> None:
    found = config(
        tmp_path,
        architecture,
        block_count=2,
        context_length=8192,
        embedding_length=64,
        vocab_size=96,
        attention__head_count=4,
    )
    assert [layer.window for layer in spec(found).layers] == [window, None]
    assert spec(found).notes == ()


def test_no_default_of_the_model_type_steps_in(tmp_path: Path) -> None:
    # In a config.json of these a missing key would mean 8 experts and a width of 128.
    found = config(tmp_path, "granitehybrid", block_count=2, attention__head_count=4)
    assert found["num_local_experts"] is None
    found = config(tmp_path, "qwen3", block_count=2, embedding_length=64, attention__head_count=4)
    assert spec(found).layers[0].key_width == 16


def test_list_of_windows_says_the_kind_of_every_layer(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "olmo2",
        block_count=3,
        embedding_length=64,
        context_length=4096,
        attention__head_count=4,
        attention__sliding_window=512,
        attention__sliding_window_pattern=[True, True, False],
    )
    assert [layer.window for layer in spec(found).layers] == [512, 512, None]


def test_period_of_windows_says_which_layer_sees_everything(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "gemma3",
        block_count=4,
        embedding_length=64,
        context_length=4096,
        attention__head_count=4,
        attention__sliding_window=512,
        attention__sliding_window_pattern=4,
    )
    assert [layer.window for layer in spec(found).layers] == [512, 512, 512, None]


@pytest.mark.parametrize(
    "widths",
    [
        # As converted today, where the latent is what is kept, and as converted at first.
        {
            "attention__head_count_kv": 1,
            "attention__key_length": 512 + 64,
            "attention__value_length": 512,
            "attention__key_length_mla": 192,
            "attention__value_length_mla": 128,
        },
        {
            "attention__head_count_kv": 16,
            "attention__key_length": 192,
            "attention__value_length": 128,
        },
    ],
)
def test_latent_attention_keeps_the_latent(tmp_path: Path, widths: dict[str, object]) -> None:
    found = config(
        tmp_path,
        "deepseek2",
        block_count=2,
        embedding_length=2048,
        attention__head_count=16,
        attention__kv_lora_rank=512,
        rope__dimension_count=64,
        expert_count=64,
        leading_dense_block_count=1,
        **widths,
    )
    assert found["model_type"] == "deepseek_v2"
    assert found["q_lora_rank"] is None
    assert (found["qk_nope_head_dim"], found["qk_rope_head_dim"]) == (128, 64)
    assert found["v_head_dim"] == 128
    assert "head_dim" not in found
    assert spec(found).bytes_per_token(2) == 2 * (512 + 64) * 2


def test_router_with_a_correction_is_of_the_third_generation(tmp_path: Path) -> None:
    keys = {"block_count": 2, "expert_count": 64}
    assert config(tmp_path, "deepseek2", "blk.1.exp_probs_b.bias", **keys)["model_type"] == (
        "deepseek_v3"
    )


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    found = config(tmp_path, "glm4moe", block_count=47, nextn_predict_layers=1)
    assert found["num_hidden_layers"] == 46


@pytest.mark.parametrize(("kv_heads", "heads_of_cache"), [(1, 1), (8, 8), (64, 64)])
def test_falcon_shares_keys_as_its_file_says(
    tmp_path: Path, kv_heads: int, heads_of_cache: int
) -> None:
    found = config(
        tmp_path,
        "falcon",
        block_count=1,
        embedding_length=4096,
        attention__head_count=64,
        attention__head_count_kv=kv_heads,
    )
    assert spec(found).layers[0].num_kv_heads == heads_of_cache


def test_mamba_has_a_state_and_no_heads(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "mamba",
        block_count=2,
        embedding_length=768,
        feed_forward_length=0,
        attention__head_count=0,
        ssm__conv_kernel=4,
        ssm__inner_size=1536,
        ssm__state_size=16,
        ssm__time_step_rank=48,
    )
    assert "num_attention_heads" not in found
    assert spec(found).layers[0].state_elements == 1536 * (16 + 4)
    assert spec(found).bytes_per_token(2) == 0


def test_layers_without_kv_heads_are_recurrent(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "jamba",
        block_count=3,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=[0, 2, 0],
        ssm__conv_kernel=4,
        ssm__inner_size=128,
        ssm__state_size=16,
        ssm__time_step_rank=4,
    )
    assert found["num_key_value_heads"] == 2
    assert [layer.kind for layer in spec(found).layers] == ["recurrent", "full", "recurrent"]


def test_layers_with_neither_are_a_feed_forward_part(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "nemotron_h",
        block_count=3,
        embedding_length=64,
        feed_forward_length=[0, 256, 0],
        attention__head_count=4,
        attention__head_count_kv=[0, 0, 2],
        ssm__conv_kernel=4,
        ssm__inner_size=128,
        ssm__state_size=16,
        ssm__time_step_rank=4,
        ssm__group_count=2,
    )
    assert [layer.kind for layer in spec(found).layers] == ["recurrent", "none", "full"]
    assert found["intermediate_size"] == 256


def test_delta_nets_keep_a_matrix_for_every_value_head(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "qwen3next",
        block_count=4,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=2,
        full_attention_interval=4,
        ssm__conv_kernel=4,
        ssm__state_size=128,
        ssm__group_count=16,
        ssm__time_step_rank=32,
        ssm__inner_size=32 * 128,
    )
    layers = spec(found).layers
    assert [layer.kind for layer in layers] == ["recurrent"] * 3 + ["full"]
    assert layers[0].state_elements == 32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 4


def test_kimi_layers_without_kv_heads_have_a_delta_rule(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "kimi-linear",
        block_count=2,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=[0, 4],
        attention__kv_lora_rank=32,
        attention__key_length_mla=24,
        rope__dimension_count=8,
        kda__head_dim=16,
        ssm__conv_kernel=4,
    )
    recurrent, latent = spec(found).layers
    assert recurrent.state_elements == 4 * 16 * 16 + 3 * 4 * 16 * 4
    assert (latent.kind, latent.key_width) == ("latent", 32 + 8)


def test_gemma_4_has_wider_heads_where_it_sees_everything(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "gemma4",
        block_count=2,
        context_length=4096,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=[2, 1],
        attention__key_length=512,
        attention__value_length=512,
        attention__key_length_swa=256,
        attention__value_length_swa=256,
        attention__sliding_window=1024,
        attention__sliding_window_pattern=[True, False],
    )
    layers = spec(found).layers
    assert [layer.elements_per_token for layer in layers] == [2 * (256 + 256), 1 * (512 + 512)]


def test_widths_of_heads_in_a_window_may_differ(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        "mimo2",
        block_count=2,
        context_length=4096,
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=[8, 4],
        attention__key_length=192,
        attention__value_length=128,
        attention__key_length_swa=96,
        attention__value_length_swa=64,
        attention__sliding_window=128,
        attention__sliding_window_pattern=[True, False],
    )
    layers = spec(found).layers
    assert [layer.elements_per_token for layer in layers] == [8 * (96 + 64), 4 * (192 + 128)]


def test_experts_of_llama_4_have_the_width_that_others_call_that_of_all(tmp_path: Path) -> None:
    found = config(tmp_path, "llama4", feed_forward_length=16_384, expert_feed_forward_length=8_192)
    assert (found["intermediate_size"], found["intermediate_size_mlp"]) == (8_192, 16_384)


def test_granite_has_a_name_of_its_own_for_what_experts_share(tmp_path: Path) -> None:
    found = config(tmp_path, "granitehybrid", expert_shared_feed_forward_length=1_536)
    assert found["shared_intermediate_size"] == 1_536


@pytest.mark.parametrize(
    ("architecture", "tensor", "key"),
    [
        ("llama", "blk.0.attn_q.bias", "attention_bias"),
        ("starcoder2", "blk.0.attn_q.bias", "use_bias"),
        ("stablelm", "blk.0.attn_q.bias", "use_qkv_bias"),
        ("qwen2moe", "blk.0.attn_q.bias", "qkv_bias"),
        ("llama", "blk.0.ffn_up.bias", "mlp_bias"),
        ("command-r", "blk.0.attn_q_norm.weight", "use_qk_norm"),
    ],
)
def test_biases_are_seen_in_the_tensors(
    tmp_path: Path, architecture: str, tensor: str, key: str
) -> None:
    assert config(tmp_path, architecture, tensor)[key] is True
    assert config(tmp_path, architecture, "blk.0.attn_q.weight")[key] is False


# --- what is refused


def test_other_files_are_refused_by_their_first_bytes(tmp_path: Path) -> None:
    for data in (b"", b"GG", b"PK\3\4" + bytes(100)):
        with pytest.raises(CorruptArtifact, match="is no GGUF file"):
            read(tmp_path, data)


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(UnsupportedModel, match=r"of the GGUF format|big endian"):
        read(tmp_path, gguf(LLAMA, version=version))


def test_big_endian_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="big endian"):
        read(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + bytes(100))


def test_part_of_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"one of 3 parts .* llama-gguf-split --merge"):
        read(tmp_path, gguf({**LLAMA, "split.count": 3}))
    # What was split and merged again says so with a 0 or 1.
    for count in (0, 1):
        read(tmp_path, gguf({**LLAMA, "split.count": count}))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"general.type": "adapter"}, "is an adapter; give the model that it is for"),
        (
            {"general.type": "adapter", "general.base_model.0.name": "Smol"},
            "is an adapter; give the model, Smol, that it is for",
        ),
        ({"general.type": "mmproj"}, "no language model"),
        ({"general.architecture": "clip"}, "no language model"),
        ({"llama.attention.causal": False}, "looks ahead"),
    ],
)
def test_what_is_no_language_model_is_refused(
    tmp_path: Path, keys: dict[str, object], match: str
) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        read(tmp_path, gguf({**LLAMA, **keys}))


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert", "t5", "t5encoder"])
def test_encoders_are_refused_by_their_type(tmp_path: Path, architecture: str) -> None:
    found = config(tmp_path, architecture, block_count=2, attention__head_count=4)
    with pytest.raises(UnsupportedModel, match="no decoder-only language model"):
        spec(found)


def info(*tensor: object, num_bytes: int = 64) -> bytes:
    return gguf(LLAMA, (tensor,), num_data_bytes=num_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (info("a", [32], 31, 0), "of ggml type 31, which this version of reblock does not know"),
        (info("a", [33], Q8_0, 0), "rows of 33 elements in 'a', but Q8_0 has blocks of 32"),
        (info("a", [1] * 9, F32, 0), "of 9 dimensions"),
        (info("a", [17], F32, 0), "it is cut off"),
        (info("a", [16], F32, 32), "it is cut off"),
        (info("a", [2**63, 2**63], F32, 0), "it is cut off"),
        (info("a\n", [16], F32, 0), "a name that cannot be printed"),
        (
            gguf(LLAMA, (("a", [8], F32, 0), ("a", [8], F32, 32)), num_data_bytes=64),
            "the tensor 'a' twice",
        ),
        (gguf({**LLAMA, "general.alignment": 0}), "alignment=0, which is no power of two"),
        (gguf({**LLAMA, "general.alignment": 24}), "alignment=24, which is no power of two"),
        (gguf({}), "does not say its general.architecture"),
        (gguf({"general.architecture": ""}), "does not say its general.architecture"),
        (gguf({**LLAMA, "llama.block_count": -1 + 2**32}), "from 0 to 2,147,483,647"),
        (gguf({**LLAMA, "llama.block_count": Typed(INT32, -1)}), "not -1"),
        (gguf({**LLAMA, "llama.block_count": 1.5}), "not 1.5"),
        (gguf({**LLAMA, "llama.block_count": "2"}), "not '2'"),
        (gguf({**LLAMA, "llama.block_count": True}), "not True"),
        (gguf({**LLAMA, "llama.block_count": 5_000}), "block_count=5,000"),
        (gguf({**LLAMA, "llama.nextn_predict_layers": 2}), "nextn_predict_layers=2"),
        (start(2**40, 0), "states 1,099,511,627,776 tensors"),
        (start(0, 2**40), "1,099,511,627,776 keys"),
        (start(0, 2) + 2 * keys_bytes({"a": 1}), "the key 'a' twice"),
        (start(0, 1) + struct.pack("<Q", 2**63), "has a name of 9,223,372,036,854,775,808 bytes"),
        (start(0, 1) + text(b"\xff"), "a text that is not UTF-8"),
        (start(0, 1) + text("a") + struct.pack("<I", 13), "a value of type 13 under 'a'"),
        (start(0, 1) + text("a") + struct.pack("<IQ", STRING, 2**63), "is cut off"),
        (start(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "a list of type 9 under 'a'"),
        (start(0, 1) + text("a") + struct.pack("<IIQ", 9, BOOL, 2**63), "is cut off"),
        (start(0, 1) + text("a") + struct.pack("<IIQ", 9, STRING, 2**40), "a list of 1,099,511"),
        (start(0, 1) + text("a") + struct.pack("<IIQQ", 9, STRING, 9, 2**63), "is cut off"),
        (start(0, 1) + text("a") + struct.pack("<IIQ", 9, STRING, 9), "is cut off"),
        (start(1, 0) + tensor_bytes("a", [1], F32, 0)[:-1], "is cut off within its header"),
    ],
)
def test_file_that_makes_no_sense_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    with pytest.raises(CorruptArtifact, match=match):
        read(tmp_path, data)


def test_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    data = gguf(LLAMA, (("a", [8], F32, 0),), num_data_bytes=32)
    assert read(tmp_path, data).weights.num_bytes == 32
    for length in range(len(data)):
        with pytest.raises(CorruptArtifact):
            read(tmp_path, data[:length])


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=8))
def test_whatever_a_file_says_it_is_read_or_refused(place: int, change: bytes) -> None:
    import tempfile

    data = bytearray(gguf(LLAMA, (("a", [8], F32, 0),), num_data_bytes=32))
    place %= len(data)
    data[place : place + len(change)] = change
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        try:
            found = read_gguf(file.name)
            assert spec(found.config).cache_bytes(10, 2) >= 0
        except ReblockError:
            return


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match="is not a regular file"):
        read_gguf(str(tmp_path))
    with pytest.raises(CorruptArtifact, match="is missing"):
        read_gguf(str(tmp_path / "absent.gguf"))
