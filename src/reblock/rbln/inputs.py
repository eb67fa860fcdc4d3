"""What the mixin is given, in the terms of the core: programs, a plan, bounds and a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from reblock.artifact.rebel_model import check_grids, pad_to_one_shape, read_alloc, read_caches
from reblock.block_count import parse_block_count
from reblock.budget import WHOLE_DEVICE, parse_budget
from reblock.errors import UsageError
from reblock.memory import MemoryPlan, ProgramMemory
from reblock.sizing import BlockBounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reblock.artifact.rebel_model import CompiledModel
    from reblock.budget import MemoryBudget
    from reblock.memory import Grid

__all__ = [
    "SOURCE",
    "BytesByChiplet",
    "DecoderConfig",
    "NamedCache",
    "block_limits",
    "blocks_held",
    "by_chiplet",
    "by_node",
    "check_caches",
    "fewest_blocks",
    "find_prefill",
    "make_plan",
    "read_budget",
    "read_programs",
    "resizable_by_name",
    "resizable_names",
]

# What errors on the models as a whole begin with.
SOURCE = "compiled_models"

BytesByChiplet = dict[tuple[int, int], int]
"""Bytes by (node, chiplet)."""


class NamedCache(Protocol):
    """What is read of one entry of `cache_metas`."""

    @property
    def name(self) -> str:
        """Its name in the programs."""
        ...

    @property
    def can_resize(self) -> bool:
        """Whether its block count may change."""
        ...


class DecoderConfig(Protocol):
    """What is read of `rbln_config`, and the one thing that is set."""

    kvcache_num_blocks: int

    @property
    def phases(self) -> Sequence[str]:
        """The phases that there are programs for."""
        ...

    @property
    def memory_budget(self) -> object:
        """The budget as its user wrote it, or None."""
        ...

    @property
    def num_full_blocks(self) -> int:
        """The most blocks that the programs can use."""
        ...

    @property
    def cache_metas(self) -> Sequence[NamedCache]:
        """Every cache of the programs."""
        ...


def read_programs(compiled_models: Mapping[str, CompiledModel]) -> list[ProgramMemory]:
    """Return what all models report, with the caches as the prefill program has them."""
    prefill = find_prefill(compiled_models)
    return [
        ProgramMemory(
            name=name,
            alloc=read_alloc(name, model),
            caches=read_caches(name, model) if model is prefill else {},
        )
        for name, model in compiled_models.items()
    ]


def find_prefill(compiled_models: Mapping[str, CompiledModel]) -> CompiledModel:
    """Return the prefill program.

    Raises:
        UsageError: There is none.
    """
    if "prefill" not in compiled_models:
        raise UsageError(
            f"compiled_models has {', '.join(compiled_models) or 'nothing'}, but no 'prefill', "
            "whose caches are measured; pass all compiled models of the artifact"
        )
    return compiled_models["prefill"]


def check_caches(kvcache_tensor_sizes: object) -> dict[str, Grid]:
    """Return the caches' sizes after checking that they are such."""
    return check_grids(kvcache_tensor_sizes, source=SOURCE, title="kvcache_tensor_sizes")


def make_plan(
    programs: Sequence[ProgramMemory], resizable: Mapping[str, bool], current_blocks: int
) -> MemoryPlan:
    """Return the joint plan of programs whose grids may be of different shapes."""
    return MemoryPlan.from_programs(
        pad_to_one_shape(programs),
        resizable=resizable,
        current_blocks=parse_block_count(current_blocks),
        source=SOURCE,
    )


def resizable_by_name(rbln_config: DecoderConfig) -> dict[str, bool]:
    """Return for the name of every cache whether it can be resized."""
    return {meta.name: bool(meta.can_resize) for meta in rbln_config.cache_metas}


def block_limits(rbln_config: DecoderConfig) -> BlockBounds:
    """Return the fewest and the most blocks; both are the count now where it cannot change."""
    full = rbln_config.num_full_blocks
    if not resizable_names(rbln_config):
        fixed = blocks_held(rbln_config) or full
        return BlockBounds(minimum=fixed, full=fixed)
    return BlockBounds(minimum=fewest_blocks(rbln_config), full=full)


def fewest_blocks(rbln_config: DecoderConfig) -> int:
    """Return the fewest blocks that the programs run with, 1 where `rbln_config` does not say."""
    return parse_block_count(getattr(rbln_config, "num_min_blocks", 1))


def blocks_held(rbln_config: DecoderConfig) -> int:
    """Return how many blocks the caches hold, 0 where that is not known."""
    # Left at 0 or None until an estimate has set it.
    held = getattr(rbln_config, "kvcache_num_blocks", None) or 0
    return parse_block_count(held) if held else 0


def read_budget(rbln_config: DecoderConfig) -> MemoryBudget:
    """Return the memory budget, which is the whole device where none is given."""
    value = getattr(rbln_config, "memory_budget", None)
    return WHOLE_DEVICE if value is None else parse_budget(value)


def resizable_names(rbln_config: DecoderConfig) -> list[str]:
    """Return the names of the caches that can be resized."""
    return [meta.name for meta in rbln_config.cache_metas if meta.can_resize]


def by_chiplet(grid: Grid) -> BytesByChiplet:
    """Return a grid as a dictionary."""
    return {
        (node, chiplet): num_bytes
        for node, row in enumerate(grid)
        for chiplet, num_bytes in enumerate(row)
    }


def by_node(
    sizes: Mapping[tuple[int, int], int], chiplets: Iterable[tuple[int, int]]
) -> list[list[int]]:
    """Return a dictionary of bytes as rows of a grid; chiplets that are not in it hold none."""
    places = {*sizes, *chiplets}
    num_nodes = 1 + max((node for node, _ in places), default=0)
    num_chiplets = 1 + max((chiplet for _, chiplet in places), default=0)
    return [
        [sizes.get((node, chiplet), 0) for chiplet in range(num_chiplets)]
        for node in range(num_nodes)
    ]
