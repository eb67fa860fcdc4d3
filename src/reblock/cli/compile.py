"""`reblock compile`: a thin face of the torch backend."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import TYPE_CHECKING

from reblock.artifact.transaction import check_destination
from reblock.backends.loading import require_torch
from reblock.cli.parser import Once, add_json, add_output_dir, non_empty
from reblock.cli.progress import TerminalProgress
from reblock.errors import ReblockError, UsageError
from reblock.options import CompileOptions
from reblock.units import format_bytes, format_gib

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from reblock.budget import MemoryBudget
    from reblock.progress import Progress

# Options that a plan has as well, by the same names.
_PLANNED = (
    "batch_size",
    "max_seq_len",
    "dtype",
    "weight_dtype",
    "attn_impl",
    "kvcache_partition_len",
    "kvcache_block_size",
    "prefill_chunk_size",
)

_HELP = {
    "batch_size": ("N", "sequences that run side by side (default: 1)"),
    "max_seq_len": ("N", "longest sequence in tokens (default: what the model was made for)"),
    "dtype": ("TYPE", "float32 or bfloat16 (default: the model's own)"),
    "weight_dtype": (
        "TYPE",
        (
            "what linear layers keep their weights in: float32, bfloat16, or int8, which is a "
            "quarter of float32 with a scale for each output (default: as --dtype)"
        ),
    ),
    "attn_impl": ("KIND", "flash_attn or eager (default: flash_attn where it is possible)"),
    "kvcache_partition_len": ("N", "tokens that flash attention works on at a time"),
    "kvcache_block_size": ("N", "tokens in a block of KV cache"),
    "kvcache_num_blocks": ("N", "blocks of KV cache (default: as many as fit)"),
    "prefill_chunk_size": ("N", "tokens of a prompt that are read at a time (default: 128)"),
    "decoder_batch_sizes": ("N,...", "batch sizes to compile decoders for (default: batch_size)"),
    "memory_budget": (
        "BUDGET",
        "for weights, workspace and KV cache: 0.8 of what is available, 80%%, 10GB (default: all)",
    ),
    "npu": ("NAME", "device to compile for (default: cpu)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock compile`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=non_empty,
        help="Hugging Face directory or id, or a GGUF file",
    )
    add_output_dir(parser, "where to write the artifact (default: named after MODEL, here)")
    for field in fields(CompileOptions):
        metavar, text = _HELP[field.name]
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, metavar=metavar, action=Once, help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compile the model."""
    names = [field.name for field in fields(CompileOptions)]
    keys = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return compile_to_artifact(args.model, args.output_dir, keys, as_json=args.json)


def compile_to_artifact(
    model: str, output_dir: str | None, keys: Mapping[str, str], *, as_json: bool
) -> int:
    """Compile `model` with the `rbln_config` keys given as text, and print the outcome."""
    options = CompileOptions.from_keys(keys)
    output_dir = default_output_dir(model) if output_dir is None else output_dir
    # Now and not after minutes of compiling.
    check_destination(output_dir, source=model if os.path.isdir(model) else None)
    require_torch("compiling")
    # transformers shows bars of its own while it reads weights; ours say what is going on.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from reblock.backends.torch import compile_model

    progress = TerminalProgress()
    if options.memory_budget is not None and os.path.exists(model):
        _note_small_budget(model, options, options.memory_budget, progress)
    report = compile_model(model, output_dir, options, progress)
    sizing, seconds = report.sizing, sum(report.seconds.values())
    if as_json:
        outcome = {
            "output_dir": report.output_dir,
            "kvcache_num_blocks": sizing.num_blocks,
            "num_min_blocks": sizing.bounds.minimum,
            "num_full_blocks": sizing.bounds.full,
            "limited_by": sizing.limited_by,
            "budget_bytes": sizing.budget_bytes,
            "seconds": report.seconds,
        }
        print(json.dumps(outcome))
    else:
        print(f"written to          {report.output_dir}, in {seconds:.0f} s")
        print(f"kvcache_num_blocks  {sizing.num_blocks}, of at most {sizing.bounds.full}")
        print(f"memory budget       {format_gib(sizing.budget_bytes)}")
    return 0


def _note_small_budget(
    model: str, options: CompileOptions, budget: MemoryBudget, progress: Progress
) -> None:
    """Warn of a budget that a plan finds too small.

    What programs take besides weights and cache is estimated before they are compiled, so the
    compiler refuses such a budget only after it has measured them, minutes later.
    """
    from reblock.planning import plan

    same = {name: getattr(options, name) for name in _PLANNED}
    try:
        found = plan(model, npu=options.npu, memory_budget=budget, **same)
    except ReblockError:
        return  # compiling says it, or can do what a plan cannot
    if not found.fits:
        smallest = found.budgets.smallest_bytes
        progress.note(
            f"warning: memory_budget={budget.text!r} is probably too small, which is certain only "
            f"once the programs are compiled: a plan estimates {format_bytes(smallest)} as the "
            "smallest that works (`reblock plan` shows of what)"
        )


def default_output_dir(model: str) -> str:
    """Return the name of the model, without its owner or `.gguf`, as a directory here.

    Raises:
        UsageError: The model's path has no name, as `..` has none.
    """
    name = os.path.basename(model.rstrip("/"))
    if name.lower().endswith(".gguf"):
        name = name[: -len(".gguf")]
    if name in ("", ".", ".."):
        raise UsageError(f"{model!r} gives the artifact no name; choose one with --output-dir")
    return name
