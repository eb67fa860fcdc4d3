"""What the weights of a model take where its linear layers are packed, as they are on the cpu.

    a linear layer   ceil(outputs / 16) * 16 * whole words of its inputs, in the type of weights
                     int8 has a float32 scale for each output besides
    its bias         float32, as the routers of some mixtures of experts
    all else         embeddings, norms, experts: in the type of the programs

`reblock.backends.torch.native.pack` packs them; a tied embedding reads the weight of the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reblock.config import DTYPE_BYTES
from reblock.errors import UnsupportedModel
from reblock.planning.weights import parameter_notes, plan_weights, planned_weights

if TYPE_CHECKING:
    from reblock.model_spec import Linears, LinearShape
    from reblock.planning.sources import ModelSource
    from reblock.planning.weights import PlannedWeights

__all__ = ["plan_packed_weights"]

_PANEL = 16
_WORD_BYTES = 4
_FLOAT32_BYTES = DTYPE_BYTES["float32"]


def plan_packed_weights(
    model: ModelSource, dtype: str, weight_dtype: str, given_bytes: int | None
) -> PlannedWeights:
    """Return the bytes of the weights with linear layers in `weight_dtype` and the rest in `dtype`.

    `given_bytes` is what the user knows them to take, and then decides.

    Raises:
        UnsupportedModel: Neither files of weights nor the architecture tell.
    """
    spec = model.spec
    if given_bytes is not None:
        return plan_weights(model, weight_dtype, given_bytes)
    if spec.num_parameters is None or spec.linears is None:
        if weight_dtype != dtype:
            raise UnsupportedModel(
                f"{model.name!r}: linear layers of the model type {spec.model_type!r} are not "
                f"counted, so how large its weights are with weight_dtype={weight_dtype!r} cannot "
                "be told; leave weight_dtype out, or give weight_bytes",
                model=model.name,
            )
        return _not_exact(plan_weights(model, dtype, None))
    rest = spec.num_parameters - spec.linears.num_elements
    num_bytes = rest * DTYPE_BYTES[dtype] + _linear_bytes(spec.linears, weight_dtype)
    text = f"{spec.num_parameters:,} parameters by its architecture, {weight_dtype}"
    if weight_dtype != dtype:
        text += f" in linear layers, else {dtype}"
        if spec.linears.has_copy:
            num_bytes += spec.linears.head.outputs * spec.linears.head.inputs * DTYPE_BYTES[dtype]
    notes = parameter_notes(model)
    return planned_weights(num_bytes, weight_dtype, text, error=0, notes=notes)


def _linear_bytes(linears: Linears, dtype: str) -> int:
    weights = sum(count * _packed_bytes(shape, dtype) for shape, count in linears.shapes)
    return weights + linears.num_float32 * _FLOAT32_BYTES


def _packed_bytes(shape: LinearShape, dtype: str) -> int:
    words = -(-shape.inputs * DTYPE_BYTES[dtype] // _WORD_BYTES)
    scales = shape.outputs * _FLOAT32_BYTES if dtype == "int8" else 0
    return -(-shape.outputs // _PANEL) * _PANEL * words * _WORD_BYTES + scales


def _not_exact(planned: PlannedWeights) -> PlannedWeights:
    # What packing fills up is known of counted layers only; it is little.
    term = planned.term
    return replace(planned, term=replace(term, basis="estimate", error_bytes=None))
