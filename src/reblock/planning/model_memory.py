"""The memory plan of a model that is not compiled yet: what its artifact would say of itself.

    parts    = devices * chiplets; everything is shared out over them
    weights  = bytes / parts
    a cache  = blocks * tokens * ceil(KV heads / parts) * width * bytes of a value
    latent   = whole on every part, as there is one head for all

The result is a `MemoryPlan`, as it is read from an artifact, and so sized by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from reblock.config import DTYPE_BYTES
from reblock.errors import InvalidOption, UnsupportedModel
from reblock.memory import CacheTensor, MemoryPlan, align
from reblock.options import resolve_weight_dtype
from reblock.planning.packed_weights import plan_packed_weights
from reblock.planning.result import CachedModel, LayerGroup, Term
from reblock.planning.torch_overhead import estimate_overhead
from reblock.planning.weights import plan_weights, unnamed_dtype
from reblock.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reblock.memory import Grid
    from reblock.model_spec import LayerCache, ModelSpec
    from reblock.options import Dtype, ResolvedOptions
    from reblock.planning.settings import PlanSettings
    from reblock.planning.sources import ModelSource
    from reblock.planning.target import Target
    from reblock.planning.weights import PlannedWeights

__all__ = ["ModelMemory", "PlannedModel", "cached_model", "choose_types"]

# What optimum-rbln 0.8 and 0.9 left free for every program on every device of 16 GiB, and the
# width they rounded heads up to (get_maximum_num_blocks). Nothing newer is published.
RBLN_PROGRAM_BYTES = 256 * MIB
RBLN_HEAD_STEP = 64

_CPU_DTYPES = ("float32", "bfloat16")
_MIN_STATE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model with the types it will be compiled in.

    `dtype` is the type that programs compute in, and `weights` may be stored in another.
    """

    source: ModelSource
    target: Target
    dtype: str
    kv_dtype: str
    weights: PlannedWeights
    notes: tuple[str, ...]

    @property
    def spec(self) -> ModelSpec:
        """What its config.json says."""
        return self.source.spec

    @property
    def kv_bytes(self) -> int:
        """The bytes of one element of keys and values."""
        return DTYPE_BYTES[self.kv_dtype]

    def memory(self, shapes: ResolvedOptions) -> ModelMemory:
        """Return what it keeps in memory once it is compiled for `shapes`."""
        weights, *others = terms = self._terms(shapes)
        grids = {term.name: self._everywhere(term.num_bytes) for term in others}
        static = {weights.name: self._weights_grid(), **grids}
        caches = tuple(_caches(self, shapes))
        return ModelMemory(
            plan=MemoryPlan(static=static, caches=caches, current_blocks=1),
            terms={term.name: term for term in terms},
        )

    def _terms(self, shapes: ResolvedOptions) -> list[Term]:
        if self.target.is_cpu:
            return [self.weights.term, *_cpu_overhead(self, shapes)]
        num_programs = 1 + len(shapes.decoder_batch_sizes)
        allowance = Term(
            name="Workspace",
            num_bytes=RBLN_PROGRAM_BYTES * num_programs,
            basis="allowance",
            error_bytes=None,
            source=(
                f"256 MiB for each of {num_programs} programs on every chiplet, as optimum-rbln "
                "0.9 allowed before it compiled; not measured"
            ),
        )
        weights = self.weights.term
        if weights.basis == "exact":
            # The bytes are known, but not what the compiler makes of them.
            source = (
                f"{weights.source}, shared out evenly over all chiplets; how "
                "the compiler lays them out is not known"
            )
            weights = replace(weights, basis="estimate", error_bytes=None, source=source)
        return [weights, allowance]

    def _weights_grid(self) -> Grid:
        share = -(-self.weights.num_bytes // self.target.num_parts)
        return self._everywhere(align(share) if self.target.num_parts > 1 else share)

    def _everywhere(self, num_bytes: int) -> Grid:
        return ((num_bytes,) * self.target.device.num_chiplets,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The plan of a model's memory, and where its terms that are not cache come from, by name.

    The plan is of one device, as everything is shared out evenly and all devices hold the same.

    The bytes of those terms are of all devices for the weights, else of one chiplet.
    """

    plan: MemoryPlan
    terms: Mapping[str, Term]


def choose_types(source: ModelSource, settings: PlanSettings, target: Target) -> PlannedModel:
    """Return the model with the types that it would be compiled in.

    Raises:
        InvalidOption: The device has no programs in a type that was asked for.
        UnsupportedModel: It cannot be told how large its weights are.
    """
    spec = source.spec
    notes: list[str] = []
    if target.is_cpu:
        dtype = kv_dtype = _cpu_dtype(spec, settings, notes)
        weight_dtype = resolve_weight_dtype(settings.weight_dtype, cast("Dtype", dtype))
        weights = plan_packed_weights(source, dtype, weight_dtype, settings.weight_bytes)
    else:
        _refuse_weight_dtype(settings, target)
        dtype = settings.dtype or _known_dtype(spec, notes)
        kv_dtype = settings.kv_dtype or spec.kv_cache_dtype or _cache_dtype(dtype)
        weights = plan_weights(source, settings.dtype, settings.weight_bytes)
    planned = PlannedModel(
        source=source,
        target=target,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
        notes=(*source.notes, *spec.notes, *notes, *weights.notes),
    )
    # What nothing can be said of should not cost a search first.
    if not any(layer.elements_per_token or layer.state_elements for layer in spec.layers):
        raise UnsupportedModel(f"{source.name!r} keeps nothing of a sequence", model=source.name)
    return planned


def _refuse_weight_dtype(settings: PlanSettings, target: Target) -> None:
    if settings.weight_dtype is not None:
        raise InvalidOption(
            f"weight_dtype={settings.weight_dtype!r} is for the cpu; on {target.device.name} dtype "
            "is the type of the weights, so give that",
            option="weight_dtype",
        )


def _cpu_dtype(spec: ModelSpec, settings: PlanSettings, notes: list[str]) -> str:
    dtype = settings.dtype
    if dtype is None:
        dtype = "bfloat16" if spec.dtype == "bfloat16" else "float32"
        if spec.dtype not in _CPU_DTYPES:
            kind = spec.dtype or "not named"
            notes.append(
                f"The type of the checkpoint is {kind}; for the cpu it is compiled in {dtype} "
                "unless dtype says otherwise."
            )
    for option, value in (("dtype", dtype), ("kv_dtype", settings.kv_dtype or dtype)):
        if value not in _CPU_DTYPES:
            also = "; for weights of 8 bits give weight_dtype=int8" if option == "dtype" else ""
            raise InvalidOption(
                f"{option}={value!r} is not compiled for the cpu; choose float32 or bfloat16{also}",
                option=option,
            )
    if settings.kv_dtype not in (None, dtype):
        raise InvalidOption(
            f"kv_dtype={settings.kv_dtype!r}: for the cpu keys and values are of the type of the "
            f"programs, {dtype}; leave kv_dtype out, or set dtype to it",
            option="kv_dtype",
        )
    return dtype


def _known_dtype(spec: ModelSpec, notes: list[str]) -> str:
    if spec.dtype in DTYPE_BYTES:
        return spec.dtype
    dtype = unnamed_dtype(spec)
    notes.append(
        f"The type of the checkpoint is {spec.dtype or 'not named in config.json'}; {dtype} is "
        "assumed for its cache. Give dtype or kv_dtype if it is another."
    )
    return dtype


def _cache_dtype(dtype: str) -> str:
    # Weights of 8 bits do not make the cache one of 8 bits.
    return dtype if DTYPE_BYTES[dtype] > 1 else "bfloat16"


def _cpu_overhead(model: PlannedModel, shapes: ResolvedOptions) -> Iterable[Term]:
    overhead = estimate_overhead(
        model.spec,
        dtype=model.dtype,
        batch_size=shapes.batch_size,
        max_seq_len=shapes.max_seq_len,
        prefill_chunk_size=shapes.prefill_chunk_size,
        decoder_batch_sizes=shapes.decoder_batch_sizes,
    )
    if overhead is None:
        raise UnsupportedModel(
            f"{model.source.name!r}: config.json does not say its hidden_size or its "
            "vocab_size, which the workspace on the cpu depends on",
            model=model.source.name,
        )
    text = "estimated from the shapes, calibrated on real compilations"
    yield Term(
        name="Runtime",
        num_bytes=overhead.runtime_bytes,
        basis="estimate",
        error_bytes=overhead.runtime_error_bytes,
        source=text,
    )
    yield Term(
        name="Workspace",
        num_bytes=overhead.workspace_bytes,
        basis="estimate",
        error_bytes=overhead.workspace_error_bytes,
        source=text,
    )


def _caches(model: PlannedModel, shapes: ResolvedOptions) -> Iterable[CacheTensor]:
    """Yield what every layer keeps, at one block, on every part."""
    for index, layer in enumerate(model.spec.layers):
        is_paged = layer.window is None or layer.window >= shapes.max_seq_len
        if is_paged:
            num_tokens = shapes.kvcache_block_size
        else:
            assert layer.window is not None
            num_tokens = shapes.batch_size * layer.window
        for name, elements in _widths(layer, model.target):
            if elements:
                num_bytes = num_tokens * elements * model.kv_bytes
                yield _tensor(model, f"{name}_{index}", num_bytes, is_resizable=is_paged)
        if layer.state_elements:
            elements = -(-layer.state_elements // model.target.num_parts)
            size = _state_bytes(layer, model.kv_bytes)
            num_bytes = shapes.batch_size * elements * size
            yield _tensor(model, f"states_{index}", num_bytes, is_resizable=False)


def _widths(layer: LayerCache, target: Target) -> Iterable[tuple[str, int]]:
    """Yield the elements that one part keeps of a token, tensor by tensor."""
    heads = -(-layer.num_kv_heads // target.num_parts)
    for name, width in (("keys", layer.key_width), ("values", layer.value_width)):
        yield name, heads * _padded(width, layer, target)
    yield "index", layer.index_width


def _padded(width: int, layer: LayerCache, target: Target) -> int:
    if target.is_cpu or layer.kind == "latent":
        return width
    return -(-width // RBLN_HEAD_STEP) * RBLN_HEAD_STEP


def _tensor(model: PlannedModel, name: str, num_bytes: int, *, is_resizable: bool) -> CacheTensor:
    grid = ((num_bytes,) * model.target.device.num_chiplets,)
    return CacheTensor(name=name, is_resizable=is_resizable, bytes_grid=grid)


def _state_bytes(layer: LayerCache, kv_bytes: int) -> int:
    # No engine keeps states in 8 bits.
    return layer.state_dtype_bytes or max(kv_bytes, _MIN_STATE_BYTES)


def cached_model(spec: ModelSpec, kv_dtype: str, max_seq_len: int) -> CachedModel:
    """Return what a model keeps of every token, for sequences of up to `max_seq_len`."""
    size = DTYPE_BYTES[kv_dtype]
    groups: dict[LayerCache, int] = {}
    for layer in spec.layers:
        # Whose cache a layer reads makes it no other kind of layer.
        kind = replace(layer, shares_with=None)
        groups[kind] = groups.get(kind, 0) + 1
    full = fixed = 0
    for layer, count in groups.items():
        per_token = count * layer.elements_per_token * size
        if layer.window is None or layer.window >= max_seq_len:
            full += per_token
        else:
            fixed += per_token * layer.window
        fixed += count * layer.state_elements * _state_bytes(layer, size)
    return CachedModel(
        kv_dtype=kv_dtype,
        bytes_per_token=spec.bytes_per_token(size),
        full_bytes_per_token=full,
        fixed_bytes_per_request=fixed,
        layers=tuple(_group(layer, count, size) for layer, count in groups.items()),
    )


def _group(layer: LayerCache, count: int, size: int) -> LayerGroup:
    return LayerGroup(
        kind=layer.kind,
        num_layers=count,
        num_kv_heads=layer.num_kv_heads,
        key_width=layer.key_width,
        value_width=layer.value_width,
        index_width=layer.index_width,
        window=layer.window,
        bytes_per_token=layer.elements_per_token * size,
        state_bytes=layer.state_elements * _state_bytes(layer, size),
    )
