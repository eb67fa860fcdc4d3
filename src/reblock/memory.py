"""What an artifact keeps in device memory, and how much that is at any block count.

    grid    bytes[node][chiplet]: a node is a device the programs span, a chiplet is a part of
            the device with memory of its own

A cache tensor is aligned after it was scaled, `round_up(bytes_per_block * n, 2 MiB)`. So memory
is not linear in the block count, though it never falls when the count rises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.errors import ArtifactMismatch, CorruptArtifact
from reblock.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "TENSOR_ALIGNMENT_BYTES",
    "CacheTensor",
    "Grid",
    "MemoryPlan",
    "ProgramMemory",
    "align",
    "aligned",
]

Grid = tuple[tuple[int, ...], ...]

TENSOR_ALIGNMENT_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """What one compiled program reports about itself.

    `alloc` holds everything but the KV cache, by term ("Weight", "Workspace", ...). Weights that
    several programs share stand in the report of one of them only. `caches` holds the unaligned
    bytes of every cache tensor that the program reads or writes.
    """

    name: str
    alloc: Mapping[str, Grid]
    caches: Mapping[str, Grid]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """One cache tensor; `bytes_grid` is what it holds, unaligned, at the current block count."""

    name: str
    is_resizable: bool
    bytes_grid: Grid

    def bytes_at(self, num_blocks: int, current_blocks: int) -> Grid:
        """Return the unaligned bytes at `num_blocks`, where it holds `current_blocks` now.

        A tensor that is not resizable holds the same at any count.

        Raises:
            ValueError: The tensor does not hold a whole number of bytes per block.
        """
        if not self.is_resizable:
            return self.bytes_grid

        def scale(num_bytes: int) -> int:
            per_block, rest = divmod(num_bytes, current_blocks)
            if rest:
                raise ValueError(
                    f"{self.name} holds {num_bytes} bytes, which do not divide into "
                    f"{current_blocks} blocks"
                )
            return per_block * num_blocks

        return _map(scale, self.bytes_grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Everything an artifact keeps in memory; all grids have the same shape.

    `static` is all that is not KV cache, by term. Every cache stands in `caches` once, however
    many programs use it. `current_blocks` is what the resizable caches hold now (1 just after
    compilation).
    """

    static: Mapping[str, Grid]
    caches: tuple[CacheTensor, ...]
    current_blocks: int

    @classmethod
    def from_programs(
        cls,
        programs: Sequence[ProgramMemory],
        *,
        resizable: Mapping[str, bool],
        current_blocks: int,
        source: str,
    ) -> MemoryPlan:
        """Return the joint plan of the programs of one artifact.

        Args:
            programs: Their reports, of which there must be one at least.
            resizable: For the name of every cache of the artifact, whether it can be resized.
            current_blocks: What the resizable caches hold now.
            source: The artifact's path, for errors.

        Raises:
            ArtifactMismatch: Two programs disagree on a cache or on the shape of the device, or
                the programs and `resizable` name different caches.
            CorruptArtifact: No memory is reported, or a cache does not hold a whole number of
                bytes per block.
        """
        shape = _common_shape(programs, source)
        static: dict[str, Grid] = {}
        for program in programs:
            for term, grid in program.alloc.items():
                static[term] = _sum([static[term], grid] if term in static else [grid], shape)
        merged = _merge_caches(programs, resizable, source)
        caches = tuple(
            CacheTensor(name=name, is_resizable=resizable[name], bytes_grid=grid)
            for name, grid in merged.items()
        )
        for cache in caches:
            try:
                cache.bytes_at(current_blocks, current_blocks)
            except ValueError as error:
                raise CorruptArtifact(str(error), path=source) from error
        return cls(static=static, caches=caches, current_blocks=current_blocks)

    @property
    def has_resizable_cache(self) -> bool:
        """Whether any cache can be resized at all."""
        return any(cache.is_resizable for cache in self.caches)

    @property
    def num_nodes(self) -> int:
        """How many devices the programs span."""
        return len(self._any_grid)

    @property
    def num_chiplets(self) -> int:
        """How many chiplets each device has."""
        return len(self._any_grid[0])

    @property
    def static_bytes(self) -> Grid:
        """Everything that is not KV cache."""
        return _sum(self.static.values(), self._shape)

    @property
    def bytes_per_block(self) -> Grid:
        """What one block takes in all resizable caches together, unaligned."""
        grids = [c.bytes_at(1, self.current_blocks) for c in self.caches if c.is_resizable]
        return _sum(grids, self._shape)

    @property
    def fixed_cache_bytes(self) -> Grid:
        """What the caches that cannot be resized hold, unaligned."""
        return _sum([c.bytes_grid for c in self.caches if not c.is_resizable], self._shape)

    def kv_unaligned_bytes_at(self, num_blocks: int) -> Grid:
        """Return the bytes of keys and values at `num_blocks`, without the cost of alignment."""
        return _sum(self._cache_grids(num_blocks), self._shape)

    def kv_bytes_at(self, num_blocks: int) -> Grid:
        """Return the bytes that the KV cache takes at `num_blocks`, each tensor aligned."""
        return _sum(map(aligned, self._cache_grids(num_blocks)), self._shape)

    def total_at(self, num_blocks: int) -> Grid:
        """Return the bytes that everything takes at `num_blocks`."""
        return _sum([self.static_bytes, self.kv_bytes_at(num_blocks)], self._shape)

    def _cache_grids(self, num_blocks: int) -> list[Grid]:
        return [cache.bytes_at(num_blocks, self.current_blocks) for cache in self.caches]

    @property
    def _any_grid(self) -> Grid:
        if self.caches:
            return self.caches[0].bytes_grid
        return next(iter(self.static.values()))

    @property
    def _shape(self) -> tuple[int, int]:
        return self.num_nodes, self.num_chiplets


def _common_shape(programs: Sequence[ProgramMemory], source: str) -> tuple[int, int]:
    found: tuple[int, int] | None = None
    for program in programs:
        for name, grid in [*program.alloc.items(), *program.caches.items()]:
            widths = {len(node) for node in grid}
            if len(widths) != 1 or 0 in widths:
                raise CorruptArtifact(
                    f"program {program.name!r} reports {name} for {len(grid)} nodes with "
                    f"{sorted(widths)} chiplets; every node must have the same, one at least",
                    path=source,
                )
            shape = (len(grid), widths.pop())
            if found is not None and shape != found:
                raise ArtifactMismatch(
                    f"program {program.name!r} reports {name} for {shape[0]} nodes of "
                    f"{shape[1]} chiplets, but others have {found[0]} nodes of {found[1]}",
                    path=source,
                )
            found = shape
    if found is None:
        raise CorruptArtifact("its programs report no memory at all", path=source)
    return found


def _merge_caches(
    programs: Sequence[ProgramMemory], resizable: Mapping[str, bool], source: str
) -> dict[str, Grid]:
    merged: dict[str, Grid] = {}
    for program in programs:
        for name, grid in program.caches.items():
            if merged.setdefault(name, grid) != grid:
                raise ArtifactMismatch(
                    f"program {program.name!r} holds {sum(map(sum, grid)):,} bytes in cache "
                    f"{name!r}, but another program holds {sum(map(sum, merged[name])):,} bytes "
                    "there",
                    path=source,
                )
    unknown = merged.keys() - resizable.keys()
    absent = resizable.keys() - merged.keys()
    if unknown or absent:
        where = "the programs but not rbln_config.json" if unknown else "rbln_config.json alone"
        raise ArtifactMismatch(f"cache {min(unknown or absent)!r} is named by {where}", path=source)
    return merged


def aligned(grid: Grid) -> Grid:
    """Return what a cache tensor takes where it holds `grid`: every part of it aligned."""
    return _map(align, grid)


def _map(function: Callable[[int], int], grid: Grid) -> Grid:
    return tuple(tuple(function(num_bytes) for num_bytes in node) for node in grid)


def _sum(grids: Iterable[Grid], shape: tuple[int, int]) -> Grid:
    num_nodes, num_chiplets = shape
    total = [[0] * num_chiplets for _ in range(num_nodes)]
    for grid in grids:
        for total_row, row in zip(total, grid, strict=True):
            for chiplet, num_bytes in enumerate(row):
                total_row[chiplet] += num_bytes
    return tuple(tuple(row) for row in total)


def align(num_bytes: int) -> int:
    """Return the bytes that a cache tensor of `num_bytes` takes."""
    return -(-num_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
