"""What each layer of a model attends to, in whatever way `config.json` says it.

Every model type has its own way: a list of names, a text of letters, a list of indices, an
interval, a window that alternates. All of them become one list with a name for every layer:
"full", "sliding", "chunked", "recurrent" (a state in place of keys), "hybrid" and "hybrid_sliding"
(a state beside keys) or "none".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reblock.model_spec.fields import MAX_LAYERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.model_spec.fields import ModelFields

__all__ = ["layer_kinds", "layer_names"]

_NAMED: Mapping[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "sliding": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "recurrent": "recurrent",
    "conv": "recurrent",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid_sliding",
    "moe": "none",
    "mlp": "none",
    "M": "recurrent",
    "*": "full",
    "-": "none",
    "E": "none",
    "L": "sliding",
    "G": "full",
}

# Every so many layers one sees everything, the others a window, where the file does not say it.
_PERIODS: Mapping[str, int] = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
    "gpt_oss": 2,
    "mimo_v2_flash": 6,
    "olmo3": 4,
    "vaultgemma": 2,
}
_RECURRENT_UNLESS_SAID = (
    "bamba",
    "falcon_mamba",
    "granitemoehybrid",
    "mamba",
    "mamba2",
    "rwkv",
    "xlstm",
)
# There is no rule for these, so their file has to say it.
_ALWAYS_SAID = ("kimi_linear", "zamba2")
_ALL_HYBRID = ("falcon_h1", "zaya")
# Of these, all layers have the window where there is one.
_ALL_SLIDING = (
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "moshi",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "qwen3_moe",
    "starcoder2",
)
_WINDOW_IS_OPTIONAL = ("qwen", "smollm3")
# Of these, the last layer sees everything, whatever the list says.
_LAST_IS_FULL = ("gemma4_text", "gemma4_unified_text")
# Of these, so does the first.
_FIRST_IS_FULL = ("mimo_v2_flash",)
_DEFAULT_INTERVALS: Mapping[str, int] = {
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
}


def layer_kinds(fields: ModelFields) -> tuple[str, ...]:
    """Return the kind of every layer of the model.

    Raises:
        CorruptArtifact: A list has fewer entries than the model has layers.
        UnsupportedModel: It is not said how many layers there are.
    """
    readers = (_listed, _patterned, _indexed, _of_type, _windowed)
    found = (read(fields) for read in readers)
    kinds = next((kinds for kinds in found if kinds is not None), None)
    if kinds is None:
        kinds = ("full",) * num_layers(fields)
    crossing = fields.integers("cross_attention_layers")
    if not crossing:
        return kinds
    fields.note("Layers that attend to images keep no tokens; keys of images are not counted.")
    return tuple("none" if index in crossing else kind for index, kind in enumerate(kinds))


def layer_names(fields: ModelFields) -> tuple[str, ...]:
    """Return what the file itself calls its layers, one by one; nothing where it does not."""
    names = fields.texts("layer_types") or fields.texts("layers_block_type")
    return names or tuple(fields.text("hybrid_override_pattern") or "")


def num_layers(fields: ModelFields) -> int:
    """Return how many layers the model has."""
    return fields.required("num_hidden_layers", maximum=MAX_LAYERS)


def _listed(fields: ModelFields) -> tuple[str, ...] | None:
    for key in ("layer_types", "layers_block_type"):
        names = fields.texts(key)
        if names is not None:
            kinds = _fitted(fields, key, tuple(_kind(fields, name) for name in names))
            if fields.model_type in _LAST_IS_FULL and kinds:
                kinds = (*kinds[:-1], "full")
            return _with_window(fields, kinds)
    for key, full in (("attn_type_list", 1), ("hybrid_layer_pattern", 0)):
        numbers = fields.integers(key)
        if numbers is not None:
            other = "recurrent" if key == "attn_type_list" else "sliding"
            kinds = tuple("full" if number == full else other for number in numbers)
            return _with_window(fields, _fitted(fields, key, kinds))
    return None


def _patterned(fields: ModelFields) -> tuple[str, ...] | None:
    pattern = fields.text("hybrid_override_pattern")
    if pattern is not None:
        return _limited(fields, tuple(_kind(fields, letter) for letter in pattern))
    if fields.model_type == "recurrent_gemma":
        # Its attention always has a window.
        names = fields.texts("_block_types") or fields.texts("block_types")
        names = names or ("recurrent", "recurrent", "attention")
        pattern_kinds = ("sliding" if name == "attention" else "recurrent" for name in names)
        return _repeated(tuple(pattern_kinds), num_layers(fields))
    if fields.model_type == "gpt_neo":
        return _gpt_neo_kinds(fields)
    return None


def _gpt_neo_kinds(fields: ModelFields) -> tuple[str, ...]:
    names = fields.texts("attention_layers")
    if names is not None:
        return _fitted(fields, "attention_layers", tuple(_kind(fields, n) for n in names))
    return _repeated(("full", "sliding"), num_layers(fields))


def _indexed(fields: ModelFields) -> tuple[str, ...] | None:
    """Read the kinds of hybrid models from indices and intervals of their attention layers."""
    linear = fields.nested("linear_attn_config")
    if linear is not None and (indices := linear.integers("full_attn_layers")) is not None:
        # These alone count from 1.
        return _attention_at(fields, [index - 1 for index in indices])
    for key, kind in (
        ("full_attn_idxs", "full"),
        ("attn_layer_indices", "full"),
        ("hybrid_layer_ids", "hybrid"),
    ):
        found = fields.integers(key)
        if found is not None:
            return _attention_at(fields, list(found), kind)
    period = fields.integer("attn_layer_period", noted=False)
    if period is not None:
        offset = fields.number("attn_layer_offset", default=0)
        kind = "hybrid" if fields.model_type == "zamba" else "full"
        count = num_layers(fields)
        # Zamba starts with three layers, of which the last has attention, and counts from there.
        start = 3 if fields.model_type == "zamba" else 0
        chosen = [start + i for i in range(count) if i % period == offset]
        return _attention_at(fields, [start - 1, *chosen] if start else chosen, kind)
    for key in ("full_attention_interval", "layer_group_size"):
        interval = fields.integer(key) or _DEFAULT_INTERVALS.get(fields.model_type)
        if interval is not None:
            return _attention_at(
                fields, [i for i in range(num_layers(fields)) if (i + 1) % interval == 0]
            )
    return None


def _of_type(fields: ModelFields) -> tuple[str, ...] | None:
    model_type = fields.model_type
    if model_type in _RECURRENT_UNLESS_SAID:
        return ("recurrent",) * num_layers(fields)
    if model_type in _ALL_HYBRID:
        return ("hybrid",) * num_layers(fields)
    if model_type == "minimax":
        return _repeated(("full", "recurrent"), num_layers(fields))
    if model_type in _ALWAYS_SAID:
        raise fields.unsupported("config.json does not say which of its layers have attention")
    if model_type == "deepseek_v4":
        return (_kind(fields, "compressed_sparse_attention"),) * num_layers(fields)
    if model_type == "longcat_flash":
        return ("full",) * (2 * num_layers(fields))
    return None


def _windowed(fields: ModelFields) -> tuple[str, ...] | None:
    """Read the kinds of models that only have windows or chunks."""
    if fields.integer("attention_chunk_size", noted=False) is not None:
        return _chunked_kinds(fields)
    if fields.integer("sliding_window", minimum=0, noted=False) in (None, 0):
        return None
    if not fields.boolean("use_sliding_window", default=not _is_window_optional(fields)):
        return None
    count = num_layers(fields)
    pattern = _period(fields)
    if isinstance(pattern, str):
        return _repeated(tuple(_kind(fields, letter) for letter in pattern), count)
    if pattern is not None:
        ends = {0} if fields.model_type in _FIRST_IS_FULL else set()
        ends |= {count - 1} if fields.model_type in _LAST_IS_FULL else set()
        return tuple(
            "full" if (i + 1) % pattern == 0 or i in ends else "sliding" for i in range(count)
        )
    if fields.model_type == "cwm":
        return _repeated(("full", "sliding", "sliding", "sliding"), count)
    first = fields.integer("max_window_layers", minimum=0, noted=False)
    if first is not None and fields.model_type not in _ALL_SLIDING:
        return tuple("sliding" if i >= first else "full" for i in range(count))
    if fields.model_type not in _ALL_SLIDING:
        fields.note(
            f"Every layer is taken to keep no more than the sliding_window of config.json, as "
            f"nothing says which layers of a {fields.model_type} model it is for."
        )
    return ("sliding",) * count


def _period(fields: ModelFields) -> int | str | None:
    for key in ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"):
        if isinstance(fields.value(key), str):
            return fields.text(key) or None
        period = fields.integer(key, noted=False)
        if period is not None:
            return period
    return _PERIODS.get(fields.model_type)


def _chunked_kinds(fields: ModelFields) -> tuple[str, ...]:
    count = num_layers(fields)
    # Layers with rotary positions (1) see their chunk, the others (0) everything.
    rotary = fields.integers("no_rope_layers")
    if rotary:
        kinds = tuple("chunked" if flag else "full" for flag in rotary)
        return _fitted(fields, "no_rope_layers", kinds)
    interval = fields.integer("no_rope_layer_interval", noted=False)
    if interval is None:
        fields.note("Every layer is taken to keep no more than the attention_chunk_size.")
        return ("chunked",) * count
    return tuple("full" if (i + 1) % interval == 0 else "chunked" for i in range(count))


def _with_window(fields: ModelFields, kinds: tuple[str, ...]) -> tuple[str, ...]:
    window = fields.integer("sliding_window", minimum=0, noted=False)
    if "sliding" in kinds and not window:
        fields.note(
            "config.json names layers with a sliding window but no window, so they are taken to "
            "keep every token."
        )
        return tuple("full" if kind == "sliding" else kind for kind in kinds)
    return kinds


def _is_window_optional(fields: ModelFields) -> bool:
    return fields.model_type.startswith(_WINDOW_IS_OPTIONAL)


def _kind(fields: ModelFields, name: str) -> str:
    kind = _NAMED.get(name)
    if kind is None:
        fields.note(
            f"Layers of the kind {name!r} are not known and are counted as full attention, which "
            "may be more than they keep."
        )
        return "full"
    return kind


def _attention_at(fields: ModelFields, indices: list[int], kind: str = "full") -> tuple[str, ...]:
    chosen = frozenset(indices)
    return tuple(kind if i in chosen else "recurrent" for i in range(num_layers(fields)))


def _repeated(kinds: tuple[str, ...], count: int) -> tuple[str, ...]:
    return tuple(kinds[i % len(kinds)] for i in range(count))


def _limited(fields: ModelFields, kinds: tuple[str, ...]) -> tuple[str, ...]:
    if not 1 <= len(kinds) <= MAX_LAYERS:
        fields.refuse("layer_types", f"names {len(kinds)} layers, not 1 to {MAX_LAYERS:,}")
    return kinds


def _fitted(fields: ModelFields, key: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return `kinds` without what follows the model's layers, as layers that only draft do."""
    kinds = _limited(fields, kinds)
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS, noted=False)
    if count is None or fields.model_type == "nemotron_h":
        return kinds
    if len(kinds) < count:
        fields.refuse(key, f"names {len(kinds)} layers, but the model has {count}")
    if len(kinds) > count:
        fields.note(f"{key} names {len(kinds)} layers; the model has {count}, so the rest is left.")
    return kinds[:count]
