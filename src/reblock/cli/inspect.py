"""`reblock inspect`: what an artifact holds, and where its memory goes, term by term."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from reblock.artifact.previous import read_previous
from reblock.artifact.reader import Artifact, open_artifact, read_config
from reblock.cli.parser import add_directory, add_json, add_module
from reblock.cli.streams import tell
from reblock.cli.tables import add_size, make_table, render
from reblock.config import DTYPE_BYTES
from reblock.errors import BadArtifact, DoesNotFit, MissingDependency, NoPreviousCount
from reblock.sizing import capacity, chiplet_uses, estimate
from reblock.units import format_gib

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from rich.table import Table

    from reblock.config import CacheMeta
    from reblock.sizing import Capacity, ChipletUse


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Caches of one artifact that are alike; bytes are of all of them on all devices."""

    layer_type: str
    num_layers: int
    num_tensors: int
    is_resizable: bool
    dtype: str
    block_shape: tuple[int, ...]
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that `inspect` shows.

    `memory` is None where the programs cannot be read or the device is not known.
    `num_previous_blocks` is the count before the last change, None where there was none.
    """

    artifact: Artifact
    caches: tuple[CacheGroup, ...]
    memory: MemoryReport | None
    num_previous_blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where the memory goes, which only the programs and the device can tell.

    `num_fitting_blocks` is how many of the usable blocks the device would hold, None where not
    even the minimum fits.
    """

    available_bytes: int
    chiplets: tuple[ChipletUse, ...]
    num_fitting_blocks: int | None

    @property
    def tightest(self) -> ChipletUse:
        """The chiplet with the least memory left."""
        return min(self.chiplets, key=lambda use: use.free_bytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock inspect`."""
    add_directory(parser)
    add_module(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report, as tables or as JSON."""
    report = _report(_open(args.directory, args.module))
    if args.json:
        print(json.dumps(_as_object(report)))
    else:
        _print_tables(report)
    return 0


def _open(directory: str, module: str | None) -> Artifact:
    """Return the artifact, without its programs where the compiler that reads them is missing."""
    try:
        return open_artifact(directory, module)
    except MissingDependency as error:
        tell(f"note: without its programs: {error}")
        config = read_config(directory, module=module)
        return Artifact(directory=directory, config=config, programs=(), module=module)


def _report(artifact: Artifact) -> Report:
    config = artifact.config
    return Report(
        artifact=artifact,
        caches=_group_caches(config.cache_metas, config.kvcache_num_blocks),
        memory=_memory(artifact),
        num_previous_blocks=_previous(artifact),
    )


def _memory(artifact: Artifact) -> MemoryReport | None:
    if not artifact.programs:
        return None
    if artifact.config.npu is None:
        tell("note: without its memory: it does not say which device it was compiled for")
        return None
    plan, device = artifact.memory_plan(), artifact.device()
    try:
        fitting = estimate(plan, artifact.bounds, device=device).num_blocks
    except DoesNotFit:
        fitting = None
    return MemoryReport(
        available_bytes=device.available_bytes,
        chiplets=chiplet_uses(plan, plan.current_blocks, device.available_bytes),
        num_fitting_blocks=fitting,
    )


def _previous(artifact: Artifact) -> int | None:
    try:
        return read_previous(artifact.directory, artifact.module)
    except NoPreviousCount:
        return None
    except BadArtifact as error:
        # Nothing depends on it but the way back.
        tell(f"warning: {error}")
        return None


def _group_caches(metas: Iterable[CacheMeta], num_blocks: int) -> tuple[CacheGroup, ...]:
    groups: dict[tuple[str, bool, str, tuple[int, ...], int], list[CacheMeta]] = {}
    for meta in metas:
        held = num_blocks if meta.is_resizable else meta.shape[0]
        key = (meta.layer_type, meta.is_resizable, meta.dtype, meta.shape[1:], held)
        groups.setdefault(key, []).append(meta)
    return tuple(
        CacheGroup(
            layer_type=layer_type,
            num_layers=len({meta.layer_index for meta in members}),
            num_tensors=len(members),
            is_resizable=is_resizable,
            dtype=dtype,
            block_shape=shape,
            num_blocks=held,
            num_bytes=len(members) * held * math.prod(shape) * DTYPE_BYTES[dtype],
        )
        for (layer_type, is_resizable, dtype, shape, held), members in groups.items()
    )


def _as_object(report: Report) -> dict[str, object]:
    artifact, config, memory = report.artifact, report.artifact.config, report.memory
    holds = _capacity(artifact)
    chiplets = () if memory is None else memory.chiplets
    return {
        "directory": artifact.directory,
        "module": artifact.module,
        "backend": config.backend,
        "device": config.npu,
        "num_devices": config.num_devices,
        "available_bytes": None if memory is None else memory.available_bytes,
        "programs": [program.name for program in config.programs],
        "attn_impl": config.attn_impl,
        "batch_size": config.batch_size,
        "max_seq_len": config.max_seq_len,
        "kvcache_block_size": config.kvcache_block_size,
        "kvcache_num_blocks": config.kvcache_num_blocks,
        "previous_kvcache_num_blocks": report.num_previous_blocks,
        "num_min_blocks": artifact.bounds.minimum,
        "num_full_blocks": artifact.bounds.full,
        "num_fitting_blocks": None if memory is None else memory.num_fitting_blocks,
        "num_tokens": holds.num_tokens,
        "num_full_sequences": holds.num_full_sequences,
        "longest_sequence_tokens": holds.longest_sequence_tokens,
        "caches": [asdict(group) for group in report.caches],
        "chiplets": [asdict(use) | {"free_bytes": use.free_bytes} for use in chiplets],
    }


def _capacity(artifact: Artifact) -> Capacity:
    config = artifact.config
    return capacity(
        config.kvcache_num_blocks,
        block_size=config.kvcache_block_size,
        max_seq_len=config.max_seq_len,
        batch_size=config.batch_size,
    )


def _print_tables(report: Report) -> None:
    tables = [_overview(report), _cache_table(report.caches)]
    if report.memory is not None:
        tables.append(_memory_table(report.artifact, report.memory))
    print(render(*tables, _block_table(report)))


def _overview(report: Report) -> Table:
    from rich.table import Table

    config = report.artifact.config
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("artifact", report.artifact.directory)
    if report.artifact.module is not None:
        table.add_row("module", report.artifact.module)
    if config.reblock is not None:
        info = config.reblock
        weights = "" if info.weight_dtype is None else f", weights {info.weight_dtype}"
        table.add_row("model", f"{info.architecture}, {config.dtype}{weights}")
        table.add_row("compiled", f"{info.backend} {info.torch_version}, {info.isa}")
    device = f"{config.num_devices} x {config.npu or 'a device that is not noted'}"
    if report.memory is not None:
        device += f", {format_gib(report.memory.available_bytes)} available"
    table.add_row("device", device)
    table.add_row("programs", ", ".join(program.name for program in config.programs))
    table.add_row(
        "attention",
        f"{config.attn_impl}, blocks of {config.kvcache_block_size:,} tokens, "
        f"{config.batch_size} sequences of up to {config.max_seq_len:,} tokens",
    )
    return table


def _cache_table(groups: Iterable[CacheGroup]) -> Table:
    table = make_table("\nKV cache", "layers", "number", "tensors", "one block", "blocks", "bytes")
    for group in groups:
        shape = " x ".join(map(str, group.block_shape))
        blocks = f"{group.num_blocks:,}" if group.is_resizable else f"{group.num_blocks:,} fixed"
        table.add_row(
            group.layer_type,
            str(group.num_layers),
            str(group.num_tensors),
            f"{shape} {group.dtype}",
            blocks,
            format_gib(group.num_bytes),
        )
    return table


def _memory_table(artifact: Artifact, memory: MemoryReport) -> Table:
    use, num_chiplets = memory.tightest, len(memory.chiplets)
    where = ""
    if num_chiplets > 1:
        where = f" of node {use.node}, chiplet {use.chiplet}, the tightest of {num_chiplets}"
    table = make_table(f"\nMemory{where}", "", "", "bytes")
    add_size(table, "available", use.budget_bytes)
    for term, num_bytes in use.static_bytes.items():
        add_size(table, f"- {term}", num_bytes)
    add_size(table, "- fixed KV cache", use.fixed_cache_bytes)
    num_blocks = artifact.config.kvcache_num_blocks
    per_block = format_gib(use.bytes_per_block)
    add_size(
        table,
        f"- resizable KV cache, {num_blocks:,} blocks of {per_block}",
        use.resizable_cache_bytes,
    )
    add_size(table, "- alignment", use.alignment_bytes)
    add_size(table, "= free", use.free_bytes)
    return table


def _block_table(report: Report) -> Table:
    artifact, holds = report.artifact, _capacity(report.artifact)
    table = make_table("\nBlocks", "", "")
    table.add_row("now", f"{artifact.config.kvcache_num_blocks:,}")
    previous = report.num_previous_blocks
    if previous is not None:
        table.add_row("before the last change", f"{previous:,}")
    table.add_row("fewest that work", f"{artifact.bounds.minimum:,}")
    table.add_row("most that can be used", f"{artifact.bounds.full:,}")
    if report.memory is not None:
        fitting = report.memory.num_fitting_blocks
        shown = "none" if fitting is None else f"{fitting:,}"
        table.add_row("most that fit and can be used", shown)
    table.add_row("tokens held now", f"{holds.num_tokens:,}")
    table.add_row("full-length sequences side by side", f"{holds.num_full_sequences:,}")
    table.add_row("longest sequence, tokens", f"{holds.longest_sequence_tokens:,}")
    return table
