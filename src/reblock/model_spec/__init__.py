"""What a model keeps of every token and how large it is, read from `config.json` alone.

    bytes of a token = sum over layers of KV heads * (key width + value width) * bytes of a value

and every layer may be different: one keeps all tokens, the next a window of them, another a
compressed latent, a state of fixed size, or nothing of its own. So nothing is multiplied by the
number of layers; layers are read one by one and summed. Meanings and defaults of the keys are
those of transformers, which is not needed to read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.errors import UnsupportedModel
from reblock.json_fields import parse_json_object
from reblock.model_spec.defaults import ALIASES, ENCODER_DECODERS, ENCODERS
from reblock.model_spec.fields import ModelFields, dtype_name
from reblock.model_spec.layers import LayerCache, read_layers
from reblock.model_spec.linears import Linears, LinearShape, read_linears
from reblock.model_spec.parameters import count_parameters
from reblock.model_spec.weights import WeightBytes, read_weight_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LayerCache",
    "LinearShape",
    "Linears",
    "ModelSpec",
    "WeightBytes",
    "parse_model_config",
    "read_weight_bytes",
]

# Where models of several parts keep what the language model is.
_TEXT_KEYS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
)
_SENSE_KEYS = ("vision_config", "audio_config")
_MAX_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What memory depends on in a model.

    `dtype` is what the checkpoint says of itself, and `kv_cache_dtype` what it says of the cache
    it was quantized for; None where it says nothing. `num_parameters` counts the language model,
    and `linears` its linear layers; None where its architecture is not known. Of the widths, which
    only the memory to compute in depends on, any may be None. `notes` are sentences on what is not
    known or was assumed.
    """

    model_type: str
    architecture: str
    dtype: str | None
    max_position_embeddings: int | None
    layers: tuple[LayerCache, ...]
    num_parameters: int | None
    linears: Linears | None
    hidden_size: int | None
    intermediate_size: int | None
    num_attention_heads: int | None
    vocab_size: int | None
    is_quantized: bool
    kv_cache_dtype: str | None
    notes: tuple[str, ...]

    def bytes_per_token(self, kv_dtype_bytes: int) -> int:
        """Return what all layers keep of a token that is in every window."""
        return _elements_per_token(self.layers) * kv_dtype_bytes

    def full_bytes_per_token(self, kv_dtype_bytes: int) -> int:
        """Return what a token costs for ever: in the layers that keep all tokens."""
        full = [layer for layer in self.layers if layer.window is None]
        return _elements_per_token(full) * kv_dtype_bytes

    def cache_bytes(self, num_tokens: int, kv_dtype_bytes: int) -> int:
        """Return what one sequence of that length takes: windows capped, states included."""
        return self.state_bytes(kv_dtype_bytes) + sum(
            layer.elements_per_token
            * kv_dtype_bytes
            * (num_tokens if layer.window is None else min(num_tokens, layer.window))
            for layer in self.layers
        )

    def state_bytes(self, kv_dtype_bytes: int) -> int:
        """Return what a sequence takes however long it is: recurrent and convolution states."""
        return sum(
            layer.state_elements * (layer.state_dtype_bytes or kv_dtype_bytes)
            for layer in self.layers
        )


def parse_model_config(text: str | bytes, *, path: str) -> ModelSpec:
    """Return what the `config.json` of a model says; `path` is named in errors.

    Raises:
        CorruptArtifact: It is no valid JSON object, or a value is not what it must be.
        UnsupportedModel: It is no decoder-only language model, or it is not said how many layers,
            heads or elements it has.

    >>> text = '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,'
    >>> text += '"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}'
    >>> parse_model_config(text, path="config.json").bytes_per_token(2)
    131072
    """
    whole = parse_json_object(text, path=path, has_constants=True)
    top = ModelFields(whole, path=path, model_type="")
    model_type = top.text("model_type") or ""
    architecture = next(iter(top.texts("architectures") or ()), "")
    _refuse_encoder(top, model_type, architecture)
    fields = _language_model(whole, path, model_type)
    if not fields.is_known:
        fields.note(
            f"The model type {fields.model_type or 'that config.json does not name'!r} is not "
            "known; its layers are read by the usual keys."
        )
    layers = read_layers(fields)
    if drafting := fields.integer("num_nextn_predict_layers", minimum=0):
        fields.note(
            f"Layers that only draft tokens ({drafting}) are counted neither as cache nor as "
            "parameters."
        )
    num_parameters = _num_parameters(fields, is_part=_has_parts(whole))
    return ModelSpec(
        model_type=model_type or fields.model_type,
        architecture=architecture,
        dtype=_dtype(fields) or _dtype(top),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        layers=layers,
        num_parameters=num_parameters,
        linears=None if num_parameters is None else read_linears(fields),
        hidden_size=_width(fields, "hidden_size"),
        intermediate_size=_intermediate_size(fields),
        num_attention_heads=_width(fields, "num_attention_heads"),
        vocab_size=_width(fields, "vocab_size"),
        kv_cache_dtype=_kv_cache_dtype(top) or _kv_cache_dtype(fields),
        is_quantized=any(
            part.has(key)
            for part in (top, fields)
            for key in ("quantization_config", "quantization")
        ),
        notes=tuple(fields.notes),
    )


def _refuse_encoder(top: ModelFields, model_type: str, architecture: str) -> None:
    is_encoder = model_type in ENCODERS and not top.boolean("is_decoder")
    if (
        is_encoder
        or model_type in ENCODER_DECODERS
        or top.boolean("is_encoder_decoder")
        or architecture.endswith("ForMaskedLM")
    ):
        raise UnsupportedModel(
            f"{top.path}: {architecture or model_type} is no decoder-only language model, and "
            "only these have a KV cache of blocks",
            model=top.path,
        )


def _language_model(whole: dict[str, object], path: str, model_type: str) -> ModelFields:
    """Return the part of the configuration that describes the language model."""
    values, kind = whole, _known(model_type)
    for _ in range(_MAX_PARTS):
        key = next((key for key in _TEXT_KEYS if isinstance(values.get(key), dict)), None)
        if key is None:
            break
        inner = values[key]
        assert isinstance(inner, dict)
        name = inner.get("model_type")
        if isinstance(name, str):
            kind = _known(name)
        values = _inherit(values, inner)
    return ModelFields(values, path=path, model_type=kind)


def _has_parts(whole: dict[str, object]) -> bool:
    return any(isinstance(whole.get(key), dict) for key in (*_TEXT_KEYS, *_SENSE_KEYS))


def _inherit(outer: dict[str, object], inner: dict[str, object]) -> dict[str, object]:
    shared = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
    return {**shared, **inner}


def _known(model_type: str) -> str:
    return ALIASES.get(model_type, model_type)


def _dtype(fields: ModelFields) -> str | None:
    return dtype_name(fields.text("dtype")) or dtype_name(fields.text("torch_dtype"))


def _width(fields: ModelFields, name: str) -> int | None:
    """Return a width of the model, the largest where every layer has its own."""
    if fields.is_list(name):
        return max(fields.integers(name) or (), default=None)
    return fields.integer(name, noted=False)


def _intermediate_size(fields: ModelFields) -> int | None:
    hidden = _width(fields, "hidden_size")
    # GPT-2 and those after it, where the file does not say otherwise.
    return _width(fields, "intermediate_size") or (None if hidden is None else 4 * hidden)


def _kv_cache_dtype(fields: ModelFields) -> str | None:
    """Return the type of the cache that a quantized checkpoint asks for, None where it does not."""
    quantization = fields.nested("quantization_config")
    scheme = None if quantization is None else quantization.nested("kv_cache_scheme")
    if scheme is None or scheme.integer("num_bits") != 8:
        return None
    return "int8" if scheme.text("type") == "int" else "float8_e4m3fn"


def _num_parameters(fields: ModelFields, *, is_part: bool) -> int | None:
    number = count_parameters(fields)
    if number is None:
        fields.note(f"Parameters of {fields.model_type} models are not counted.")
    elif is_part:
        fields.note("Parameters are of the language model alone, without what reads other inputs.")
    return number


def _elements_per_token(layers: Sequence[LayerCache]) -> int:
    return sum(layer.elements_per_token for layer in layers)
