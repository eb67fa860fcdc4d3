"""Modules with packed weights, and a model's own replaced by them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from reblock.backends.torch.native import ops
from reblock.backends.torch.native.pack import dequantize, pack, quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PackedEmbedding", "PackedLinear", "replace_linears", "rounded_linears"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Parameters that several modules may share."""

    weight: nn.Parameter
    scales: nn.Parameter | None


class PackedLinear(nn.Module):
    """A linear layer whose `weight` is packed."""

    def __init__(self, packed: _Packed, bias: Tensor | None, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.weight = packed.weight
        self.scales = packed.scales
        # Added to sums in float32, so it is kept in it.
        self.bias = None if bias is None else _parameter(bias.detach().to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight, plus the bias, in x's type."""
        y: Tensor = ops.linear(x, self.weight, self.scales, self.bias, self.out_features)
        return y


class PackedEmbedding(nn.Embedding):
    """An embedding that reads its rows out of the packed weight of the model's head."""

    scales: nn.Parameter | None
    row_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Embedding calls it
        """Return the rows of `input`, in the type the embedding had before it was packed."""
        rows: Tensor = ops.embedding(
            input,
            self.weight,
            self.scales,
            self.num_embeddings,
            self.embedding_dim,
            self.row_dtype,
        )
        return rows


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _pack(weight: Tensor, dtype: torch.dtype) -> _Packed:
    if dtype == torch.int8:
        quantized = quantize(weight)
        return _Packed(_parameter(pack(quantized.weight)), _parameter(quantized.scales))
    return _Packed(_parameter(pack(weight.to(dtype))), None)


def _paths_by_weight(model: nn.Module) -> list[list[str]]:
    """Return the paths of the linear layers, those that share a weight together."""
    from transformers.pytorch_utils import Conv1D

    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        # Not what is derived from them: it may use its weight in ways of its own.
        if type(module) in (nn.Linear, Conv1D):
            paths.setdefault(id(module.weight), []).append(path)
    return list(paths.values())


def _embeddings_by_weight(model: nn.Module) -> dict[int, nn.Embedding]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(module.weight): module for module in embeddings}


def _can_share(embedding: nn.Embedding, dtype: torch.dtype) -> bool:
    """Return whether an embedding can read a packed weight of that type."""
    # A class of its own may look at the type of its weight, which must then stay what it is.
    return dtype == embedding.weight.dtype or type(embedding) is nn.Embedding


def _share(embedding: nn.Embedding, packed: _Packed, row_dtype: torch.dtype) -> None:
    """Let an embedding read the packed weight; what its own class adds to the rows, it still does.

    The class made here stands behind the embedding's own and before nn.Embedding, so that
    `super().forward` of the former is ours.
    """
    own = type(embedding)
    bases = (PackedEmbedding,) if own is nn.Embedding else (own, PackedEmbedding)
    embedding.__class__ = type(f"Packed{own.__name__}", bases, {})
    packed_embedding = cast("PackedEmbedding", embedding)
    packed_embedding.weight = packed.weight
    packed_embedding.scales = packed.scales
    packed_embedding.row_dtype = row_dtype


def replace_linears(model: nn.Module, weight_dtype: torch.dtype | None = None) -> None:
    """Replace the linear layers of a model, in place, by layers with packed weights.

    An embedding that shares its weight with one of them reads the packed weight, so that there
    is one copy of it. Each weight is packed by itself, and what it was packed from is let go.

    Args:
        model: a Hugging Face model, on the meta device or with its weights.
        weight_dtype: what to keep the weights in: float32, bfloat16, or int8 with a scale for each
            output. None leaves them in their type.
    """
    embeddings = _embeddings_by_weight(model)
    for paths in _paths_by_weight(model):
        module = model.get_submodule(paths[0])
        original = module.get_parameter("weight")
        weight = original.detach() if type(module) is nn.Linear else original.detach().T
        dtype = weight_dtype or weight.dtype
        packed = _pack(weight, dtype)
        embedding = embeddings.get(id(original))
        if embedding is not None and _can_share(embedding, dtype):
            _share(embedding, packed, weight.dtype)
        outputs, inputs = weight.shape
        for path in paths:
            bias = getattr(model.get_submodule(path), "bias", None)
            model.set_submodule(path, PackedLinear(packed, bias, inputs, outputs))


@contextmanager
def rounded_linears(model: nn.Module, weight_dtype: torch.dtype | None) -> Iterator[None]:
    """Let a model compute with the weights that `replace_linears` would keep, inside the block.

    It does so with torch's own operators and sums in float32, so it shows what the packed layers
    should answer. Each weight is rounded when it is used and then let go, to take little memory.
    """
    rounded: list[nn.Module] = []
    if weight_dtype is not None:
        embeddings = _embeddings_by_weight(model)
        for paths in _paths_by_weight(model):
            rounded += [model.get_submodule(path) for path in paths]
            embedding = embeddings.get(id(rounded[-1].weight))
            if embedding is not None and _can_share(embedding, weight_dtype):
                rounded.append(embedding)
    try:
        for module in rounded:
            assert weight_dtype is not None
            cast("Any", module).forward = _rounded_forward(module, weight_dtype)
        yield
    finally:
        for module in rounded:
            del cast("Any", module).forward


def _rounded_forward(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = module.get_parameter("weight").detach()

    def look_up(ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, _rounded(weight, dtype)).to(weight.dtype)

    def multiply(x: Tensor) -> Tensor:
        # Else it is a Conv1D, whose weight lies the other way.
        of_outputs = weight if isinstance(module, nn.Linear) else weight.T
        bias = getattr(module, "bias", None)
        added = None if bias is None else bias.detach().to(torch.float32)
        wide = nn.functional.linear(x.to(torch.float32), _rounded(of_outputs, dtype), added)
        return wide.to(x.dtype)

    return look_up if isinstance(module, nn.Embedding) else multiply


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight as it is after being kept in `dtype`, in float32."""
    if dtype == torch.int8:
        return dequantize(quantize(weight))
    return weight.to(dtype).to(torch.float32)
