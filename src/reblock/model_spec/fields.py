"""The border to a `config.json` that other tools wrote: keys of many names, values checked.

Nothing else of `model_spec` looks into the file. A key that a file leaves out has the default of
its model type in transformers (`model_spec.defaults`), and a remark says so.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reblock.errors import UnsupportedModel
from reblock.json_fields import JsonFields
from reblock.model_spec.defaults import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_LAYERS", "NAMES", "ModelFields", "dtype_name"]

# The deepest public models have a few hundred layers.
MAX_LAYERS = 4096

# One meaning, the names that it has had. The first is the one that defaults are listed under.
NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_transformer_layers",
        "decoder_layers",
    ),
    "hidden_size": ("n_embed", "hidden_size", "n_embd", "d_model", "model_dim", "emb_dim"),
    "num_attention_heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "decoder_attention_heads",
    ),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "kv_n_heads",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "dim_head", "d_head"),
    "intermediate_size": (
        "block_ff_dim",
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "d_inner",
    ),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_token"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "n_ctx",
        "model_max_length",
        "max_context_length",
        "context_length",
    ),
    "num_local_experts": (
        "num_local_experts",
        "n_routed_experts",
        "num_experts",
        "moe_num_experts",
    ),
    "sliding_window": (
        "sliding_window",
        "sliding_window_size",
        "attention_window_size",
    ),
    "mamba_state": ("mamba_d_state", "state_size", "ssm_state_size"),
    "mamba_kernel": ("mamba_d_conv", "conv_kernel"),
    "mamba_heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"),
    "mamba_groups": ("mamba_n_groups", "n_groups", "mamba_ngroups"),
    "mamba_expand": ("mamba_expand", "expand"),
    "linear_heads": ("linear_num_heads", "num_heads"),
    "linear_head_dim": ("linear_head_dim", "head_dim"),
    "linear_kernel": ("linear_conv_kernel_dim", "short_conv_kernel_size"),
}


class ModelFields:
    """One model's part of `config.json`; what was assumed is added to `notes`."""

    def __init__(self, values: dict[str, object], *, path: str, model_type: str) -> None:
        # null says "none", which is not the same as leaving the key out: no default steps in.
        self._nulls = frozenset(key for key, value in values.items() if value is None)
        present = {key: value for key, value in values.items() if value is not None}
        self._fields = JsonFields(present, path=path)
        self._defaults = DEFAULTS.get(model_type, {})
        self.path = path
        self.model_type = model_type
        self.notes: list[str] = []

    @property
    def is_known(self) -> bool:
        """Whether the defaults of this model type are known."""
        return self.model_type in DEFAULTS

    def note(self, sentence: str) -> None:
        """Add a sentence on what is not known or was assumed, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def has(self, name: str) -> bool:
        """Return whether the file itself has a value under a name of that meaning."""
        return self._key(name) is not None

    def value(self, name: str) -> object:
        """Return the value as it was parsed, or None."""
        key = self._key(name)
        return None if key is None else self._fields.values[key]

    def integer(
        self, name: str, *, minimum: int = 1, maximum: int = 2**31 - 1, noted: bool = True
    ) -> int | None:
        """Return a whole number, the default of the model type, or None where there is neither."""
        key = self._key(name)
        if key is not None:
            return self._fields.integer(key, minimum=minimum, maximum=maximum)
        default = self._default(name)
        if not isinstance(default, int) or isinstance(default, bool):
            return None
        if noted:
            self.note(
                f"config.json does not say {name}; {self.model_type} has {default} where it "
                "does not."
            )
        return default

    def required(self, name: str, *, maximum: int = 2**31 - 1) -> int:
        """Return a whole number from 1 up.

        Raises:
            UnsupportedModel: Neither the file nor the model type says it.
        """
        number = self.integer(name, maximum=maximum)
        if number is None:
            raise self.unsupported(
                f"config.json says nothing under {' or '.join(self._names(name))}, so the size "
                "of its KV cache cannot be told"
            )
        return number

    def number(self, name: str, *, default: int) -> int:
        """Return a whole number of 0 or more; `default` where neither file nor type says it."""
        found = self.integer(name, minimum=0, noted=False)
        return default if found is None else found

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """Return true or false; `default` where neither the file nor the model type says it."""
        key = self._key(name)
        if key is not None:
            return self._fields.boolean(key)
        known = self._default(name)
        return known if isinstance(known, bool) else default

    def text(self, name: str) -> str | None:
        """Return a text that can be printed, or None."""
        key = self._key(name)
        return None if key is None else self._fields.text(key)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of texts, or None."""
        key = self._key(name)
        return None if key is None else self._fields.texts(key)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers from 0 up, or None."""
        key = self._key(name)
        return None if key is None else self._fields.integers(key, minimum=0)

    def is_list(self, name: str) -> bool:
        """Return whether the value is a list."""
        return isinstance(self.value(name), list)

    def nested(self, name: str) -> ModelFields | None:
        """Return an object within this one, or None."""
        key = self._key(name)
        if key is None:
            return None
        return self._within(self._fields.nested(key).values)

    def nested_list(self, name: str) -> list[ModelFields] | None:
        """Return a list of objects, or None."""
        key = self._key(name)
        if key is None:
            return None
        return [self._within(item.values) for item in self._fields.nested_list(key)]

    def refuse(self, name: str, fault: str) -> None:
        """Raise `CorruptArtifact` for the value under `name`."""
        raise self._fields.corrupt(self._key(name) or name, fault)

    def unsupported(self, message: str) -> UnsupportedModel:
        """Return the error for a model that reblock can say nothing about."""
        return UnsupportedModel(f"{self.path}: {message}", model=self.path)

    def _within(self, values: dict[str, object]) -> ModelFields:
        inner = ModelFields(values, path=self.path, model_type=self.model_type)
        inner.notes = self.notes
        inner._defaults = {}
        return inner

    def _default(self, name: str) -> int | bool | None:
        if any(key in self._nulls for key in self._names(name)):
            return None
        return self._defaults.get(name)

    def _key(self, name: str) -> str | None:
        return next((key for key in self._names(name) if key in self._fields.values), None)

    def _names(self, name: str) -> tuple[str, ...]:
        return NAMES.get(name, (name,))


def dtype_name(text: str | None) -> str | None:
    """Return "bfloat16" for "torch.bfloat16" and "bfloat16"; None where it is no plain name."""
    if text is None:
        return None
    name = text.removeprefix("torch.")
    return name if re.fullmatch(r"[a-z0-9_]+", name) else None
