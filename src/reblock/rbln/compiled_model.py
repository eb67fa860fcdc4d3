"""A program of the torch backend, with the methods of the compiler's `RBLNCompiledModel`.

So code that was written for the compiler's class sizes and resizes the artifacts of both backends:

    compiled_models = {path.stem: RBLNCompiledModel(path) for path in directory.glob("*.rbln")}
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from reblock.artifact.program import read_program, write_resized
from reblock.memory import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reblock.memory import Grid

__all__ = ["RBLNCompiledModel"]

_CACHE_TERM = "DramTensor"


class RBLNCompiledModel:
    """One compiled program; what it is told to change is written by `save` and not before.

    To resize an artifact, `reblock.apply_resize` and the commands change all its programs and its
    configuration in one step; this class changes one file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the `.rbln` file at `path`.

        Raises:
            CorruptArtifact: It is missing, damaged or no program of the torch backend.
            UnknownFormat: A newer version of reblock wrote it.
        """
        program = read_program(os.fspath(path))
        self._path = program.path
        self._num_blocks = program.kvcache_num_blocks
        self._alloc = program.memory.alloc
        self._caches: dict[str, Grid] = dict(program.memory.caches)

    def get_alloc_per_chiplet_by_key(self) -> dict[str, list[list[int]]]:
        """Return the bytes of every term per node and chiplet; "DramTensor" is the cache."""
        terms = {term: _as_lists(grid) for term, grid in self._alloc.items()}
        grids = [aligned(grid) for grid in self._caches.values()]
        if grids:
            terms[_CACHE_TERM] = [
                [sum(sizes) for sizes in zip(*nodes, strict=True)]
                for nodes in zip(*grids, strict=True)
            ]
        return terms

    def get_alloc_per_node_by_key(self) -> dict[str, list[int]]:
        """Return the bytes of every term on every node."""
        terms = self.get_alloc_per_chiplet_by_key()
        return {term: [sum(node) for node in nodes] for term, nodes in terms.items()}

    def exp_get_dram_tensor_sizes(self) -> dict[str, list[list[int]]]:
        """Return the unaligned bytes of every cache tensor on every node and chiplet."""
        return {name: _as_lists(grid) for name, grid in self._caches.items()}

    def exp_multiply_buffer_size(self, factors: Mapping[str, int]) -> None:
        """Grow caches of one block, each to as many blocks as its factor says."""
        self.exp_rescale_buffer_size({name: (factor, 1) for name, factor in factors.items()})

    def exp_rescale_buffer_size(self, ratios: Mapping[str, tuple[int, int]]) -> None:
        """Scale caches by (target, current), each exactly.

        Raises:
            KeyError: It has no such cache.
            ValueError: The result is no whole number of bytes, or the caches come to hold different
                numbers of blocks.
        """
        scaled = {name: _scale(self._caches[name], name, ratio) for name, ratio in ratios.items()}
        counts = {_scale_exactly(self._num_blocks, "the block count", r) for r in ratios.values()}
        if len(counts) > 1:
            raise ValueError(f"the caches would hold different numbers of blocks: {sorted(counts)}")
        self._caches |= scaled
        self._num_blocks = counts.pop() if counts else self._num_blocks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to `path`, in place of what is there, in one step.

        Raises:
            CorruptArtifact: The file that it was read from is not as it was.
            OSError: `path` cannot be written.
        """
        destination = os.path.abspath(os.fspath(path))
        with tempfile.TemporaryDirectory(
            prefix=".reblock-", dir=os.path.dirname(destination)
        ) as directory:
            written = os.path.join(directory, "program")
            write_resized(self._path, written, dram=self._caches, num_blocks=self._num_blocks)
            os.replace(written, destination)


def _as_lists(grid: Grid) -> list[list[int]]:
    return [list(node) for node in grid]


def _scale(grid: Grid, name: str, ratio: tuple[int, int]) -> Grid:
    return tuple(tuple(_scale_exactly(size, name, ratio) for size in node) for node in grid)


def _scale_exactly(number: int, name: str, ratio: tuple[int, int]) -> int:
    target, current = ratio
    if target < 1 or current < 1:
        raise ValueError(f"{name} cannot be scaled by {target} / {current}")
    scaled, rest = divmod(number * target, current)
    if rest:
        raise ValueError(f"{name}: {number} x {target} / {current} is not whole")
    return scaled
