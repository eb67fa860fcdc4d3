from __future__ import annotations

import inspect
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rbln_models import warnings_in
from reference_plans import ALL, DATA, QWEN3_CA25, read_config_bytes

from reblock.errors import (
    CorruptArtifact,
    InvalidBlockCount,
    InvalidBudget,
    InvalidOption,
    NotAnArtifact,
    UsageError,
)
from reblock.rbln import (
    FullAttentionKVCacheMeta,
    RBLNDecoderOnlyModelConfig,
    RBLNDecoderOnlyModelForCausalLMConfig,
)

if TYPE_CHECKING:
    from pathlib import Path

Config = RBLNDecoderOnlyModelForCausalLMConfig


# Keywords


def test_defaults_of_a_model_that_generates() -> None:
    config = Config()
    assert config._prepare_for_serialization() == {
        "cls_name": "RBLNDecoderOnlyModelForCausalLMConfig",
        "dtype": "float32",
        "optimum_rbln_version": None,
        "_compile_cfgs": [],
        "batch_size": 1,
        "max_seq_len": None,
        "use_inputs_embeds": False,
        "use_position_ids": False,
        "use_attention_mask": False,
        "quantization": {},
        "lora_config": None,
        "attn_impl": None,
        "kvcache_partition_len": None,
        "kvcache_block_size": None,
        "prefill_chunk_size": 128,
        "kvcache_num_blocks": 0,
        "cache_impl": "static",
        "sliding_window": None,
        "sliding_window_layers": [],
        "phases": ["prefill", "decode"],
        "logits_to_keep": 1,
        "output_hidden_states": False,
        "_requires_batch_sort": None,
        "decoder_batch_sizes": [1],
        "cache_metas": [],
    }
    assert config.memory_budget is None
    assert config.is_auto_num_blocks
    assert config.can_generate
    assert not config.use_multiple_decoder


def test_defaults_of_a_model_that_does_not() -> None:
    config = RBLNDecoderOnlyModelConfig()
    assert (config.phases, config.logits_to_keep) == (["prefill"], 0)
    assert config.decoder_batch_sizes is None
    assert not config.can_generate
    assert not config.use_multiple_decoder


def test_keys_are_written_in_the_order_of_optimum_rbln() -> None:
    assert list(Config()._prepare_for_serialization()) == list(
        json.loads(read_config_bytes(QWEN3_CA25))
    )


def test_keywords_stand_in_the_order_of_optimum_rbln() -> None:
    assert list(inspect.signature(Config).parameters) == [
        "batch_size",
        "max_seq_len",
        "use_inputs_embeds",
        "use_attention_mask",
        "use_position_ids",
        "attn_impl",
        "kvcache_partition_len",
        "kvcache_block_size",
        "quantization",
        "lora_config",
        "prefill_chunk_size",
        "kvcache_num_blocks",
        "memory_budget",
        "decoder_batch_sizes",
        "cache_impl",
        "sliding_window",
        "sliding_window_layers",
        "phases",
        "logits_to_keep",
        "output_hidden_states",
        "cache_metas",
        "_requires_batch_sort",
        "kwargs",
    ]


def test_defaults_are_not_shared_between_configurations() -> None:
    Config().phases.append("image_prefill")
    assert Config().phases == ["prefill", "decode"]


def test_keywords_of_the_runtime_are_kept() -> None:
    config = Config(
        create_runtimes=False,
        optimize_host_memory=True,
        device=[0, 1],
        device_map={"prefill": 0},
        activate_profiler=True,
        timeout=5,
        npu="RBLN-CA25",
        num_devices=4,
    )
    assert (config.create_runtimes, config.optimize_host_memory) == (False, True)
    assert (config.device, config.device_map) == ([0, 1], {"prefill": 0})
    assert (config.activate_profiler, config.timeout) == (True, 5)
    assert (config.npu, config.num_devices, config.tensor_parallel_size) == ("RBLN-CA25", 4, 4)


def test_number_of_devices_has_two_names() -> None:
    assert Config(tensor_parallel_size=4).num_devices == 4
    assert Config(tensor_parallel_size=4, num_devices=4).num_devices == 4
    with pytest.raises(InvalidOption, match="num_devices=2 and tensor_parallel_size=4"):
        Config(tensor_parallel_size=4, num_devices=2)


class FakeDtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", FakeDtype()])
def test_dtype_may_be_text_or_torchs_own(dtype: object) -> None:
    assert Config(dtype=dtype).dtype == "bfloat16"


@pytest.mark.parametrize("budget", [0.8, "80%", 10_737_418_240, "10GB", 1.0, "0.8"])
def test_memory_budget_is_kept_as_it_was_given(budget: Any) -> None:
    kept = Config(memory_budget=budget).memory_budget
    assert kept == budget
    assert type(kept) is type(budget)


@pytest.mark.parametrize("budget", [0, 0.0, -0.5, 1.2, "120%", "10XB", "", True, float("inf")])
def test_memory_budget_that_cannot_be_read_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(InvalidBudget, match="memory_budget"):
        Config(memory_budget=budget)


def test_memory_budget_and_a_count_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"memory_budget=0.8 and kvcache_num_blocks=16 exclude"):
        Config(memory_budget=0.8, kvcache_num_blocks=16)
    # 0 is an open count.
    assert Config(memory_budget=0.8, kvcache_num_blocks=0).is_auto_num_blocks


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"memory_budgt": 0.8}, "no keyword 'memory_budgt'; the nearest it has is 'memory_budget'"),
        ({"tensor_parallel": 4}, "the nearest it has is 'tensor_parallel_size'"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number from 1 up"),
        ({"batch_size": -1}, "batch_size=-1 must be"),
        ({"batch_size": "4"}, "batch_size='4' must be"),
        ({"batch_size": True}, "batch_size=True must be"),
        ({"max_seq_len": 0}, "max_seq_len=0 must be"),
        ({"kvcache_block_size": 1.5}, "kvcache_block_size=1.5 must be"),
        ({"kvcache_partition_len": -8}, "kvcache_partition_len=-8 must be"),
        ({"sliding_window": 0}, "sliding_window=0 must be"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size=0 must be"),
        ({"prefill_chunk_size": -64}, "prefill_chunk_size=-64 must be"),
        ({"prefill_chunk_size": 100}, "prefill_chunk_size=100 must be a multiple of 64"),
        ({"use_position_ids": True}, "use_position_ids=True needs use_attention_mask=True"),
        ({"phases": ["prefill", "encode"]}, "must be a list of some of prefill, image_prefill"),
        ({"phases": "prefill"}, "must be a list of some of prefill, image_prefill, decode"),
        ({"attn_impl": "sdpa"}, "attn_impl='sdpa' is not known; choose eager or flash_attn"),
        ({"cache_impl": "paged"}, "choose static, sliding_window or hybrid"),
        ({"batch_size": 4, "decoder_batch_sizes": [8, 4]}, "has 8, which is above batch_size=4"),
        ({"decoder_batch_sizes": [0]}, "decoder_batch_sizes=0 must be"),
        ({"decoder_batch_sizes": "4"}, "decoder_batch_sizes='4' must be a list"),
        ({"_compile_cfgs": {"prefill": 1}}, "must be a list, with an entry for each program"),
        ({"dtype": 16}, "dtype=16 must be text such as 'bfloat16'"),
    ],
)
def test_keyword_that_makes_no_sense_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Config(**keywords)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("count", [-1, 2.5, "many", True])
def test_block_count_must_be_one(count: Any) -> None:
    with pytest.raises(InvalidBlockCount):
        Config(kvcache_num_blocks=count)


def test_more_than_the_last_logits_are_not_implemented() -> None:
    assert Config(logits_to_keep=0).logits_to_keep == 0
    with pytest.raises(NotImplementedError, match="logits_to_keep=2"):
        Config(logits_to_keep=2)


def test_position_ids_go_with_an_attention_mask() -> None:
    config = Config(use_position_ids=True, use_attention_mask=True)
    assert (config.use_position_ids, config.use_attention_mask) == (True, True)


@pytest.mark.parametrize("attn_impl", [None, "eager"])
def test_partition_length_chooses_flash_attention_with_a_warning(
    attn_impl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(kvcache_partition_len=8_192, attn_impl=attn_impl)
    assert config.attn_impl == "flash_attn"
    (warning,) = warnings_in(caplog)
    assert "kvcache_partition_len=8192 is for attn_impl='flash_attn'" in warning
    assert warning.endswith(f"not {attn_impl!r}")


def test_partition_length_of_flash_attention_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = Config(kvcache_partition_len=8_192, attn_impl="flash_attn")
    assert config.attn_impl == "flash_attn"
    assert Config(attn_impl="eager").attn_impl == "eager"
    assert warnings_in(caplog) == []


def test_decoders_are_sorted_and_the_list_given_is_left_alone() -> None:
    sizes = [1, 8, 4]
    config = Config(batch_size=8, decoder_batch_sizes=sizes)
    assert (config.decoder_batch_sizes, sizes) == ([8, 4, 1], [1, 8, 4])
    assert config.use_multiple_decoder


def test_decoder_of_the_full_batch_is_added_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = Config(batch_size=8, decoder_batch_sizes=[1, 4])
    assert config.decoder_batch_sizes == [8, 4, 1]
    (warning,) = warnings_in(caplog)
    assert "does not reach batch_size=8, which is added" in warning


@pytest.mark.parametrize(
    ("cache_impl", "sees_all", "sees_window"),
    [("static", True, False), ("sliding_window", False, True), ("hybrid", True, True)],
)
def test_cache_impl_says_what_layers_see(
    cache_impl: Any, sees_all: bool, sees_window: bool
) -> None:
    config = Config(cache_impl=cache_impl)
    assert (config.use_global_attention, config.use_local_attention) == (sees_all, sees_window)


@pytest.mark.parametrize(
    ("attn_impl", "batch_size", "minimum", "full"),
    [("flash_attn", 8, 9, 40), ("flash_attn", 32, 33, 160), ("flash_attn", 1, 5, 5)],
)
def test_bounds_follow_the_shapes(attn_impl: Any, batch_size: int, minimum: int, full: int) -> None:
    config = Config(
        attn_impl=attn_impl, batch_size=batch_size, max_seq_len=40_960, kvcache_block_size=8_192
    )
    assert (config.num_min_blocks, config.num_full_blocks) == (minimum, full)


def test_bounds_of_eager_attention_are_the_batch() -> None:
    config = Config(batch_size=3, max_seq_len=4_096, kvcache_block_size=4_096)
    assert (config.num_min_blocks, config.num_full_blocks) == (3, 3)


@pytest.mark.parametrize("missing", ["max_seq_len", "kvcache_block_size"])
def test_bounds_need_both_lengths(missing: str) -> None:
    lengths = {"max_seq_len": 64, "kvcache_block_size": 16}
    del lengths[missing]
    with pytest.raises(InvalidOption, match=f"{missing} is not set"):
        Config(**lengths).num_full_blocks  # noqa: B018  looking it up is the test


# The file


@pytest.mark.parametrize("name", ALL)
def test_file_that_is_loaded_and_saved_is_the_same_to_the_byte(name: str, tmp_path: Path) -> None:
    config = Config.load(os.path.join(DATA, name))
    config.save(tmp_path)
    assert (tmp_path / "rbln_config.json").read_bytes() == read_config_bytes(name)
    assert os.listdir(tmp_path) == ["rbln_config.json"]


@pytest.mark.parametrize("name", ALL)
def test_file_written_from_the_keywords_alone_is_the_same_to_the_byte(
    name: str, tmp_path: Path
) -> None:
    Config(**json.loads(read_config_bytes(name))).save(tmp_path / "other.json")
    assert (tmp_path / "other.json").read_bytes() == read_config_bytes(name)


def test_change_of_the_count_changes_one_line(tmp_path: Path) -> None:
    config = Config.from_pretrained(os.path.join(DATA, QWEN3_CA25))
    config.kvcache_num_blocks = 9
    config.save(tmp_path)
    before = read_config_bytes(QWEN3_CA25)
    assert (tmp_path / "rbln_config.json").read_bytes() == before.replace(
        b'"kvcache_num_blocks": 40,', b'"kvcache_num_blocks": 9,'
    )


def test_what_belongs_to_a_process_is_never_saved(tmp_path: Path) -> None:
    config = Config(
        memory_budget=0.8,
        npu="RBLN-CA25",
        tensor_parallel_size=4,
        create_runtimes=True,
        optimize_host_memory=True,
        device=1,
        device_map={"prefill": 1},
        activate_profiler=True,
        timeout=60,
    )
    config.save(tmp_path)
    assert json.loads((tmp_path / "rbln_config.json").read_text()).keys() == (
        json.loads(read_config_bytes(QWEN3_CA25)).keys()
    )


def test_budget_set_on_a_loaded_configuration_is_not_saved(tmp_path: Path) -> None:
    config = Config.load(os.path.join(DATA, QWEN3_CA25))
    config.memory_budget, config.npu = "10GB", "RBLN-CA22"
    config.save(tmp_path)
    assert (tmp_path / "rbln_config.json").read_bytes() == read_config_bytes(QWEN3_CA25)


def test_loaded_configuration_has_the_values_of_the_file() -> None:
    config = Config.load(os.path.join(DATA, QWEN3_CA25, "rbln_config.json"))
    assert config.cls_name == "RBLNQwen3ForCausalLMConfig"
    assert (config.batch_size, config.max_seq_len, config.kvcache_num_blocks) == (8, 40_960, 40)
    assert (config.num_min_blocks, config.num_full_blocks) == (9, 40)
    assert len(config.cache_metas) == 72
    assert isinstance(config.cache_metas[0], FullAttentionKVCacheMeta)
    assert config.compile_cfgs[0]["npu"] == "RBLN-CA25"  # type: ignore[index]
    assert config.npu is None


def write(directory: Path, values: object, ending: str = "") -> Path:
    (directory / "rbln_config.json").write_text(json.dumps(values, indent=2) + ending)
    return directory


def test_keys_of_others_their_order_and_the_final_newline_stay(tmp_path: Path) -> None:
    values = {"new": {"a": [1, 2]}, **json.loads(read_config_bytes(QWEN3_CA25)), "z": None}
    path = write(tmp_path, values, "\n") / "rbln_config.json"
    before = path.read_bytes()
    config = Config.load(path)
    config.save(path)
    assert path.read_bytes() == before
    config.kvcache_num_blocks = 12
    config.save(path)
    assert json.loads(path.read_bytes()) == {**values, "kvcache_num_blocks": 12}
    assert list(json.loads(path.read_bytes())) == list(values)


def test_programs_for_a_cpu_may_have_other_chunks(tmp_path: Path) -> None:
    values = {"kvcache_num_blocks": 4, "batch_size": 1, "prefill_chunk_size": 16}
    config = Config.load(write(tmp_path, values))
    assert config.prefill_chunk_size == 16
    config.save(tmp_path)
    assert json.loads((tmp_path / "rbln_config.json").read_text()) == values


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"cls_name": "RBLNBertModelConfig"}, "no configuration of a decoder-only model"),
        ({"kvcache_num_blocks": 4, "batch_size": "4"}, "batch_size='4' must be"),
        ({"kvcache_num_blocks": -4}, "kvcache_num_blocks=-4"),
        ({"kvcache_num_blocks": 4, "prefill_chunk_size": 0}, "prefill_chunk_size=0 must be"),
        ({"kvcache_num_blocks": 4, "cache_metas": [{"layer_type": "x"}]}, "layer_type 'x'"),
        ([], "is no JSON object"),
    ],
)
def test_damaged_file_is_named_with_what_is_wrong(
    values: object, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptArtifact, match=r"rbln_config\.json: ") as caught:
        Config.load(write(tmp_path, values))
    assert fault in str(caught.value)


def test_directory_without_a_configuration_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(NotAnArtifact, match=r"holds no rbln_config\.json"):
        Config.load(tmp_path)


def test_save_replaces_the_file_and_not_what_it_is_linked_to(tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("shared")
    os.link(tmp_path / "shared", tmp_path / "rbln_config.json")
    Config().save(tmp_path)
    assert (tmp_path / "shared").read_text() == "shared"


def test_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": 1}) / "rbln_config.json"
    before = path.read_bytes()
    config = Config(lora_config=object())
    with pytest.raises(TypeError):
        config.save(tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rbln_config.json"]


def test_values_that_can_say_themselves_what_is_saved_are_asked() -> None:
    program = SimpleNamespace(asdict=lambda: {"compiled_model_name": "prefill"})
    lora = SimpleNamespace(_prepare_for_serialization=lambda: {"max_lora_rank": 8})
    config = Config(_compile_cfgs=[program], lora_config=lora)
    values = config._prepare_for_serialization()
    assert values["_compile_cfgs"] == [{"compiled_model_name": "prefill"}]
    assert values["lora_config"] == {"max_lora_rank": 8}


def test_usage_errors_are_value_errors() -> None:
    assert issubclass(UsageError, ValueError)
