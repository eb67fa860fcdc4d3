"""How large the weights of a model will be once it is compiled, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reblock.config import DTYPE_BYTES
from reblock.errors import UnsupportedModel
from reblock.planning.result import Term
from reblock.units import format_gib

if TYPE_CHECKING:
    from reblock.model_spec import ModelSpec
    from reblock.planning.sources import ModelSource

__all__ = [
    "PlannedWeights",
    "parameter_notes",
    "plan_weights",
    "planned_weights",
    "unnamed_dtype",
]

_PERCENT_NOTED = 2
_STORED_IN = {
    "index": "the index of its safetensors files",
    "headers": "the headers of its safetensors files",
    "bin": "the size of its .bin files",
    "gguf": "the header of the GGUF file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeights:
    """The weights of all devices together; `dtype` is None where they stay as they are stored."""

    num_bytes: int
    dtype: str | None
    term: Term
    notes: tuple[str, ...]


def plan_weights(model: ModelSource, dtype: str | None, given_bytes: int | None) -> PlannedWeights:
    """Return the bytes of the weights in `dtype`, None for as they are stored.

    `given_bytes` is what the user knows them to take, and then decides.

    Raises:
        UnsupportedModel: Neither files of weights nor the architecture tell.
    """
    if given_bytes is not None:
        planned = planned_weights(given_bytes, dtype, "weight_bytes, as it was given", error=None)
        return replace(planned, term=replace(planned.term, basis="given"))
    if dtype is None:
        return _as_stored(model)
    return _converted(model, dtype)


def unnamed_dtype(spec: ModelSpec) -> str:
    """Return the type to assume where config.json names none that is known."""
    # Old configurations leave out what is transformers' own default. Quantized models were made
    # after bfloat16 had become what models are trained in.
    return "bfloat16" if spec.is_quantized else "float32"


def _as_stored(model: ModelSource) -> PlannedWeights:
    stored, spec = model.stored, model.spec
    if stored is not None and stored.num_bytes:
        error = 0 if stored.is_exact else None
        notes = _unlike_architecture(spec, stored.num_bytes)
        text = _STORED_IN[stored.source]
        return planned_weights(stored.num_bytes, None, text, error=error, notes=notes)
    dtype = spec.dtype if spec.dtype in DTYPE_BYTES else unnamed_dtype(spec)
    planned = _converted(model, dtype)
    if not spec.is_quantized:
        return planned
    note = (
        f"The weights are quantized, and how large that makes them is not known without them: "
        f"they are counted as {dtype}, which is more than they take."
    )
    text = f"{planned.term.source}, as if they were not quantized"
    return planned_weights(planned.num_bytes, None, text, error=None, notes=(*planned.notes, note))


def _converted(model: ModelSource, dtype: str) -> PlannedWeights:
    spec, stored = model.spec, model.stored
    size = DTYPE_BYTES[dtype]
    if spec.num_parameters is not None:
        text = f"{spec.num_parameters:,} parameters by its architecture, {dtype}"
        notes = parameter_notes(model)
        return planned_weights(spec.num_parameters * size, dtype, text, error=0, notes=notes)
    if stored is not None and stored.num_elements is not None:
        text = f"{stored.num_elements:,} elements by {_STORED_IN[stored.source]}, {dtype}"
        return planned_weights(stored.num_elements * size, dtype, text, error=0)
    if stored is not None and spec.dtype in DTYPE_BYTES and not spec.is_quantized:
        num_bytes = stored.num_bytes * size // DTYPE_BYTES[spec.dtype]
        text = f"{_STORED_IN[stored.source]}, from {spec.dtype} to {dtype}"
        return planned_weights(num_bytes, dtype, text, error=0 if stored.is_exact else None)
    raise UnsupportedModel(
        f"{model.name!r}: parameters of the model type {spec.model_type!r} are not counted, and "
        "there are no weights to look at, so how large they are cannot be told; give "
        "weight_bytes, or name a directory that has them beside config.json",
        model=model.name,
    )


def _unlike_architecture(spec: ModelSpec, stored_bytes: int) -> tuple[str, ...]:
    """Return a note where the files hold another amount than the architecture would."""
    if spec.num_parameters is None or spec.is_quantized or spec.dtype not in DTYPE_BYTES:
        return ()
    expected = spec.num_parameters * DTYPE_BYTES[spec.dtype]
    if abs(expected - stored_bytes) * 100 <= _PERCENT_NOTED * expected:
        return ()
    note = (
        f"The files hold {format_gib(stored_bytes)} of weights, and the language model in "
        f"{spec.dtype} would be {format_gib(expected)}; the former is counted."
    )
    return (note,)


def parameter_notes(model: ModelSource) -> tuple[str, ...]:
    """Return a note where the files hold another number of parameters than the architecture."""
    counted = model.spec.num_parameters
    stored = None if model.stored is None else model.stored.num_elements
    if counted is None or stored is None:
        return ()
    if abs(counted - stored) * 100 <= _PERCENT_NOTED * counted:
        return ()
    note = (
        f"The architecture has {counted:,} parameters, the files hold {stored:,}; the "
        "former are counted."
    )
    return (note,)


def planned_weights(
    num_bytes: int,
    dtype: str | None,
    source: str,
    *,
    error: int | None,
    notes: tuple[str, ...] = (),
) -> PlannedWeights:
    """Return weights whose bytes are off by `error`, None where that is not known."""
    term = Term(
        name="Weight",
        num_bytes=num_bytes,
        basis="exact" if error == 0 else "estimate",
        error_bytes=error,
        source=source,
    )
    return PlannedWeights(num_bytes=num_bytes, dtype=dtype, term=term, notes=notes)
