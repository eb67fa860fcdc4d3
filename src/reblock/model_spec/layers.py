"""What every layer of a model keeps of a sequence: heads, widths, windows, states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reblock.model_spec.fields import MAX_LAYERS
from reblock.model_spec.kinds import layer_kinds
from reblock.model_spec.states import state_dtype_bytes, state_elements

if TYPE_CHECKING:
    from reblock.model_spec.fields import ModelFields

__all__ = ["LayerCache", "layer_value", "read_layers"]

_WITH_STATE = ("recurrent", "hybrid", "hybrid_sliding")
# Of these, layers that see everything have wider heads.
_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_DEFAULT_GLOBAL_HEAD_DIM = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What one layer keeps of a sequence.

    `key_width` and `value_width` are elements of a token in one head. A "latent" layer has one
    head whose key is the compressed keys and values with the rotary part, and no value.
    `index_width` is the elements of a token's index key, by which sparse attention chooses.
    `window` is the most tokens that are kept, None where it is all of them. A layer may have
    both keys and a state. `state_dtype_bytes` None means: as the cache. `shares_with` is the
    layer whose cache a "shared" layer reads.
    """

    kind: Literal["full", "sliding", "chunked", "latent", "recurrent", "shared", "none"]
    num_kv_heads: int
    key_width: int
    value_width: int
    index_width: int
    window: int | None
    state_elements: int
    state_dtype_bytes: int | None
    shares_with: int | None

    @property
    def elements_per_token(self) -> int:
        """Elements of keys and values of one token, in all heads."""
        return self.num_kv_heads * (self.key_width + self.value_width) + self.index_width


NO_CACHE = LayerCache(
    kind="none",
    num_kv_heads=0,
    key_width=0,
    value_width=0,
    index_width=0,
    window=None,
    state_elements=0,
    state_dtype_bytes=None,
    shares_with=None,
)


def read_layers(fields: ModelFields) -> tuple[LayerCache, ...]:
    """Return what every layer keeps, in the order of the layers.

    Raises:
        CorruptArtifact: A value is not what it must be, or a list is too short.
        UnsupportedModel: Layers, heads or widths are not said.
    """
    blocks = fields.nested_list("block_configs")
    if blocks:
        return _read_blocks(fields, blocks)
    kinds = layer_kinds(fields)
    layers = [_read_layer(fields, index, kind) for index, kind in enumerate(kinds)]
    _note_states(fields, kinds, layers)
    return _share(fields, kinds, layers)


def _read_layer(fields: ModelFields, index: int, kind: str) -> LayerCache:
    if kind == "none":
        return NO_CACHE
    state = NO_CACHE
    if kind in _WITH_STATE:
        state = replace(
            NO_CACHE,
            kind="recurrent",
            state_elements=state_elements(fields) or 0,
            state_dtype_bytes=state_dtype_bytes(fields),
        )
    if kind == "recurrent":
        return state
    if fields.integer("kv_lora_rank", noted=False) is not None:
        return _latent(fields, index, kind)
    window = _window(fields, index, kind)
    attention = replace(
        state,
        kind="full",
        num_kv_heads=_num_kv_heads(fields, index, kind),
        key_width=_head_dim(fields, index, kind),
        value_width=_value_dim(fields, index, kind),
        index_width=_index_width(fields, index),
    )
    if window is None:
        return attention
    return replace(attention, kind="chunked" if kind == "chunked" else "sliding", window=window)


def _latent(fields: ModelFields, index: int, kind: str) -> LayerCache:
    rank = fields.required("kv_lora_rank")
    rotary = fields.integer("qk_rope_head_dim", minimum=0, noted=False)
    if rotary is None:
        rotary = fields.required("qk_rope_head_dim")
    fields.note(
        f"Latent attention is counted as its latent, {rank} + {rotary} elements of a token in a "
        "layer; an engine that keeps keys and values of every head keeps many times that."
    )
    return replace(
        NO_CACHE,
        kind="latent",
        num_kv_heads=1,
        key_width=rank + rotary,
        window=_window(fields, index, kind),
        index_width=_index_width(fields, index),
    )


def _index_width(fields: ModelFields, index: int) -> int:
    width = fields.number("index_head_dim", default=0)
    types = fields.texts("indexer_types")
    if types is not None and index < len(types) and types[index] == "shared":
        return 0
    if width:
        fields.note(
            f"Sparse attention keeps an index key besides, counted as {width} elements of a token "
            "in a layer of the type of the cache."
        )
    return width


def _window(fields: ModelFields, index: int, kind: str) -> int | None:
    """Return the tokens that a layer with a window keeps; None where it can never be full."""
    if kind == "chunked":
        return _below_context(fields, fields.required("attention_chunk_size"))
    if kind not in ("sliding", "hybrid_sliding"):
        return None
    if fields.model_type == "gpt_neo":
        return _below_context(fields, fields.required("window_size"))
    override = _override(fields, index)
    window = None if override is None else override.integer("sliding_window")
    return _below_context(fields, window or fields.required("sliding_window"))


def _below_context(fields: ModelFields, window: int) -> int | None:
    context = fields.integer("max_position_embeddings", noted=False)
    if context is not None and window >= context:
        fields.note(
            f"A window of {window:,} tokens is never full, as the context is {context:,}; its "
            "layers are counted as keeping every token."
        )
        return None
    return window


def _num_kv_heads(fields: ModelFields, index: int, kind: str) -> int:
    override = _override(fields, index)
    if override is not None and (heads := override.integer("num_key_value_heads")) is not None:
        return heads
    for name in ("num_key_value_heads_per_layer", "num_key_value_heads"):
        if fields.is_list(name):
            return layer_value(fields, name, index)
    if kind == "sliding" and (heads := fields.integer("swa_num_key_value_heads")) is not None:
        return heads
    if _is_gemma4_global(fields, kind) and fields.boolean(
        "attention_k_eq_v", default=fields.model_type not in _GEMMA4
    ):
        heads = fields.integer("num_global_key_value_heads")
        if heads is not None:
            return heads
    if fields.boolean("new_decoder_architecture"):
        fields.note("transformers keeps the keys of this model repeated, once for every head.")
    elif fields.boolean("multi_query"):
        return 1
    attention = fields.nested("attn_config")
    if attention is not None and (heads := attention.integer("num_key_value_heads")) is not None:
        return heads
    heads = fields.integer("num_key_value_heads") or fields.required("num_attention_heads")
    # Layers with a window have twice the heads in this family.
    return 2 * heads if kind == "sliding" and fields.model_type == "mimo_v2_flash" else heads


def _head_dim(fields: ModelFields, index: int, kind: str) -> int:
    override = _override(fields, index)
    if override is not None and (width := override.integer("head_dim")) is not None:
        return width
    if fields.is_list("head_dim"):
        return layer_value(fields, "head_dim", index)
    if kind == "sliding" and (width := fields.integer("swa_head_dim")) is not None:
        return width
    if _is_gemma4_global(fields, kind):
        return fields.integer("global_head_dim") or _DEFAULT_GLOBAL_HEAD_DIM
    width = fields.integer("head_dim")
    if width is not None:
        return width
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    # Zamba's attention reads the hidden state and the embeddings side by side.
    if fields.model_type in ("zamba", "zamba2"):
        hidden *= 2
    if hidden % heads and not fields.is_known:
        raise fields.unsupported(
            f"config.json has no head_dim, and hidden_size={hidden} does not divide into "
            f"num_attention_heads={heads}"
        )
    return hidden // heads


def _value_dim(fields: ModelFields, index: int, kind: str) -> int:
    if kind == "sliding" and (width := fields.integer("swa_v_head_dim")) is not None:
        return width
    if fields.has("v_head_dim") or fields.model_type == "mimo_v2_flash":
        return fields.required("v_head_dim")
    return _head_dim(fields, index, kind)


def _is_gemma4_global(fields: ModelFields, kind: str) -> bool:
    if fields.has("per_layer_config"):
        return False
    return kind == "full" and (fields.model_type in _GEMMA4 or fields.has("global_head_dim"))


def _override(fields: ModelFields, index: int) -> ModelFields | None:
    """Return what transformers notes of a single layer, under its number with leading zeros."""
    overrides = fields.nested("per_layer_config")
    if overrides is None:
        return None
    for width in range(1, len(str(MAX_LAYERS)) + 1):
        if overrides.has(f"{index:0{width}}"):
            return overrides.nested(f"{index:0{width}}")
    return None


def layer_value(fields: ModelFields, name: str, index: int) -> int:
    """Return the entry for one layer of a list that has an entry for every layer."""
    values = fields.integers(name) or ()
    if index >= len(values):
        fields.refuse(name, f"has {len(values)} entries, too few for the layers of the model")
    return values[index]


def _share(
    fields: ModelFields, kinds: tuple[str, ...], layers: list[LayerCache]
) -> tuple[LayerCache, ...]:
    """Let the last layers read the cache of the last layer of their kind before them."""
    count = fields.integer("num_kv_shared_layers", minimum=0) or 0
    first = len(layers) - count
    if count and first <= 0:
        fields.refuse("num_kv_shared_layers", f"is {count}, but the model has {len(layers)} layers")
    for index in range(max(first, 0), len(layers)):
        owner = next((i for i in range(first - 1, -1, -1) if kinds[i] == kinds[index]), None)
        if owner is None:
            fields.refuse(
                "num_kv_shared_layers",
                f"is {count}, but no layer before has a cache of the kind of layer {index}",
            )
        layers[index] = replace(NO_CACHE, kind="shared", shares_with=owner)
    return tuple(layers)


def _read_blocks(fields: ModelFields, blocks: list[ModelFields]) -> tuple[LayerCache, ...]:
    """Read the layers of a model that was pruned by architecture search, one by one."""
    if len(blocks) > MAX_LAYERS:
        fields.refuse("block_configs", f"has more than {MAX_LAYERS:,} entries")
    heads = fields.required("num_attention_heads")
    width = fields.integer("head_dim") or fields.required("hidden_size") // heads
    layers = []
    for block in blocks:
        attention = block.nested("attention")
        share = None if attention is None else attention.integer("n_heads_in_group")
        if share is None:
            layers.append(NO_CACHE)
            continue
        layers.append(
            replace(
                NO_CACHE,
                kind="full",
                num_kv_heads=max(heads // share, 1),
                key_width=width,
                value_width=width,
            )
        )
    return tuple(layers)


def _note_states(fields: ModelFields, kinds: tuple[str, ...], layers: list[LayerCache]) -> None:
    pairs = zip(kinds, layers, strict=True)
    states = [layer for kind, layer in pairs if kind in _WITH_STATE]
    if states and not states[0].state_elements:
        fields.note(
            f"The recurrent state of {fields.model_type} is not known, so that of {len(states)} "
            "layers is not counted; it does not grow with the sequence."
        )
    elif states and states[0].state_dtype_bytes is None:
        fields.note(
            "Recurrent states are counted in the type of the cache; an engine may keep a part of "
            "them in float32."
        )
