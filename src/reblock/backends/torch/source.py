"""Where a model comes from: a directory, a GGUF file or a hub id, read through transformers.

The one place that touches a transformers configuration: what the rest needs of it is in
`ModelSource`, and what cannot be compiled is refused here before any weight is read.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from reblock.backends.torch import attention, experts
from reblock.backends.torch.native import replace_linears
from reblock.backends.torch.refusal import NotCompilable

if TYPE_CHECKING:
    from reblock.options import Dtype, WeightDtype

__all__ = [
    "ModelSource",
    "check_compilable",
    "check_rotary_limit",
    "linear_dtype",
    "load_model",
    "open_source",
    "quiet_transformers",
    "save_description",
    "shape_model",
    "torch_dtype",
]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def quiet_transformers() -> None:
    """Keep transformers' progress bars and remarks out of our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def torch_dtype(name: WeightDtype) -> torch.dtype:
    """Return the torch type of that name."""
    return TORCH_DTYPES[name]


def linear_dtype(dtype: Dtype, weight_dtype: WeightDtype) -> torch.dtype | None:
    """Return what `replace_linears` is to make of the weights, None where they stay as they are."""
    return None if weight_dtype == dtype else torch_dtype(weight_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found, with its configuration and nothing heavy yet.

    `arguments` are what every `from_pretrained` of transformers takes to find the model again.
    """

    name: str
    arguments: tuple[str, dict[str, Any]]
    config: Any
    num_layers: int
    max_position_embeddings: int | None
    model_type: str
    checkpoint_dtype: Literal["float32", "bfloat16", "float16", "other"]


def _find(model_id: str) -> tuple[str, dict[str, Any]]:
    if os.path.isfile(model_id):
        if not model_id.endswith(".gguf"):
            raise NotCompilable("it is a file, but only .gguf files are read; give its directory")
        directory, name = os.path.split(os.path.abspath(model_id))
        return directory, {"gguf_file": name}
    if os.path.isdir(model_id):
        if not os.path.exists(os.path.join(model_id, "config.json")):
            raise NotCompilable("the directory has no config.json, so it holds no model")
        return model_id, {}
    if (
        model_id.endswith(".gguf")
        or model_id.startswith((".", "/", "~"))
        or model_id.count("/") > 1
    ):
        raise NotCompilable("there is no such file or directory")
    return model_id, {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def open_source(model_id: str) -> ModelSource:
    """Find a model and read its configuration.

    Raises:
        NotCompilable: it is not there, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    where, arguments = _find(model_id)
    # Where it is left out, transformers asks on the terminal whether to run a model's own code.
    arguments["trust_remote_code"] = False
    try:
        config = AutoConfig.from_pretrained(where, **arguments)
    # A file that is cut off or has a value of a wrong type fails wherever transformers meets it.
    except Exception as error:
        raise NotCompilable(f"its configuration cannot be read: {_first_line(error)}") from error
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and (type(positions) is not int or positions < 1):
        raise NotCompilable(f"its configuration states max_position_embeddings={positions!r}")
    if "gguf_file" in arguments:
        # What the file calls itself is no place to find it again.
        config._name_or_path = model_id
    dtype = getattr(config, "dtype", None)
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return ModelSource(
        name=model_id,
        arguments=(where, arguments),
        config=config,
        num_layers=int(getattr(config, "num_hidden_layers", 0) or 0),
        max_position_embeddings=positions,
        model_type=str(config.model_type),
        checkpoint_dtype="float32" if dtype is None else names.get(dtype, "other"),  # type: ignore[arg-type]
    )


_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Attributes of a configuration that rule a model out where they are set, each with the reason.
_REFUSED = {
    "is_encoder_decoder": "it attends across to an encoder; only decoder-only models are compiled",
    "add_cross_attention": "it attends across to an encoder; only decoder-only models are compiled",
    "kv_lora_rank": (
        "it has latent attention (kv_lora_rank), which transformers expands to full keys and "
        "values; the cache would be many times what such a model is chosen for"
    ),
    "num_kv_shared_layers": (
        "some of its layers read another layer's cache (num_kv_shared_layers)"
    ),
    "quantization_config": "its weights are quantized; compile the original with weight_dtype=int8",
    "use_bidirectional_attention": "its attention looks ahead (use_bidirectional_attention)",
}


def check_compilable(config: Any) -> None:
    """Refuse what a configuration alone shows to be impossible.

    Raises:
        NotCompilable: with the reason.
    """
    for attribute, reason in _REFUSED.items():
        if getattr(config, attribute, None):
            raise NotCompilable(reason)
    kinds = set(getattr(config, "layer_types", None) or []) - _PLAIN_LAYERS
    if kinds:
        raise NotCompilable(
            f"it has layers of kind {', '.join(sorted(kinds))}; layers with full or sliding "
            "attention are compiled, those with recurrent state or chunks are not"
        )
    if not getattr(config, "num_hidden_layers", None):
        raise NotCompilable(
            "its configuration states no num_hidden_layers: it is not one language model, but "
            "perhaps one with others around it; compile the language model on its own"
        )
    _check_class(config)


def _check_class(config: Any) -> None:
    """Refuse what the class of the model shows to be impossible."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise NotCompilable(f"transformers has no causal language model for {config.model_type!r}")
    found: Any = AutoModelForCausalLM._model_mapping[type(config)]
    model_class = found[0] if isinstance(found, tuple) else found
    if getattr(model_class, "_is_stateful", False):
        raise NotCompilable("it keeps a recurrent state, which is not a KV cache")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise NotCompilable(
            f"transformers' {model_class.__name__} has an attention of its own that cannot be "
            "replaced (it does not use the shared attention interface)"
        )


def check_rotary_limit(config: Any, max_seq_len: int) -> None:
    """Refuse rotary tables that change while a sequence grows.

    Raises:
        NotCompilable: the model switches tables at a length below `max_seq_len`.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = parameters.values() if _is_nested(parameters) else [parameters]
    for table in tables:
        kind = table.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = table.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = limit or config.max_position_embeddings
        if max_seq_len > limit:
            raise NotCompilable(
                f"its {kind!r} rotary embedding changes once a sequence is longer than {limit} "
                "tokens, which would contradict keys that are in the cache already; lower "
                f"max_seq_len to {limit}"
            )


def _is_nested(parameters: dict[str, Any]) -> bool:
    return bool(parameters) and all(isinstance(value, dict) for value in parameters.values())


def shape_model(config: Any, dtype: Dtype, weight_dtype: WeightDtype) -> nn.Module:
    """Return the model without weights, on the meta device, as it is compiled.

    Its attention is the paged one and its linear layers have packed weights, of `weight_dtype`.

    Raises:
        NotCompilable: its code does not take an attention from outside.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    experts.register()
    auto_class: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = auto_class.from_config(
            copy.deepcopy(config),
            attn_implementation=attention.ATTENTION_NAME,
            dtype=torch_dtype(dtype),
            trust_remote_code=False,
        )
    # Models without experts ignore it.
    model.config._experts_implementation = experts.EXPERTS_NAME
    replace_linears(model, linear_dtype(dtype, weight_dtype))
    # Some models look for it in the ids, to warn; on shapes alone there are no ids to look at.
    model.config.pad_token_id = None
    shapes: nn.Module = model.eval()
    return shapes


def load_model(source: ModelSource, dtype: Dtype) -> nn.Module:
    """Return the model with its weights in memory and transformers' own attention.

    Raises:
        NotCompilable: the weights cannot be read, or some are no finite numbers.
    """
    from transformers import AutoModelForCausalLM

    where, arguments = source.arguments
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=torch_dtype(dtype), **arguments
        )
    # As above: what is wrong with a file shows where transformers happens to look.
    except Exception as error:
        raise NotCompilable(f"its weights cannot be read: {_first_line(error)}") from error
    loaded: nn.Module = model.eval()
    _check_finite(loaded)
    return loaded


def _check_finite(model: nn.Module) -> None:
    """Refuse weights with an infinity or NaN: no level of int8 stands for them."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.numel() == 0:
            continue
        # NaN is both the least and the most; a mask would take memory besides.
        if not torch.stack(torch.aminmax(weight.detach())).isfinite().all():
            raise NotCompilable(
                f"its weight {name!r} has values that are infinite or NaN; its files are damaged, "
                f"or their values exceed {str(weight.dtype).removeprefix('torch.')}"
            )


def save_description(source: ModelSource, directory: str) -> str | None:
    """Write the Hugging Face files that describe the model: configuration and tokenizer.

    Returns:
        Why there is no tokenizer, where there is none; the programs run on token ids alone.
    """
    from transformers import AutoTokenizer, GenerationConfig

    source.config.save_pretrained(directory)
    where, arguments = source.arguments
    missing = None
    try:
        AutoTokenizer.from_pretrained(where, **arguments).save_pretrained(directory)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        missing = _first_line(error)
    try:
        generation = GenerationConfig.from_pretrained(where)
    except OSError:
        generation = GenerationConfig.from_model_config(source.config)
    generation.save_pretrained(directory)
    return missing
