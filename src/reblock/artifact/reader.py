"""A whole artifact, opened and checked: what every command but `get` starts from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.count import config_path
from reblock.artifact.files import read_file
from reblock.artifact.program import read_program
from reblock.config import parse_config
from reblock.devices import get_device
from reblock.errors import (
    ArtifactMismatch,
    BadArtifact,
    CorruptArtifact,
    MissingDependency,
    UnknownDevice,
)
from reblock.memory import MemoryPlan

if TYPE_CHECKING:
    from reblock.artifact.program import ProgramFile
    from reblock.config import RBLNConfig
    from reblock.devices import Device
    from reblock.sizing import BlockBounds

__all__ = ["Artifact", "load_programs", "open_artifact", "program_path"]

_MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """An artifact whose files have been found to agree; `directory` is its path as given."""

    directory: str
    config: RBLNConfig
    programs: tuple[ProgramFile, ...]

    @property
    def bounds(self) -> BlockBounds:
        """The fewest and the most blocks that its programs can use."""
        return self.config.bounds

    def memory_plan(self) -> MemoryPlan:
        """Return what all its programs keep in memory together.

        Raises:
            ArtifactMismatch: Its programs disagree on a cache or on the shape of the device.
            CorruptArtifact: A cache does not hold a whole number of bytes per block.
        """
        return MemoryPlan.from_programs(
            [program.memory for program in self.programs],
            resizable=self.config.resizable,
            current_blocks=self.config.kvcache_num_blocks,
            source=self.directory,
        )

    def device(self) -> Device:
        """Return the device that it was compiled for.

        Raises:
            CorruptArtifact: No such device is known.
        """
        try:
            return get_device(self.config.npu)
        except UnknownDevice as error:
            # The name was read from the artifact, so it is no mistake of whoever asks.
            path = config_path(self.directory)
            raise CorruptArtifact(
                f"is for a device of no known kind: {error}", path=path
            ) from error


def program_path(directory: str, name: str) -> str:
    """Return the path of the program `name` of the artifact in `directory`."""
    return os.path.join(directory, f"{name}.rbln")


def open_artifact(directory: str) -> Artifact:
    """Return the artifact in `directory`, after checking that its files agree.

    An edit replaces the whole directory. Where that happens while it is being read, it is read
    again, so that what is returned is the old artifact or the new one and never a mix.

    Raises:
        BadArtifact: It is none, it is damaged, its files contradict each other, or a newer
            reblock wrote it. The subclass says which.
        MissingDependency: The package that reads its programs is not installed.
    """
    for _ in range(_MAX_ATTEMPTS):
        before = _identity(directory)
        try:
            artifact = _open(directory)
        except BadArtifact:
            if _identity(directory) == before:
                raise
        else:
            if _identity(directory) == before:
                return artifact
    raise CorruptArtifact("is being changed all the time; try again later", path=directory)


def _identity(directory: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _open(directory: str) -> Artifact:
    path = config_path(directory)
    config = parse_config(read_file(path), path=path)
    return Artifact(directory=directory, config=config, programs=load_programs(directory, config))


def load_programs(directory: str, config: RBLNConfig) -> tuple[ProgramFile, ...]:
    """Return the programs that `config` names, read by its backend's reader and checked.

    Raises:
        CorruptArtifact: A program or a weights file is missing or damaged.
        ArtifactMismatch: A program contradicts `config`.
        MissingDependency: The artifact is of a backend that is not installed.
    """
    if config.reblock is None:
        raise MissingDependency(
            f"{directory}: was compiled by optimum-rbln. Its block count can be read, with the "
            "command get; resizing it takes the RBLN compiler, which this version of reblock does "
            "not drive: use optimum-rbln and its compiler for that",
            package="rebel-compiler",
            install="pip install optimum-rbln rebel-compiler",
        )
    for name in config.reblock.weights:
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            raise CorruptArtifact("the file of weights is missing", path=path)
    programs = tuple(
        read_program(program_path(directory, program.name)) for program in config.programs
    )
    for expected, program in zip(config.programs, programs, strict=True):
        _check_program(program, expected.name, config)
    return programs


def _check_program(program: ProgramFile, name: str, config: RBLNConfig) -> None:
    num_blocks = config.kvcache_num_blocks
    if program.name != name:
        raise ArtifactMismatch(f"holds the program {program.name!r}", path=program.path)
    if program.kvcache_num_blocks != num_blocks:
        raise ArtifactMismatch(
            f"holds {program.kvcache_num_blocks} blocks, but rbln_config.json says {num_blocks}",
            path=program.path,
        )
    for term, grid in [*program.memory.alloc.items(), *program.memory.caches.items()]:
        if config.npu == "cpu" and [len(node) for node in grid] != [1]:
            raise ArtifactMismatch(
                f"reports {term} for {len(grid)} nodes with {[len(node) for node in grid]} "
                "chiplets, but a cpu is one node of one chiplet",
                path=program.path,
            )
    sizes = {meta.name: meta.bytes_at(num_blocks) for meta in config.cache_metas}
    for cache, grid in program.memory.caches.items():
        held = sum(map(sum, grid))
        if held != sizes.get(cache):
            says = f"{sizes[cache]:,} bytes" if cache in sizes else "nothing of it"
            raise ArtifactMismatch(
                f"its cache {cache!r} holds {held:,} bytes, but rbln_config.json says {says} "
                f"for {num_blocks} blocks",
                path=program.path,
            )
