"""The pieces of a model as modules that `torch.export` takes, with their weights as inputs.

Every piece takes a flat list of tensors, so that the runner needs no tree of arguments. Weights
come last. B rows, T tokens a row, W blocks a table names; see attention.py for the caches.

    prologue   ids [B, T], positions [B, T], weights...       -> hidden [B, T, E], shared...
    layer      hidden, start [B], num_tokens [B], num_rows [1], tables [B, W] or slots [B],
               key cache, value cache, shared..., weights...  -> hidden; writes the caches
    epilogue   hidden, num_tokens [B], weights...             -> logits [B, vocabulary], float32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from reblock.backends.torch.attention import PagedCache, SlidingCache, attending
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

__all__ = ["PieceShapes", "cache_shape", "epilogue", "export_piece", "layer", "prologue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceShapes:
    """The shapes of one program: a prefill of one row, or a decode of one token a row."""

    batch: int
    tokens: int
    block_size: int
    max_seq_len: int
    max_batch: int

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
        first, length = shapes.max_batch, shape.window
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
        functional_call(recorder, {f"model.{k}": v for k, v in named.items()}, (input_ids, positions))
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
    def __init__(self, module: nn.Module, call: LayerCall, shapes: PieceShapes, sliding: bool) -> None:
        super().__init__()
        self._module = (module,)
        self._call = call
        self._shapes = shapes
        self._sliding = sliding
        named = [*module.named_parameters(), *module.named_buffers()]
        self.names = tuple(name for name, _ in named)

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
        target: PagedCache | SlidingCache
        if self._sliding:
            target = SlidingCache(**caches, slots=where)
        else:
            target = PagedCache(**caches, block_tables=where)
        args, kwargs = self._call.arguments(hidden, shared)
        with attending(target):
            output = functional_call(
                self._module[0], dict(zip(self.names, weights, strict=True)), args, kwargs
            )
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


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
            logits = functional_call(_Whole(model), {f"model.{k}": v for k, v in named.items()}, (ids,))
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


def _ids(shapes: PieceShapes) -> tuple[Tensor, Tensor]:
    ids = torch.zeros((shapes.batch, shapes.tokens), dtype=torch.int64)
    return ids, torch.arange(shapes.tokens)[None].expand_as(ids).contiguous()


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
        dynamic_shapes={"input_ids": None, "positions": None, "weights": (None,) * len(weights)},
    )


def epilogue(model: nn.Module, structure: Structure, shapes: PieceShapes) -> Piece:
    """Return the piece behind the layers."""
    module = _Epilogue(model, structure)
    weights = _zeros_like(nonlayer_tensors(model, structure.layers_path), module.names)
    hidden, _ = _example_states(model, structure, shapes)
    return Piece(
        module=module,
        inputs=(hidden, torch.ones(shapes.batch, dtype=torch.int64), *weights),
        dynamic_shapes={"hidden": None, "num_tokens": None, "weights": (None,) * len(weights)},
    )


def layer(model: nn.Module, structure: Structure, shapes: PieceShapes, index: int) -> Piece:
    """Return the piece for layer `index` and all that are like it."""
    layers = model.get_submodule(structure.layers_path)
    assert isinstance(layers, nn.ModuleList)
    hidden, (shared, call) = _example_states(model, structure, shapes, index)
    is_sliding = structure.shapes[index].window is not None
    module = _Layer(layers[index], call, shapes, is_sliding)
    named = {n: t for n, t in [*layers[index].named_parameters(), *layers[index].named_buffers()]}
    weights = _zeros_like(named, module.names)
    width = shapes.max_width
    num_blocks = max(2, shapes.batch) * width
    key_shape, value_shape = cache_shape(structure, index, shapes, num_blocks)
    dtype = hidden.dtype
    if is_sliding:
        where = torch.arange(shapes.batch)
        where_dims, cache_dims = None, None
    else:
        where = torch.arange(shapes.batch * width).reshape(shapes.batch, width)
        where_dims = {1: torch.export.Dim("width", min=1, max=width)} if width > 1 else None
        cache_dims = {0: torch.export.Dim("num_blocks", min=1, max=2**31 - 1)}
    rest = (*shared, *weights)
    inputs = (
        hidden,
        torch.zeros(shapes.batch, dtype=torch.int64),
        torch.full((shapes.batch,), shapes.tokens, dtype=torch.int64),
        torch.full((1,), shapes.batch, dtype=torch.int64),
        where,
        torch.zeros(key_shape, dtype=dtype),
        torch.zeros(value_shape, dtype=dtype),
        *rest,
    )
    dynamic = {
        "hidden": None,
        "start": None,
        "num_tokens": None,
        "num_rows": None,
        "where": where_dims,
        "key_cache": cache_dims,
        "value_cache": cache_dims,
        "rest": (None,) * len(rest),
    }
    return Piece(module=module, inputs=inputs, dynamic_shapes=dynamic)


def _example_states(
    model: nn.Module, structure: Structure, shapes: PieceShapes, index: int = 0
) -> tuple[Tensor, tuple[list[Tensor], LayerCall]]:
    """Return zeros in the shapes of a layer's inputs, and how that layer is called."""
    ids, positions = (tensor.to("meta") for tensor in _ids(shapes))
    with torch.no_grad():
        hidden, shared, calls = record_calls(
            model, structure.layers_path, structure.returns_tuple, ids, positions
        )
    call = calls[index]
    own = [torch.zeros(shared[i].shape, dtype=shared[i].dtype) for i in call.shared]
    return torch.zeros(hidden.shape, dtype=hidden.dtype), (own, call)


def export_piece(piece: Piece) -> torch.export.ExportedProgram:
    """Return the piece's graph, lowered to core operators."""
    with torch.no_grad():
        exported = torch.export.export(
            piece.module, piece.inputs, dynamic_shapes=piece.dynamic_shapes, strict=False
        )
        return exported.run_decompositions()
