"""The pieces of a model as modules that `torch.export` takes, with their weights as inputs.

Every piece takes a flat list of tensors, so that the runner needs no tree of arguments. Weights
come last. B rows, T tokens a row, W blocks a table names; see attention.py for the caches. B, T, W
and the number of blocks are dynamic dimensions, so one compiled piece serves every program:
prefill calls it with B = 1 and a chunk of tokens, a decoder with T = 1.

    prologue   ids [B, T], positions [B, T], weights...       -> hidden [B, T, E], shared...
    layer      hidden, start [B], num_tokens [B], num_rows [1], tables [B, W] or slots [B],
               key cache, value cache, shared..., weights...  -> hidden; writes the caches
    last       the same for a prefill's last layer, with B = 1 -> hidden [1, 1, E] of its last token
    epilogue   hidden, num_tokens [B], weights...             -> logits [B, vocabulary], float32
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from reblock.backends.torch.attention import PagedCache, SlidingCache, Storing, attending
from reblock.backends.torch.refusal import NotCompilable
from reblock.backends.torch.structure import (
    LayerCall,
    Structure,
    nonlayer_tensors,
    record_calls,
    replaced_layers,
    run_model,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.backends.torch.attention import AttentionTarget

__all__ = [
    "PieceShapes",
    "cache_shape",
    "epilogue",
    "export_piece",
    "last_layer",
    "layer",
    "prologue",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceShapes:
    """How large the dimensions of the pieces can get, over all programs."""

    max_batch: int
    num_rings: int  # of a layer with a window: one for each sequence that may run
    max_tokens: int
    block_size: int
    max_seq_len: int

    @property
    def max_width(self) -> int:
        """The most blocks that one sequence has."""
        return -(-self.max_seq_len // self.block_size)


def cache_shape(
    structure: Structure, index: int, shapes: PieceShapes, num_blocks: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return the shapes of the key and the value cache of layer `index`."""
    shape = structure.shapes[index]
    if shape.window is not None:
        first, length = shapes.num_rings, shape.window
    else:
        first, length = num_blocks, shapes.block_size
    return (
        (first, shape.num_kv_heads, length, shape.key_size),
        (first, shape.num_kv_heads, length, shape.value_size),
    )


class _Prologue(nn.Module):
    def __init__(self, model: nn.Module, structure: Structure) -> None:
        super().__init__()
        # In a tuple, so that its weights are not taken for parameters of this module: they come
        # in as inputs.
        self._model = (model,)
        self._structure = structure
        self.names = tuple(nonlayer_tensors(model, structure.layers_path))

    def forward(self, input_ids: Tensor, positions: Tensor, *weights: Tensor) -> list[Tensor]:
        model, structure = self._model[0], self._structure
        recorder = _CallRecorder(model, structure)
        named = dict(zip(self.names, weights, strict=True))
        functional_call(
            recorder, {f"model.{k}": v for k, v in named.items()}, (input_ids, positions)
        )
        hidden, shared, _ = recorder.recorded
        # An output may not be an input itself.
        return [hidden, *(t.clone() if t is positions or t is input_ids else t for t in shared)]


class _CallRecorder(nn.Module):
    def __init__(self, model: nn.Module, structure: Structure) -> None:
        super().__init__()
        self.model = model
        self.structure = structure
        self.recorded: Any = None

    def forward(self, input_ids: Tensor, positions: Tensor) -> None:
        s = self.structure
        self.recorded = record_calls(
            self.model, s.layers_path, s.returns_tuple, input_ids, positions
        )


class _Layer(nn.Module):
    def __init__(self, module: nn.Module, call: LayerCall, is_sliding: bool) -> None:
        super().__init__()
        self._module = (module,)
        self._call = call
        self._is_sliding = is_sliding
        self.tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self.names = tuple(self.tensors)

    def forward(
        self,
        hidden: Tensor,
        start: Tensor,
        num_tokens: Tensor,
        num_rows: Tensor,
        where: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *rest: Tensor,
    ) -> Tensor:
        num_shared = len(self._call.shared)
        shared, weights = rest[:num_shared], rest[num_shared:]
        caches = {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "start": start,
            "num_tokens": num_tokens,
            "num_rows": num_rows,
        }
        cache: PagedCache | SlidingCache
        if self._is_sliding:
            cache = SlidingCache(**caches, slots=where)
        else:
            cache = PagedCache(**caches, block_tables=where)
        return self._answer(cache, hidden, shared, weights)

    def _answer(
        self,
        cache: PagedCache | SlidingCache,
        hidden: Tensor,
        shared: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        return self._call_module(cache, hidden, shared, weights)

    def _call_module(
        self,
        target: AttentionTarget,
        hidden: Tensor,
        shared: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        args, kwargs = self._call.arguments(hidden, shared)
        with attending(target):
            output = functional_call(
                self._module[0], dict(zip(self.names, weights, strict=True)), args, kwargs
            )
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


class _LastLayer(_Layer):
    """A layer of which only the last token's answer is wanted.

    All it does for the other tokens is to store their keys and values: the compiler drops what the
    first of the two calls computes besides.
    """

    def __init__(
        self,
        module: nn.Module,
        call: LayerCall,
        is_sliding: bool,
        token_dims: tuple[int | None, ...],
    ) -> None:
        super().__init__(module, call, is_sliding)
        self._token_dims = token_dims

    def _answer(
        self,
        cache: PagedCache | SlidingCache,
        hidden: Tensor,
        shared: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        self._call_module(Storing(cache), hidden, shared, weights)
        last = cache.num_tokens - 1  # [1]
        own = replace(cache, start=cache.start + last, num_tokens=torch.ones_like(cache.num_tokens))
        shared = tuple(
            tensor if dim is None else tensor.index_select(dim, last)
            for tensor, dim in zip(shared, self._token_dims, strict=True)
        )
        return self._call_module(own, hidden.index_select(1, last), shared, weights)


class _Epilogue(nn.Module):
    def __init__(self, model: nn.Module, structure: Structure) -> None:
        super().__init__()
        self._model = (model,)
        self._structure = structure
        self.names = tuple(nonlayer_tensors(model, structure.layers_path))

    def forward(self, hidden: Tensor, num_tokens: Tensor, *weights: Tensor) -> Tensor:
        model, structure = self._model[0], self._structure
        batch, _, size = hidden.shape
        at = (num_tokens - 1)[:, None, None].expand(batch, 1, size)
        last_B1E = torch.gather(hidden, 1, at)

        def give(*_args: Any, **_kwargs: Any) -> Any:
            return (last_B1E,) if structure.returns_tuple else last_B1E

        # What stands in front of the layers runs on token 0 and is dropped by the compiler.
        ids = torch.zeros((batch, 1), dtype=torch.int64)
        named = dict(zip(self.names, weights, strict=True))
        with replaced_layers(model, structure.layers_path, [give] * len(structure.kinds)):
            logits = functional_call(
                _Whole(model), {f"model.{k}": v for k, v in named.items()}, (ids,)
            )
        return logits[:, 0].to(torch.float32)


class _Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return run_model(self.model, input_ids, torch.zeros_like(input_ids))


def _zeros_like(named: Mapping[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    # Not filled in yet by the system, so they cost nothing however large the model is.
    return [torch.zeros(named[name].shape, dtype=named[name].dtype) for name in names]


def _dimension(index: int, name: str, longest: int) -> dict[int, Any]:
    # A dimension of one has nothing to vary.
    return {index: torch.export.Dim(name, min=1, max=longest)} if longest > 1 else {}


def _rows(shapes: PieceShapes) -> dict[int, Any]:
    return _dimension(0, "rows", shapes.max_batch)


def _rows_tokens(shapes: PieceShapes) -> dict[int, Any]:
    return {**_rows(shapes), **_dimension(1, "tokens", shapes.max_tokens)}


def _like_at(
    small: Tensor, large: Tensor, shapes: PieceShapes
) -> tuple[Tensor, dict[int, Any] | None]:
    """Return an example, and its dynamic dimensions, of a tensor that was seen at two shapes."""
    meanings = {
        (_SMALL[0], _LARGE[0]): (shapes.max_batch, _rows(shapes).get(0)),
        (_SMALL[1], _LARGE[1]): (
            shapes.max_tokens,
            _dimension(0, "tokens", shapes.max_tokens).get(0),
        ),
    }
    sizes: list[int] = []
    dynamic: dict[int, Any] = {}
    for index, pair in enumerate(zip(small.shape, large.shape, strict=True)):
        size, dimension = (pair[0], None) if pair[0] == pair[1] else meanings.get(pair, (0, None))
        if size == 0:
            raise NotCompilable(
                "what it prepares for its layers has a dimension that is neither the rows nor the "
                f"tokens: {tuple(small.shape)} for {_SMALL}, {tuple(large.shape)} for {_LARGE}"
            )
        sizes.append(size)
        if dimension is not None:
            dynamic[index] = dimension
    return torch.zeros(sizes, dtype=small.dtype), dynamic or None


# Rows and tokens to try a model with, so that each dimension of a result tells what it is.
_SMALL, _LARGE = (2, 3), (5, 7)


def _ids(shapes: PieceShapes) -> tuple[Tensor, Tensor]:
    ids = torch.zeros((shapes.max_batch, shapes.max_tokens), dtype=torch.int64)
    return ids, torch.arange(shapes.max_tokens)[None].expand_as(ids).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module to export, example inputs for it, and which of their dimensions may vary."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    dynamic_shapes: dict[str, Any]


def prologue(model: nn.Module, structure: Structure, shapes: PieceShapes) -> Piece:
    """Return the piece in front of the layers."""
    module = _Prologue(model, structure)
    weights = _zeros_like(nonlayer_tensors(model, structure.layers_path), module.names)
    return Piece(
        module=module,
        inputs=(*_ids(shapes), *weights),
        dynamic_shapes={
            "input_ids": _rows_tokens(shapes),
            "positions": _rows_tokens(shapes),
            "weights": (None,) * len(weights),
        },
    )


def epilogue(model: nn.Module, structure: Structure, shapes: PieceShapes) -> Piece:
    """Return the piece behind the layers."""
    module = _Epilogue(model, structure)
    weights = _zeros_like(nonlayer_tensors(model, structure.layers_path), module.names)
    hidden = _example(model, structure, shapes, 0).hidden
    return Piece(
        module=module,
        inputs=(hidden, torch.ones(shapes.max_batch, dtype=torch.int64), *weights),
        dynamic_shapes={
            "hidden": _rows_tokens(shapes),
            "num_tokens": _rows(shapes),
            "weights": (None,) * len(weights),
        },
    )


def layer(model: nn.Module, structure: Structure, shapes: PieceShapes, index: int) -> Piece:
    """Return the piece for layer `index` and all that are like it."""
    example = _example(model, structure, shapes, index)
    is_sliding = structure.shapes[index].window is not None
    module = _Layer(_module(model, structure, index), example.call, is_sliding)
    return _layer_piece(module, example, structure, shapes, index)


def last_layer(model: nn.Module, structure: Structure, shapes: PieceShapes, index: int) -> Piece:
    """Return the piece for layer `index` where it is the last one of a prefill."""
    one_row = replace(shapes, max_batch=1)
    example = _example(model, structure, one_row, index)
    is_sliding = structure.shapes[index].window is not None
    # The tokens are all that varies in a single row.
    dims = tuple(next(iter(dynamic), None) if dynamic else None for _, dynamic in example.shared)
    module = _LastLayer(_module(model, structure, index), example.call, is_sliding, dims)
    return _layer_piece(module, example, structure, one_row, index)


def _module(model: nn.Module, structure: Structure, index: int) -> nn.Module:
    return model.get_submodule(f"{structure.layers_path}.{index}")


def _layer_piece(
    module: _Layer, example: _Example, structure: Structure, shapes: PieceShapes, index: int
) -> Piece:
    weights = _zeros_like(module.tensors, module.names)
    width = shapes.max_width
    num_blocks = max(2, shapes.max_batch) * width
    key_shape, value_shape = cache_shape(structure, index, shapes, num_blocks)
    dtype = example.hidden.dtype
    if structure.shapes[index].window is not None:
        where = torch.arange(shapes.max_batch)
        where_dims, cache_dims = _rows(shapes), None
    else:
        where = torch.arange(shapes.max_batch * width).reshape(shapes.max_batch, width)
        where_dims = {**_rows(shapes), **_dimension(1, "width", width)}
        cache_dims = {0: torch.export.Dim("num_blocks", min=1, max=2**31 - 1)}
    rest = (*(tensor for tensor, _ in example.shared), *weights)
    inputs = (
        example.hidden,
        torch.zeros(shapes.max_batch, dtype=torch.int64),
        torch.full((shapes.max_batch,), shapes.max_tokens, dtype=torch.int64),
        torch.full((1,), shapes.max_batch, dtype=torch.int64),
        where,
        torch.zeros(key_shape, dtype=dtype),
        torch.zeros(value_shape, dtype=dtype),
        *rest,
    )
    dynamic_shapes = {
        "hidden": _rows_tokens(shapes),
        "start": _rows(shapes),
        "num_tokens": _rows(shapes),
        "num_rows": None,
        "where": where_dims,
        "key_cache": cache_dims,
        "value_cache": cache_dims,
        "rest": (*(dynamic for _, dynamic in example.shared), *(None for _ in weights)),
    }
    return Piece(module=module, inputs=inputs, dynamic_shapes=dynamic_shapes)


@dataclass(frozen=True, slots=True)
class _Example:
    """Inputs of a layer by example, with their dynamic dimensions, and how it is called."""

    hidden: Tensor
    shared: list[tuple[Tensor, dict[int, Any] | None]]
    call: LayerCall


def _example(model: nn.Module, structure: Structure, shapes: PieceShapes, index: int) -> _Example:
    def record(rows: int, tokens: int) -> tuple[Tensor, list[Tensor], list[LayerCall]]:
        ids = torch.zeros((rows, tokens), dtype=torch.int64, device="meta")
        positions = torch.arange(tokens, device="meta")[None].expand_as(ids).contiguous()
        with torch.no_grad():
            return record_calls(
                model, structure.layers_path, structure.returns_tuple, ids, positions
            )

    hidden, small, calls = record(*_SMALL)
    _, large, _ = record(*_LARGE)
    call = calls[index]
    return _Example(
        torch.zeros((shapes.max_batch, shapes.max_tokens, hidden.shape[2]), dtype=hidden.dtype),
        [_like_at(small[i], large[i], shapes) for i in call.shared],
        call,
    )


def export_piece(piece: Piece) -> torch.export.ExportedProgram:
    """Return the piece's graph."""
    with torch.no_grad():
        return torch.export.export(
            piece.module, piece.inputs, dynamic_shapes=piece.dynamic_shapes, strict=False
        )
