"""A decoder-only model as three kinds of pieces: what runs before, in, and after its layers.

    prologue(ids, positions)           -> hidden, shared...     embeddings, rotary tables
    layer(hidden, shared..., cache)    -> hidden                once for every layer
    epilogue(hidden)                   -> logits                last norm, head

Layers of a model are mostly alike: same code, same shapes, other weights. Each kind is compiled
once, with its weights as inputs, and run as often as the model has such layers; so neither the
time to compile nor the size of a program grows with the depth.

The pieces are cut out of a model's own forward pass. Its layers are replaced, for one call, by
recorders that note what they are called with, so nothing here knows an architecture by name.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from reblock.backends.torch.attention import attending
from reblock.backends.torch.refusal import NotCompilable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reblock.backends.torch.attention import AttentionCall

__all__ = [
    "LayerCall",
    "LayerShape",
    "Structure",
    "nonlayer_tensors",
    "record_calls",
    "replaced_layers",
    "run_model",
    "study",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """How a model calls one of its layers.

    `leaves` are the arguments, flattened: "hidden", a place in `shared`, or a `Constant`; `spec`
    rebuilds (args, kwargs) from them. `shared` names the prologue's tensors that this layer is
    given, each once, in the order of its arguments.
    """

    leaves: tuple[object, ...]
    spec: pytree.TreeSpec
    shared: tuple[int, ...]

    def arguments(self, hidden: Tensor, shared: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
        """Return (args, kwargs) for the layer; `shared` are its own, in its own order."""
        values = []
        for leaf in self.leaves:
            if isinstance(leaf, Constant):
                values.append(leaf.value)
            elif isinstance(leaf, int):
                values.append(shared[leaf])
            else:
                values.append(hidden)
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return args, kwargs

    @property
    def form(self) -> object:
        """What must be equal for two layers to be called by the same code."""
        return self.leaves, self.spec


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is no tensor, and so part of the compiled code."""

    value: object

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The cache that one layer needs."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What was learned about a model.

    `kinds[i]` is the first layer that runs the same code as layer i, `shared[i]` are the
    prologue's tensors that layer i is given.
    """

    layers_path: str
    shapes: tuple[LayerShape, ...]
    kinds: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    returns_tuple: bool


class _Examiner:
    """Notes what the attention of each layer is called with, on shapes alone."""

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self.calls: list[tuple[LayerShape, AttentionCall]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        shape = LayerShape(
            num_kv_heads=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            window=None if call.window is None or call.window >= self._max_seq_len else call.window,
        )
        if key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2]:
            raise NotCompilable("its attention gets keys that are not those of the tokens given")
        self.calls.append((shape, call))
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def run_model(model: nn.Module, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits [B, T, vocabulary] of a whole model, which keeps no cache of its own."""
    logits: Tensor = model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
    return logits


def find_layers(model: nn.Module, num_layers: int) -> str:
    """Return the path of the list that holds the model's layers.

    Raises:
        NotCompilable: there is no such list, or more than one.
    """
    paths = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    outermost = [path for path in paths if not any(path.startswith(other + ".") for other in paths)]
    if len(outermost) != 1:
        raise NotCompilable(
            f"it has {len(outermost)} lists of {num_layers} layers ({', '.join(outermost)}); "
            "exactly one is expected of a decoder-only model"
        )
    path: str = outermost[0]
    return path


@contextmanager
def replaced_layers(
    model: nn.Module, layers_path: str, forwards: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    """Let every layer of the model do `forwards[i]` in place of its own work inside the block."""
    layers = list(model.get_submodule(layers_path).children())
    for layer, forward in zip(layers, forwards, strict=True):
        # On the object: attributes that a model reads off its layers stay what they are.
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def record_calls(
    model: nn.Module,
    layers_path: str,
    returns_tuple: bool,
    input_ids: Tensor,
    positions: Tensor,
) -> tuple[Tensor, list[Tensor], list[LayerCall]]:
    """Run everything in front of the layers.

    Returns:
        The first layer's hidden states [B, T, hidden], every other tensor that any layer is
        given (each once, in the order of first use), and how each layer is called.
    """
    num_layers = len(list(model.get_submodule(layers_path).children()))
    hidden: list[Tensor] = []
    shared: list[Tensor] = []
    index_of: dict[int, int] = {}
    calls: list[LayerCall] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        values, spec = pytree.tree_flatten((args, kwargs))
        state = args[0] if args else kwargs["hidden_states"]
        if not hidden:
            hidden.append(state)
        leaves: list[object] = []
        own: list[int] = []
        for value in values:
            if value is state:
                leaves.append("hidden")
            elif not isinstance(value, Tensor):
                leaves.append(Constant(value))
            else:
                if id(value) not in index_of:
                    index_of[id(value)] = len(shared)
                    shared.append(value)
                index = index_of[id(value)]
                if index not in own:
                    own.append(index)
                leaves.append(own.index(index))
        calls.append(LayerCall(leaves=tuple(leaves), spec=spec, shared=tuple(own)))
        return (state,) if returns_tuple else state

    with replaced_layers(model, layers_path, [record] * num_layers):
        run_model(model, input_ids, positions)
    if len(calls) != num_layers:
        raise NotCompilable(f"a forward pass ran {len(calls)} of its {num_layers} layers")
    return hidden[0], shared, calls


# Attributes that say where a layer stands and not what it does.
_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _describe(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(_describe(item) for item in value)
    if isinstance(value, dict):
        return tuple((repr(key), _describe(item)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return id(value.func), _describe(value.args), _describe(value.keywords)
    # Two layers that hold the same configuration object or function hold the same thing.
    return id(value)


def _fingerprint(layer: nn.Module) -> object:
    """Return a value that is equal for layers that run the same code on the same shapes."""
    modules = []
    for name, module in layer.named_modules():
        attributes = tuple(
            (key, _describe(value))
            for key, value in sorted(vars(module).items())
            if key not in _OF_EVERY_MODULE and key not in _PLACES
        )
        modules.append((name, type(module), attributes))
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    ]
    return tuple(modules), tuple(tensors)


def study(model: nn.Module, num_layers: int, max_seq_len: int) -> Structure:
    """Learn how a model is built by running it once on shapes alone.

    Args:
        model: with `reblock_paged` as its attention, on the meta device.
        num_layers: how many layers its configuration states.
        max_seq_len: the longest sequence; a layer whose window is no shorter sees everything.

    Raises:
        NotCompilable: it is not a plain stack of layers with one causal attention each.
    """
    layers_path = find_layers(model, num_layers)
    layers = list(model.get_submodule(layers_path).children())
    examiner = _Examiner(max_seq_len)
    counts: list[int] = []
    is_tuple: list[bool] = []

    def note(_module: nn.Module, _args: object, output: object) -> None:
        counts.append(len(examiner.calls))
        is_tuple.append(isinstance(output, tuple))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    positions = torch.arange(2, device="meta")[None]
    try:
        with torch.no_grad(), attending(examiner):
            run_model(model, ids, positions)
    finally:
        for hook in hooks:
            hook.remove()
    if counts != list(range(1, num_layers + 1)):
        raise NotCompilable(
            f"its {num_layers} layers called the shared attention interface {len(examiner.calls)} "
            "times; exactly once a layer is needed to keep a cache for each"
        )
    if len(set(is_tuple)) != 1:
        raise NotCompilable("its layers return different kinds of results")
    with torch.no_grad():
        _, _, calls = record_calls(model, layers_path, is_tuple[0], ids, positions)
    keys = [
        (_fingerprint(layer), call.form, shape, attention.scaling, attention.softcap)
        for layer, call, (shape, attention) in zip(layers, calls, examiner.calls, strict=True)
    ]
    return Structure(
        layers_path=layers_path,
        shapes=tuple(shape for shape, _ in examiner.calls),
        kinds=tuple(keys.index(key) for key in keys),
        shared=tuple(call.shared for call in calls),
        returns_tuple=is_tuple[0],
    )


def nonlayer_tensors(model: nn.Module, layers_path: str) -> dict[str, Tensor]:
    """Return the parameters and buffers outside the layers, tied ones once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if not name.startswith(layers_path + ".")}
