"""What `RBLNAutoModelForCausalLM.from_pretrained` was given, sorted and checked.

Keys of `rbln_config` come as a dictionary or a configuration object, and as keyword arguments that
begin with `rbln_`; everything else is what transformers takes to find and read a model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from reblock.budget import MemoryBudget
from reblock.errors import InvalidOption, UsageError
from reblock.options import CompileOptions

if TYPE_CHECKING:
    from reblock.config import RBLNConfig

__all__ = ["Arguments", "check_compiled", "read_arguments"]

_COMPILED_KEYS = tuple(field.name for field in fields(CompileOptions))

# Values of keys that are else refused; they ask for what is done anyway, and scripts and
# configuration objects of optimum-rbln hand them on.
_USUAL: dict[str, tuple[object, ...]] = {
    "_compile_cfgs": ([],),
    "activate_profiler": (False,),
    "cache_impl": ("static",),
    "device_map": ({},),
    "kvcache_num_blocks": (0,),
    "logits_to_keep": (1,),
    "num_devices": (1,),
    "optimize_host_memory": (True,),
    "output_hidden_states": (False,),
    "phases": (["prefill", "decode"],),
    "quantization": ({},),
    "sliding_window_layers": ([],),
    "tensor_parallel_size": (1,),
    "use_attention_mask": (False,),
    "use_inputs_embeds": (False,),
    "use_position_ids": (False,),
}
# Of an object's attributes, what optimum-rbln sets where nothing was asked.
_OBJECT_DEFAULTS: dict[str, object] = {"prefill_chunk_size": 128, "dtype": "float32"}
# What concerns the process that runs the programs, and not how they are compiled.
_RUNTIME_KEYS = ("activate_profiler", "device", "device_map", "optimize_host_memory", "timeout")
_OBJECT_KEYS = tuple(
    dict.fromkeys(
        (
            *_COMPILED_KEYS,
            *_USUAL,
            *_RUNTIME_KEYS,
            "create_runtimes",
            "lora_config",
            "sliding_window",
        )
    )
)

_FETCHING = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "use_auth_token",
)
# Arguments of transformers with the values that change nothing here, and why others are refused.
_TRANSFORMERS: dict[str, tuple[tuple[object, ...], str]] = {
    "attn_implementation": (
        (),
        "the attention is compiled; rbln_config's attn_impl chooses between eager and flash_attn",
    ),
    "config": ((), "the configuration is read from the model; change its config.json"),
    "device_map": (("auto", "cpu"), "the programs run on the cpu"),
    "low_cpu_mem_usage": ((True,), "weights are always read so"),
    "trust_remote_code": (
        (False,),
        "the code of a model repository is never run; models that transformers knows are compiled",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was asked for, None and what means the same left out.

    `given` are the keys of `rbln_config` that were named one by one, and `assumed` are those of a
    configuration object, which cannot tell what was asked from what it chose.
    """

    given: Mapping[str, object]
    assumed: Mapping[str, object]
    creates_runtimes: bool
    fetching: Mapping[str, object]
    model_save_dir: object

    @property
    def compile_options(self) -> CompileOptions:
        """What to compile.

        Raises:
            InvalidOption: The configuration object asks for what cannot be honoured.
            UsageError: A value is not accepted, or two exclude each other.
        """
        return CompileOptions.from_keys({**self.assumed, **self.given})


def read_arguments(rbln_config: object, keywords: Mapping[str, object]) -> Arguments:
    """Sort what `from_pretrained` was given besides the model and `export`.

    Raises:
        InvalidOption: An argument or a key is not known or not supported, or two contradict
            each other. A key that is written as text is read as on a command line.
        UsageError: `rbln_config` is neither a dictionary nor a configuration object.
    """
    keywords = dict(keywords)
    given: dict[str, object] = {}
    assumed: dict[str, object] = {}
    if isinstance(rbln_config, Mapping):
        given.update({str(key).replace("-", "_"): value for key, value in rbln_config.items()})
    elif rbln_config is not None:
        assumed.update(_read_object(rbln_config))
    # As in optimum-rbln, an argument of its own is stronger than the same key of rbln_config.
    for name in [name for name in keywords if name.startswith("rbln_")]:
        given[name.removeprefix("rbln_")] = keywords.pop(name)
    _take_dtype(given, keywords)
    for key in given:
        assumed.pop(key, None)
    creates_runtimes = _take_create_runtimes(given, assumed)
    arguments = Arguments(
        given=_without_usual(given),
        assumed=_without_usual(assumed),
        creates_runtimes=creates_runtimes,
        fetching=_take_fetching(keywords),
        model_save_dir=keywords.pop("model_save_dir", None),
    )
    _refuse_others(keywords)
    for key in (*arguments.given, *_RUNTIME_KEYS):
        if key in {**arguments.assumed, **arguments.given} and key not in _COMPILED_KEYS:
            CompileOptions.from_keys({key: None})  # which says why not
    return arguments


def check_compiled(arguments: Arguments, config: RBLNConfig) -> None:
    """Check that an artifact was compiled as `arguments` say.

    What a configuration object holds is not checked, as it may be what the object chose itself.

    Raises:
        InvalidOption: It was compiled differently, or something was given that only compiling
            can heed.
    """
    options = CompileOptions.from_keys(arguments.given)
    for key in arguments.given:
        asked = getattr(options, key)
        if isinstance(asked, MemoryBudget):
            raise InvalidOption(
                f"memory_budget={asked.text!r} is for compiling; to size the cache of an artifact "
                "to a budget: reblock set DIR --memory-budget BUDGET",
                option=key,
            )
        compiled = getattr(config, key)
        if asked != compiled:
            remedy = f"reblock set DIR {asked}" if key == "kvcache_num_blocks" else "compile again"
            raise InvalidOption(
                f"{key}={asked!r} cannot be changed by loading: the artifact has "
                f"{key}={compiled!r}; leave it out, or {remedy}",
                option=key,
            )
    if arguments.model_save_dir is not None:
        raise InvalidOption(
            "model_save_dir is where export=True writes to; for a copy of an artifact call "
            "save_pretrained",
            option="model_save_dir",
        )


def _read_object(rbln_config: object) -> dict[str, object]:
    if not hasattr(rbln_config, "batch_size"):
        raise UsageError(
            f"rbln_config is {type(rbln_config).__name__!r}; give a dictionary of its keys or a "
            "RBLNDecoderOnlyModelForCausalLMConfig"
        )
    values = {key: getattr(rbln_config, key, None) for key in _OBJECT_KEYS}
    # It may stem from a batch size that an argument changes.
    if values["decoder_batch_sizes"] == [values["batch_size"]]:
        del values["decoder_batch_sizes"]
    return {
        key: value
        for key, value in values.items()
        if key not in _OBJECT_DEFAULTS or value != _OBJECT_DEFAULTS[key]
    }


def _take_dtype(given: dict[str, object], keywords: dict[str, object]) -> None:
    """Make the key `dtype` of what transformers calls `dtype`, and formerly `torch_dtype`."""
    for name in ("torch_dtype", "dtype"):
        value = keywords.pop(name, None)
        if value is None or value == "auto":
            continue
        dtype = str(value).removeprefix("torch.")
        if given.get("dtype") not in (None, dtype):
            raise InvalidOption(
                f"{name}={dtype!r} contradicts dtype={given['dtype']!r}; leave one of them out",
                option=name,
            )
        given["dtype"] = dtype


def _take_create_runtimes(given: dict[str, object], assumed: dict[str, object]) -> bool:
    value = {**assumed, **given}.get("create_runtimes")
    for keys in (given, assumed):
        keys.pop("create_runtimes", None)
    if value is not None and not isinstance(value, bool):
        raise InvalidOption(
            f"create_runtimes={value!r} must be True or False", option="create_runtimes"
        )
    return value is not False


def _take_fetching(keywords: dict[str, object]) -> dict[str, object]:
    taken = {name: keywords.pop(name, None) for name in _FETCHING}
    old_token = taken.pop("use_auth_token")
    if taken["token"] is None:
        taken["token"] = old_token
    return {name: value for name, value in taken.items() if value not in (None, False, "")}


def _without_usual(keys: dict[str, object]) -> dict[str, object]:
    return {
        key: value for key, value in keys.items() if value is not None and not _is_usual(key, value)
    }


def _is_usual(key: str, value: object) -> bool:
    if key == "cls_name":
        return isinstance(value, str) and value.endswith("ForCausalLMConfig")
    if isinstance(value, tuple):
        value = list(value)
    return value in _USUAL.get(key, ())


def _refuse_others(keywords: Mapping[str, object]) -> None:
    for name, value in keywords.items():
        harmless, reason = _TRANSFORMERS.get(name, ((), ""))
        if value is None or value in harmless:
            continue
        if not reason:
            known = (*_FETCHING, *_TRANSFORMERS, "dtype", "export", "model_save_dir", "rbln_config")
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidOption(
                f"argument {name!r} is not known; the nearest known one is {nearest!r}. Keys of "
                "rbln_config go into rbln_config, or get the prefix rbln_",
                option=name,
                nearest=nearest,
            )
        raise InvalidOption(f"{name}={value!r} is not supported here: {reason}", option=name)
