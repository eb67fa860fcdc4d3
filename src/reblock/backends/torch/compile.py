"""From a Hugging Face model to an artifact whose KV cache fits the memory budget.

examine    the model's configuration and structure, on shapes alone; refuse what cannot work
compile    the pieces of all programs, side by side in worker processes
weights    once, in the type the programs read
measure    what else the programs take, and that they answer as transformers does
size       the KV cache, and write the artifact into place
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reblock.artifact.checksum import file_digest, program_digest
from reblock.artifact.location import CONFIG_NAME
from reblock.artifact.reader import Artifact, open_artifact
from reblock.artifact.transaction import check_destination, left_note, new_directory
from reblock.backends.torch import describe, native
from reblock.backends.torch.build import (
    CompiledPiece,
    PieceTask,
    check_compiler,
    compile_pieces,
    package_program,
)
from reblock.backends.torch.host import host_isa
from reblock.backends.torch.refusal import NotCompilable
from reblock.backends.torch.source import (
    ModelSource,
    check_compilable,
    check_rotary_limit,
    linear_dtype,
    load_model,
    open_source,
    quiet_transformers,
    save_description,
    shape_model,
)
from reblock.backends.torch.structure import Structure, study
from reblock.backends.torch.weights import WEIGHTS_FILE, save_weights
from reblock.budget import WHOLE_DEVICE
from reblock.config import parse_config
from reblock.devices import get_device
from reblock.errors import BudgetTooSmall, CompileFailed, InvalidOption, UnsupportedModel
from reblock.info import WeightsFile
from reblock.options import resolve_weight_dtype
from reblock.sizing import Sizing, chiplet_uses, estimate, smallest_budget
from reblock.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from reblock.options import CompileOptions, Dtype, ResolvedOptions, WeightDtype
    from reblock.progress import Progress

__all__ = ["CompileReport", "compile_model"]

# Relative error of the logits, past which a compiled program is taken to be wrong, by the type that
# it computes in. Rounding reaches about 1e-6 in float32 and 2e-2 in bfloat16, a wrong mask or layer
# 1e-1 and more. Smaller weights loosen nothing: the reference computes with the same rounded ones.
_TOLERANCE: dict[str, float] = {"float32": 1e-3, "bfloat16": 1e-1}
_REFERENCE_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What came out: where it lies, how the cache was sized, and how long each stage took."""

    output_dir: str
    sizing: Sizing
    seconds: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Clock:
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        started = time.monotonic()
        with self.progress.stage(text):
            yield
        self.seconds[name] = round(time.monotonic() - started, 3)

    @contextmanager
    def bytes_stage(
        self, name: str, text: str, total_bytes: int
    ) -> Iterator[Callable[[int], None]]:
        started = time.monotonic()
        with self.progress.bytes_stage(text, total_bytes) as advance:
            yield advance
        self.seconds[name] = round(time.monotonic() - started, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model that was found fit to be compiled, before its weights are read."""

    source: ModelSource
    shapes: nn.Module
    structure: Structure
    options: ResolvedOptions
    dtype: Dtype
    weight_dtype: WeightDtype


def compile_model(
    model_id: str, output_dir: str, options: CompileOptions, progress: Progress
) -> CompileReport:
    """Compile a causal language model into an artifact at `output_dir`.

    Args:
        model_id: a directory with a Hugging Face model, a GGUF file, or a hub id.
        output_dir: where the artifact goes; nothing or an empty directory may be there.
        options: the keys of `rbln_config`.
        progress: told about the stages.

    Raises:
        UnsupportedModel: the model is not there or cannot be compiled; the message says why.
        UsageError: the options do not go together or with the model.
        DoesNotFit: the budget does not hold the weights and the smallest cache.
        MissingDependency: there is no C++ compiler.
        CompileFailed: the compiler gave up, or the result answers differently from transformers.
        DestinationExists, InvalidDestination, EditFailed: the artifact cannot be written there.
    """
    check_destination(output_dir, source=model_id if os.path.isdir(model_id) else None)
    check_compiler()
    quiet_transformers()
    clock = _Clock(progress=progress)
    try:
        with clock.stage("examine", f"examining {model_id}"):
            model = _examine(model_id, options, progress)
            if options.kvcache_num_blocks is None:
                _check_lower_bound(model, options)
        with new_directory(output_dir) as stage:
            sizing = _build(stage.path, model, options, clock)
            stage.commit_new()
        if stage.left is not None:
            progress.note(f"note: {left_note(stage.left)}")
    except NotCompilable as reason:
        raise UnsupportedModel(
            f"{model_id!r} cannot be compiled: {reason}", model=model_id
        ) from reason
    return CompileReport(output_dir=output_dir, sizing=sizing, seconds=clock.seconds)


def _examine(model_id: str, options: CompileOptions, progress: Progress) -> _Model:
    source = open_source(model_id)
    check_compilable(source.config)
    resolved = options.resolve(max_position_embeddings=source.max_position_embeddings)
    check_rotary_limit(source.config, resolved.max_seq_len)
    dtype = options.dtype or _default_dtype(source, progress)
    weight_dtype = resolve_weight_dtype(options.weight_dtype, dtype)
    shapes, structure = _study(source, dtype, weight_dtype, resolved.max_seq_len)
    if all(shape.window is not None for shape in structure.shapes):
        resolved = _without_blocks(resolved)
    return _Model(
        source=source,
        shapes=shapes,
        structure=structure,
        options=resolved,
        dtype=dtype,
        weight_dtype=weight_dtype,
    )


def _study(
    source: ModelSource, dtype: Dtype, weight_dtype: WeightDtype, max_seq_len: int
) -> tuple[nn.Module, Structure]:
    try:
        shapes = shape_model(source.config, dtype, weight_dtype)
        return shapes, study(shapes, source.num_layers, max_seq_len)
    except NotCompilable:
        raise
    # The model's own code runs here on tensors without values, and may do anything about it.
    except Exception as error:
        raise NotCompilable(
            "its code cannot be run on shapes alone, which is how a model is examined: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        ) from error


def _default_dtype(source: ModelSource, progress: Progress) -> Dtype:
    if source.checkpoint_dtype == "bfloat16":
        return "bfloat16"
    if source.checkpoint_dtype != "float32":
        progress.note(
            f"dtype {source.checkpoint_dtype} is not compiled for the cpu; compiling in float32 "
            "(or give dtype=bfloat16, which takes half the memory)"
        )
    return "float32"


def _without_blocks(options: ResolvedOptions) -> ResolvedOptions:
    """Return the options of a model whose layers all have a window: one ring a sequence."""
    if options.kvcache_num_blocks not in (None, options.batch_size):
        raise InvalidOption(
            f"kvcache_num_blocks={options.kvcache_num_blocks} cannot be chosen: every layer of "
            "the model has a sliding window, so its cache holds batch_size="
            f"{options.batch_size} windows; leave it out",
            option="kvcache_num_blocks",
        )
    return options.without_blocks()


def _first_count(model: _Model) -> int:
    """Return the block count that programs are packaged with, before it is estimated."""
    has_blocks = any(shape.window is None for shape in model.structure.shapes)
    return 1 if has_blocks else model.options.batch_size


def _check_lower_bound(model: _Model, options: CompileOptions) -> None:
    """Refuse a budget that the weights and the smallest cache alone exceed.

    That is known now; what the programs need besides only after minutes of compiling.
    """
    device = get_device("cpu")
    budget = options.memory_budget or WHOLE_DEVICE
    budget_bytes = budget.resolve(device.available_bytes)
    weights = sum(
        tensor.numel() * tensor.element_size()
        for tensor in [*model.shapes.parameters(), *model.shapes.buffers()]
    )
    minimum = model.options.bounds.minimum
    metas = describe.cache_metas(model.structure, model.options, model.dtype)
    cache = sum(grid[0][0] for grid in describe.cache_bytes(metas, minimum).values())
    needed = weights + cache
    if needed > budget_bytes:
        raise BudgetTooSmall(
            f"memory_budget={budget.text!r} is {format_bytes(budget_bytes)} here, but the weights "
            f"take {format_bytes(weights)} and the smallest KV cache, {minimum} blocks, "
            f"{format_bytes(cache)}. More than {format_bytes(needed)} is needed, as the programs' "
            "workspace comes on top: raise memory_budget, lower max_seq_len or batch_size"
            + _smaller_types(model),
            needed_bytes=needed,
            tightest=(0, 0),
            budget_bytes=budget_bytes,
            available_bytes=device.available_bytes,
            smallest_budget_bytes=needed,
        )


def _smaller_types(model: _Model) -> str:
    """Return the types that would take less memory, as the end of a sentence."""
    smaller = []
    if model.dtype != "bfloat16":
        smaller.append("dtype=bfloat16")
    if model.weight_dtype != "int8":
        smaller.append("weight_dtype=int8")
    return f", or choose {' or '.join(smaller)}" if smaller else ""


def _build(directory: str, model: _Model, options: CompileOptions, clock: _Clock) -> Sizing:
    """Write the whole artifact into `directory`."""
    with tempfile.TemporaryDirectory(prefix="reblock-native-") as libraries:
        return _build_with(directory, libraries, model, options, clock)


def _build_with(
    directory: str, libraries: str, model: _Model, options: CompileOptions, clock: _Clock
) -> Sizing:
    _make_public(directory)
    if reason := save_description(model.source, directory):
        clock.progress.note(f"no tokenizer, which `reblock generate` needs: {reason}")
    pieces = _compile(directory, libraries, model, clock)
    with clock.stage("weights", "reading and writing the weights"):
        loaded = load_model(model.source, model.dtype)
        kept_in = linear_dtype(model.dtype, model.weight_dtype)
        with native.rounded_linears(loaded, kept_in):
            reference = _reference(loaded, model)
        native.replace_linears(loaded, kept_in)
        weight_bytes = save_weights(os.path.join(directory, WEIGHTS_FILE), loaded, model.shapes)
        del loaded
    weights = {WEIGHTS_FILE: _digest_weights(os.path.join(directory, WEIGHTS_FILE), clock)}
    count = _first_count(model)
    _package(directory, model, pieces, alloc={"Weight": [[weight_bytes]]}, count=count)
    _write_config(directory, model, weights, count)
    with clock.stage("measure", "running the programs to measure and check them"):
        measured = _measure(directory, model, reference)
    alloc = {
        "Weight": [[weight_bytes]],
        "Runtime": [[measured["runtime_bytes"]]],
        "Workspace": [[measured["workspace_bytes"]]],
    }
    _package(directory, model, pieces, alloc=alloc, count=count)
    _write_config(directory, model, weights, count)
    artifact = open_artifact(directory)
    sizing = _size(artifact, model.options, options, clock.progress)
    _package(directory, model, pieces, alloc=alloc, count=sizing.num_blocks)
    _write_config(directory, model, weights, sizing.num_blocks)
    open_artifact(directory).memory_plan()
    return sizing


def _make_public(directory: str) -> None:
    """Give the stage, which is private at first, the mode of any new directory."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(directory, 0o777 & ~mask)


def _compile(
    directory: str, libraries: str, model: _Model, clock: _Clock
) -> dict[str, CompiledPiece]:
    """Compile the pieces, and the native operators into `libraries`, which outlives them."""
    kinds = sorted(set(model.structure.kinds))
    # The layers first: they take longest, so the short ones fill the end.
    tasks = [
        PieceTask(
            piece=piece,
            config_dir=directory,
            dtype=model.dtype,
            weight_dtype=model.weight_dtype,
            isa=host_isa(),
            shapes=describe.piece_shapes(model.options),
        )
        for piece in [
            *(f"layer_{kind}" for kind in kinds),
            f"last_{model.structure.kinds[-1]}",
            "prologue",
            "epilogue",
        ]
    ]
    done = 0

    def note(task: PieceTask, seconds: float) -> None:
        nonlocal done
        done += 1
        clock.progress.note(f"[{done}/{len(tasks)}] {task.piece} compiled in {seconds:.0f} s")

    layers, count = model.source.num_layers, len(describe.programs(model.options))
    text = f"compiling {len(tasks)} pieces: {layers} layers of {len(kinds)} kinds, {count} programs"
    with clock.stage("compile", text), ThreadPoolExecutor(1) as beside:
        # In a process of the compiler's own: this thread only waits for it.
        library = beside.submit(native.build, libraries, host_isa())
        pieces = compile_pieces(tasks, num_workers=len(os.sched_getaffinity(0)), on_done=note)
        pieces[native.PIECE] = CompiledPiece(files=(library.result(),), seconds=0.0)
    return pieces


def _reference(loaded: Any, model: _Model) -> dict[str, Tensor]:
    """Return what transformers answers on a prompt that is longer than a chunk where it can be."""
    length = min(model.options.prefill_chunk_size + 5, model.options.max_seq_len - 1)
    length = max(length, _REFERENCE_STEPS)
    generator = torch.Generator().manual_seed(0)
    vocabulary = loaded.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (length,), generator=generator)
    with torch.no_grad():
        logits = loaded(input_ids=ids[None], use_cache=False).logits[0]
    return {"input_ids": ids, "logits": logits[-_REFERENCE_STEPS:].float().contiguous()}


def _package(
    directory: str,
    model: _Model,
    pieces: Mapping[str, CompiledPiece],
    *,
    alloc: dict[str, list[list[int]]],
    count: int,
) -> None:
    """Write every `.rbln` for `count` blocks.

    Memory that the programs share stands in the plan of the first one.
    """
    metas = describe.cache_metas(model.structure, model.options, model.dtype)
    for name, (rows, tokens) in describe.programs(model.options).items():
        graph = describe.graph(model.shapes, model.structure, name, rows=rows, tokens=tokens)
        used = {"prologue", "epilogue", native.PIECE, *(each["piece"] for each in graph["layers"])}
        content = {
            "format_version": 1,
            "name": name,
            "kvcache_num_blocks": count,
            "alloc": alloc,
            "dram": describe.cache_bytes(metas, count),
            "graph": graph,
        }
        own = {piece: files for piece, files in pieces.items() if piece in used}
        package_program(os.path.join(directory, f"{name}.rbln"), own, content)
        alloc = {term: [[0]] for term in alloc}


def _digest_weights(path: str, clock: _Clock) -> WeightsFile:
    num_bytes = os.path.getsize(path)
    with clock.bytes_stage("checksum", "computing the checksum of the weights", num_bytes) as tell:
        return WeightsFile(num_bytes=num_bytes, sha256=file_digest(path, tell))


def _write_config(
    directory: str, model: _Model, weights: Mapping[str, WeightsFile], count: int
) -> None:
    """Write `rbln_config.json` for the programs that lie beside it."""
    digests = {
        name: program_digest(os.path.join(directory, f"{name}.rbln"))
        for name in describe.programs(model.options)
    }
    text = describe.config_text(
        model.source,
        model.structure,
        model.options,
        architecture=type(model.shapes).__name__,
        dtype=model.dtype,
        weight_dtype=model.weight_dtype,
        isa=host_isa(),
        num_blocks=count,
        weights=weights,
        program_digests=digests,
    )
    path = os.path.join(directory, CONFIG_NAME)
    parse_config(text, path=path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _measure(directory: str, model: _Model, reference: dict[str, Tensor]) -> dict[str, Any]:
    """Run the programs in a process of their own; return what it measured."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="reblock-measure-") as scratch:
        path = os.path.join(scratch, "reference.safetensors")
        save_file(reference, path)
        outcome = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "reblock.backends.torch.profile",
                directory,
                path,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if outcome.returncode != 0:
        lines = outcome.stderr.strip().splitlines()[-8:]
        raise CompileFailed(
            f"the compiled programs do not run (status {outcome.returncode})"
            + "".join(f"\n    {line}" for line in lines)
        )
    measured: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
    # Written so that an error that is no number counts as one.
    if not measured["error"] <= _TOLERANCE[model.dtype]:
        raise CompileFailed(
            f"the compiled programs answer differently from transformers: the logits are off by "
            f"{measured['error']:.2g} of their size, where {_TOLERANCE[model.dtype]:g} is allowed; "
            f"please report the architecture, {type(model.shapes).__name__}"
        )
    return measured


def _size(
    artifact: Artifact, resolved: ResolvedOptions, options: CompileOptions, progress: Progress
) -> Sizing:
    """Return the estimated count, or the one that was asked for."""
    plan, device = artifact.memory_plan(), artifact.device()
    if resolved.kvcache_num_blocks is None:
        budget = options.memory_budget or WHOLE_DEVICE
        return estimate(plan, artifact.bounds, device=device, budget=budget)
    count, available = resolved.kvcache_num_blocks, device.available_bytes
    needed = smallest_budget(plan, count)
    if needed > available:
        progress.note(
            f"warning: kvcache_num_blocks={count} needs {format_bytes(needed)}, but "
            f"{format_bytes(available)} are available here"
        )
    return Sizing(
        num_blocks=count,
        bounds=artifact.bounds,
        limited_by="given",
        budget_bytes=available,
        available_bytes=available,
        tightest=(0, 0),
        chiplets=chiplet_uses(plan, count, available),
        smallest_budget_bytes=smallest_budget(plan, artifact.bounds.minimum),
        next_block_budget_bytes=None,
    )
