"""A whole artifact, opened and checked: what every command but `get` starts from."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.artifact.files import read_file
from reblock.artifact.location import CONFIG_NAME, committed_directory, config_path, locate
from reblock.artifact.modules import OuterConfig, check_module, no_cache, outer_configs
from reblock.artifact.program import read_program
from reblock.artifact.rebel import check_caches, read_compiled
from reblock.artifact.transaction.clean_up import clean_up_if_possible
from reblock.config import parse_config
from reblock.devices import get_device
from reblock.errors import (
    ArtifactMismatch,
    BadArtifact,
    CorruptArtifact,
    UnknownDevice,
)
from reblock.json_fields import parse_json_object
from reblock.memory import MemoryPlan

if TYPE_CHECKING:
    from reblock.artifact.program import ProgramFile
    from reblock.config import RBLNConfig
    from reblock.devices import Device
    from reblock.sizing import BlockBounds

__all__ = [
    "PATIENCE_S",
    "Artifact",
    "generation",
    "load_programs",
    "open_artifact",
    "program_path",
    "read_artifact",
    "read_config",
]

# Of caches and other terms in all programs; each takes up to 600 bytes. 100 layers have 201.
_MAX_SIZES = 2**15
# How long to go on reading an artifact that is changed each time before it is read to its end.
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """An artifact whose files have been found to agree; `directory` is its path as given.

    `module` is the path within it of the module that `config` and `programs` are of, where it has
    several.
    """

    directory: str
    config: RBLNConfig
    programs: tuple[ProgramFile, ...]
    module: str | None = None
    outer: tuple[OuterConfig, ...] = ()

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
            CorruptArtifact: No such device is known, or the artifact does not say which it is.
        """
        if self.config.npu is None:
            raise CorruptArtifact(
                "does not say which device it was compiled for, so nothing can be said of its "
                "memory; give the number of blocks",
                path=config_path(self.directory, module=self.module),
            )
        try:
            return get_device(self.config.npu)
        except UnknownDevice as error:
            # The name was read from the artifact, so it is no mistake of whoever asks.
            path = config_path(self.directory, module=self.module)
            raise CorruptArtifact(
                f"is for a device of no known kind: {error}", path=path
            ) from error


def program_path(directory: str, name: str) -> str:
    """Return where the program `name` of an artifact is written in `directory`."""
    return os.path.join(directory, f"{name}.rbln")


def open_artifact(directory: str, module: str | None = None) -> Artifact:
    """Return the artifact in `directory`, after checking that its files agree.

    What an edit left that was cut off is cleaned up, where that is possible. An edit changes all
    files in one step. Where that happens while they are being read, they are read again, so that
    what is returned is the old artifact or the new one and never a mix.

    Args:
        directory: Where the artifact is.
        module: The module to open, by its path within the artifact, where it has several.

    Raises:
        ModuleNeeded: Its cache is in a module and none is given, or it has no such module.
        BadArtifact: It is none, it is damaged, its files contradict each other, or a newer
            reblock wrote it. The subclass says which.
        MissingDependency: The package that reads its programs is not installed.
    """
    clean_up_if_possible(directory)
    if module is not None:
        check_module(directory, module)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = generation(directory, module)
        try:
            artifact = read_artifact(directory, module=module)
        except BadArtifact:
            if generation(directory, module) == before:
                raise
        else:
            if generation(directory, module) == before:
                return artifact
        if time.monotonic() > deadline:
            raise CorruptArtifact("is being changed all the time; try again later", path=directory)


def generation(directory: str, module: str | None) -> tuple[object, object]:
    """Return what differs before and after an edit, and with each of its files that is moved."""
    config: tuple[int, ...] | None = None
    moving: list[list[str]] | None = None
    with suppress(OSError, ValueError):  # there is none
        status = os.stat(locate(directory, os.path.join(module or "", CONFIG_NAME)))
        config = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    with suppress(OSError, ValueError):  # no edit is being finished
        moving = [names for _, _, names in os.walk(committed_directory(directory))]
    return config, moving


def read_artifact(
    directory: str, changed_in: str | None = None, *, module: str | None = None
) -> Artifact:
    """Return the artifact in `directory`, read once; where an edit meets that, it may be a mix.

    Args:
        directory: Where the artifact is.
        changed_in: A directory whose files stand in for those of the artifact.
        module: As for `open_artifact`.

    Raises:
        BadArtifact: As `open_artifact`.
        MissingDependency: As `open_artifact`.
    """
    config = read_config(directory, changed_in, module=module)
    outer: tuple[OuterConfig, ...] = ()
    if module is not None:
        outer = outer_configs(directory, module, config.kvcache_num_blocks, changed_in)
    return Artifact(
        directory=directory,
        config=config,
        programs=load_programs(directory, config, changed_in, module=module),
        module=module,
        outer=outer,
    )


def read_config(
    directory: str, changed_in: str | None = None, *, module: str | None = None
) -> RBLNConfig:
    """Return the configuration of an artifact alone; the arguments are those of `read_artifact`.

    Raises:
        BadArtifact: There is none, or it is damaged, of another format or of a kind without cache.
        ModuleNeeded: The cache is in a module and none is given.
    """
    path = config_path(directory, changed_in, module)
    text = read_file(path)
    values = parse_json_object(text, path=path)
    if not {"kvcache_num_blocks", "reblock"} & values.keys():
        raise no_cache(directory, values)
    return parse_config(text, path=path)


def load_programs(
    directory: str,
    config: RBLNConfig,
    changed_in: str | None = None,
    *,
    module: str | None = None,
) -> tuple[ProgramFile, ...]:
    """Return the programs that `config` names, read by its backend's reader and checked.

    Raises:
        CorruptArtifact: A program or a weights file is missing or damaged.
        ArtifactMismatch: A program contradicts `config`.
        MissingDependency: It takes a compiler to read them, which is not installed.
        CompilerTooOld: It is installed, but too old.
    """
    paths = [
        (
            program.name,
            locate(directory, os.path.join(module or "", f"{program.name}.rbln"), changed_in),
        )
        for program in config.programs
    ]
    if config.reblock is None:
        programs = read_compiled(paths, config.kvcache_num_blocks)
        for program in programs:
            check_caches(program, config.cache_metas)
        return programs
    for name, weights in config.reblock.weights.items():
        _check_weights(os.path.join(directory, name), weights.num_bytes)
    return _load_our_programs(directory, config, paths)


def _load_our_programs(
    directory: str, config: RBLNConfig, paths: list[tuple[str, str]]
) -> tuple[ProgramFile, ...]:
    programs: list[ProgramFile] = []
    num_sizes = 0
    for name, path in paths:
        program = read_program(path)
        _check_program(program, name, config)
        num_sizes += program.num_sizes
        if num_sizes > _MAX_SIZES:
            fault = f"its programs report more than {_MAX_SIZES:,} sizes together"
            raise CorruptArtifact(fault, path=directory)
        programs.append(program)
    return tuple(programs)


def _check_weights(path: str, num_bytes: int) -> None:
    if not os.path.isfile(path):
        raise CorruptArtifact("the file of weights is missing", path=path)
    found = os.path.getsize(path)
    if found != num_bytes:
        raise CorruptArtifact(f"holds {found:,} bytes, not the {num_bytes:,} it should", path=path)


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
                f"reports {term} for {len(grid)} nodes with {len(grid[0])} chiplets in the first, "
                "but a cpu is one node of one chiplet",
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
