"""What `from_pretrained` makes of its arguments; none of this needs torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

from artifacts import make_artifact
from reblock.backends import loading
from reblock.config import parse_config
from reblock.errors import (
    DestinationExists,
    HostMismatch,
    InvalidBlockCount,
    InvalidOption,
    MissingDependency,
    NotAnArtifact,
    UsageError,
)
from reblock.options import CompileOptions
from reblock.rbln import RBLNAutoModelForCausalLM, RBLNDecoderOnlyModelForCausalLMConfig, modeling
from reblock.rbln.arguments import Arguments, check_compiled, read_arguments
from reblock.rbln.base_configuration import RBLNModelConfig
from reblock.rbln.configuration import RBLNDecoderOnlyModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def read(rbln_config: object = None, **keywords: object) -> Arguments:
    return read_arguments(rbln_config, keywords)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _package: None)


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "artifact") / "rbln_config.json"


def test_a_dictionary_and_arguments_with_the_prefix_are_one_and_the_argument_is_stronger() -> None:
    options = read(
        {"batch_size": 2, "max_seq_len": 512, "memory_budget": "50%"},
        rbln_batch_size=4,
        rbln_decoder_batch_sizes=[4, 1],
    ).compile_options
    assert (options.batch_size, options.max_seq_len) == (4, 512)
    assert options.decoder_batch_sizes == (4, 1)
    assert options.memory_budget is not None
    assert options.memory_budget.amount == Fraction(1, 2)


def test_a_configuration_object_asks_for_the_same_as_the_dictionary_of_its_keywords() -> None:
    keys: dict[str, Any] = {
        "batch_size": 4,
        "max_seq_len": 1024,
        "kvcache_partition_len": 128,
        "attn_impl": "flash_attn",
        "kvcache_num_blocks": 20,
        "decoder_batch_sizes": [4, 2],
        "prefill_chunk_size": 64,
    }
    config = RBLNDecoderOnlyModelForCausalLMConfig(**keys)
    assert read(config).compile_options == read(keys).compile_options


def test_a_configuration_object_with_nothing_asked_is_the_default() -> None:
    config = RBLNDecoderOnlyModelForCausalLMConfig()
    assert read(config).compile_options == CompileOptions()
    bounded = RBLNDecoderOnlyModelForCausalLMConfig(kvcache_num_blocks=20, phases=["prefill"])
    again = read(bounded, rbln_kvcache_num_blocks=0, rbln_phases=None)
    assert again.compile_options == CompileOptions()
    # A batch size of its own is not held back by the decoders that the object chose.
    assert read(config, rbln_batch_size=4).compile_options == CompileOptions(batch_size=4)


def test_a_configuration_object_for_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"'logits_to_keep' is not supported|'phases' is not"):
        _ = read(RBLNDecoderOnlyModelConfig()).compile_options


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("_compile_cfgs", [], [{}]),
        ("activate_profiler", False, True),
        ("cache_impl", "static", "hybrid"),
        ("cache_metas", None, [{}]),
        ("cls_name", "RBLNLlamaForCausalLMConfig", "RBLNT5EncoderModelConfig"),
        ("device", None, 0),
        ("device_map", {}, {"prefill": 0}),
        ("logits_to_keep", 1, 0),
        ("lora_config", None, {"adapters": []}),
        ("num_devices", 1, 4),
        ("optimize_host_memory", True, False),
        ("optimum_rbln_version", None, "0.12.0"),
        ("output_hidden_states", False, True),
        ("phases", ("prefill", "decode"), ["prefill"]),
        ("quantization", {}, {"format": "rbln"}),
        ("sliding_window", None, 64),
        ("sliding_window_layers", [], [1]),
        ("tensor_parallel_size", 1, 4),
        ("timeout", None, 60),
        ("use_attention_mask", False, True),
        ("use_inputs_embeds", False, True),
        ("use_position_ids", False, True),
    ],
)
def test_a_key_of_rbln_devices_is_accepted_where_it_changes_nothing_and_else_refused(
    key: str, usual: object, other: object
) -> None:
    assert read({key: usual, "batch_size": 2}).compile_options == CompileOptions(batch_size=2)
    assert read(**{f"rbln_{key}": usual}).compile_options == CompileOptions()
    assert read({key: None}).compile_options == CompileOptions()
    with pytest.raises(InvalidOption, match=f"option '{key}' is not supported here: .") as caught:
        read({key: other})
    assert caught.value.option == key


def test_every_keyword_of_the_configuration_objects_is_honoured_or_refused_with_a_reason() -> None:
    known = {field.name for field in fields(CompileOptions)}
    names = {
        name
        for owner in (RBLNModelConfig, RBLNDecoderOnlyModelForCausalLMConfig)
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and not name.startswith("_requires")
    }
    assert {"batch_size", "device", "memory_budget", "tensor_parallel_size"} < names
    for name in names - known:
        with pytest.raises(InvalidOption, match="is not supported here: "):
            CompileOptions.from_keys({name: "1"})


def test_a_count_of_zero_asks_for_an_estimate_as_in_optimum_rbln() -> None:
    assert read({"kvcache_num_blocks": 0}).compile_options.kvcache_num_blocks is None
    with pytest.raises(InvalidBlockCount):
        _ = read({"kvcache_num_blocks": -1}).compile_options


def test_a_device_that_is_asked_for_in_an_object_is_refused_also_where_nothing_is_compiled() -> (
    None
):
    with pytest.raises(InvalidOption, match="option 'device' is not supported here"):
        read(RBLNDecoderOnlyModelForCausalLMConfig(device=1))


def test_an_npu_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidOption, match="programs are compiled for 'cpu'"):
        _ = read(rbln_npu="RBLN-CA25").compile_options


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="nearest known one is 'batch_size'"):
        read({"batch_sise": 4})


def test_rbln_config_that_is_neither_dictionary_nor_object_is_refused() -> None:
    with pytest.raises(UsageError, match="rbln_config is 'str'; give a dictionary"):
        read("RBLN-CA25")


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_that_of_transformers_and_auto_leaves_it_to_the_model(name: str) -> None:
    assert read(**{name: "bfloat16"}).compile_options.dtype == "bfloat16"
    assert read({"dtype": "float32"}, **{name: "float32"}).compile_options.dtype == "float32"
    assert read(**{name: "auto"}).compile_options.dtype is None
    smaller = read({"weight_dtype": "int8"}, **{name: "bfloat16"}).compile_options
    assert (smaller.dtype, smaller.weight_dtype) == ("bfloat16", "int8")
    with pytest.raises(InvalidOption, match=f"{name}='float32' contradicts dtype='bfloat16'"):
        read({"dtype": "bfloat16"}, **{name: "float32"})
    with pytest.raises(InvalidOption, match="dtype='float16' is not supported"):
        _ = read(**{name: "float16"}).compile_options


def test_arguments_that_say_where_a_model_is_are_kept_and_defaults_left_out() -> None:
    arguments = read(
        revision="v2", token=None, use_auth_token=True, local_files_only=False, subfolder=""
    )
    assert arguments.fetching == {"revision": "v2", "token": True}


@pytest.mark.parametrize(
    ("name", "harmless", "other"),
    [
        ("trust_remote_code", False, True),
        ("device_map", "auto", "cuda:0"),
        ("low_cpu_mem_usage", True, False),
        ("config", None, object()),
        ("attn_implementation", None, "sdpa"),
    ],
)
def test_an_argument_of_transformers_is_refused_with_the_reason_where_it_cannot_be_honoured(
    name: str, harmless: object, other: object
) -> None:
    assert read(**{name: harmless}) == read()
    with pytest.raises(InvalidOption, match=f"{name}=.* is not supported here: .") as caught:
        read(**{name: other})
    assert caught.value.option == name


def test_an_argument_that_nobody_knows_is_refused_and_not_ignored() -> None:
    with pytest.raises(InvalidOption, match=r"'revison' is not known.* 'revision'"):
        read(revison="main")
    with pytest.raises(InvalidOption, match="'num_hidden_layers' is not known"):
        read(num_hidden_layers=2)


def test_create_runtimes_says_whether_programs_are_loaded() -> None:
    assert read().creates_runtimes
    assert read({"create_runtimes": True}).creates_runtimes
    assert not read(rbln_create_runtimes=False).creates_runtimes
    assert not read(RBLNDecoderOnlyModelForCausalLMConfig(create_runtimes=False)).creates_runtimes
    with pytest.raises(InvalidOption, match="create_runtimes='no' must be True or False"):
        read({"create_runtimes": "no"})


def test_keys_that_an_artifact_has_may_be_repeated_and_others_are_refused(
    config_path: Path,
) -> None:
    config = parse_config(config_path.read_bytes(), path=str(config_path))
    check_compiled(
        read(
            {
                "batch_size": config.batch_size,
                "kvcache_num_blocks": config.kvcache_num_blocks,
                "decoder_batch_sizes": list(config.decoder_batch_sizes),
                "npu": "cpu",
            },
            dtype="float32",
        ),
        config,
    )
    # An object holds values that nobody asked for, such as a batch of one.
    check_compiled(read(RBLNDecoderOnlyModelForCausalLMConfig()), config)
    check_compiled(read(RBLNDecoderOnlyModelForCausalLMConfig.load(config_path)), config)
    check_compiled(read(rbln_weight_dtype="float32"), config)
    with pytest.raises(InvalidOption, match=r"weight_dtype='int8' cannot be .*'float32'.* again"):
        check_compiled(read(rbln_weight_dtype="int8"), config)
    with pytest.raises(InvalidOption, match=r"batch_size=2 cannot be changed by loading.* again"):
        check_compiled(read({"batch_size": 2}), config)
    with pytest.raises(InvalidOption, match=r"kvcache_num_blocks=40 .*reblock set DIR 40"):
        check_compiled(read(rbln_kvcache_num_blocks=40), config)
    with pytest.raises(InvalidOption, match="reblock set DIR --memory-budget"):
        check_compiled(read({"memory_budget": 0.5}), config)
    with pytest.raises(InvalidOption, match="save_pretrained"):
        check_compiled(read(model_save_dir="elsewhere"), config)


def test_a_directory_is_loaded_where_it_is_an_artifact_and_else_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []

    def note(kind: str) -> Callable[[str, Arguments], None]:
        return lambda where, _arguments: made.append((kind, where))

    monkeypatch.setattr(modeling, "_load", note("load"))
    monkeypatch.setattr(modeling, "_export", note("export"))
    artifact = make_artifact(tmp_path / "artifact")
    make_artifact(tmp_path / "outer" / "inner")
    for model, keywords in [
        (artifact, {}),
        (tmp_path / "model", {}),
        ("meta-llama/Llama-2-7b-chat-hf", {}),
        (tmp_path / "model", {"export": False}),
        (tmp_path / "outer", {"subfolder": "inner"}),
    ]:
        RBLNAutoModelForCausalLM.from_pretrained(model, **keywords)  # type: ignore[arg-type]
    assert made == [
        ("load", str(artifact)),
        ("export", str(tmp_path / "model")),
        ("export", "meta-llama/Llama-2-7b-chat-hf"),
        ("load", str(tmp_path / "model")),
        ("load", str(tmp_path / "outer" / "inner")),
    ]
    with pytest.raises(InvalidOption, match="is compiled already; leave export out"):
        RBLNAutoModelForCausalLM.from_pretrained(artifact, export=True)


@pytest.mark.usefixtures("without_torch")
def test_without_torch_it_is_said_what_to_install(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "artifact")
    for model in (artifact, tmp_path):
        with pytest.raises(MissingDependency, match=r"pip install 'reblock\[torch\]'"):
            RBLNAutoModelForCausalLM.from_pretrained(model)


@pytest.mark.usefixtures("without_torch")
def test_what_is_wrong_is_said_before_torch_is_missed(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "artifact")
    with pytest.raises(NotAnArtifact):
        RBLNAutoModelForCausalLM.from_pretrained(tmp_path, export=False)
    with pytest.raises(InvalidOption, match="batch_size=2 cannot be changed"):
        RBLNAutoModelForCausalLM.from_pretrained(artifact, rbln_batch_size=2)
    with pytest.raises(DestinationExists):
        RBLNAutoModelForCausalLM.from_pretrained("a/model", True, model_save_dir=artifact)
    with pytest.raises(InvalidOption, match="model_save_dir=3 must be the path"):
        RBLNAutoModelForCausalLM.from_pretrained("a/model", export=True, model_save_dir=3)


def test_an_artifact_of_optimum_rbln_is_refused_with_who_runs_it(tmp_path: Path) -> None:
    data = "tests/data/optimum_rbln_0_12/llama2_7b_flash_ca22"
    with pytest.raises(HostMismatch, match="compiled by optimum-rbln for RBLN-CA22"):
        RBLNAutoModelForCausalLM.from_pretrained(data)


def test_there_are_no_objects_of_the_factory_and_models_in_memory_are_refused() -> None:
    with pytest.raises(UsageError, match="from_pretrained"):
        RBLNAutoModelForCausalLM()
    with pytest.raises(UsageError, match=r"save it with\s+save_pretrained"):
        RBLNAutoModelForCausalLM.from_model(object())


def test_a_revision_of_what_lies_here_is_refused_and_a_subfolder_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    assert modeling._find("an/id", {}) == "an/id"
    assert modeling._find(str(tmp_path), {"subfolder": "inner"}) == str(tmp_path / "inner")
    assert modeling._find(str(tmp_path), {"token": True}) == str(tmp_path)
    with pytest.raises(InvalidOption, match="revision='v2' is of a model on the hub"):
        modeling._find(str(tmp_path), {"revision": "v2"})


def test_the_class_is_imported_without_torch() -> None:
    program = (
        "import sys; from reblock.rbln import RBLNAutoModelForCausalLM; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
