"""The `.rbln` files of the RBLN compiler: read and resized by the compiler's own class.

The format is closed, so `rebel.RBLNCompiledModel` opens every file and writes it. That takes no
device. The compiler is not imported before an artifact of optimum-rbln asks for it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reblock.artifact.program import ProgramFile
from reblock.artifact.rebel_model import (
    RESCALE_METHOD,
    pad_to_one_shape,
    read_alloc,
    read_caches,
    require_method,
    rescale,
)
from reblock.errors import ArtifactMismatch, CorruptArtifact, MissingDependency, ReblockError
from reblock.memory import ProgramMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reblock.config import CacheMeta

__all__ = ["check_caches", "has_compiler", "read_compiled", "write_compiled"]


def has_compiler() -> bool:
    """Return whether the RBLN compiler can be imported."""
    try:
        import_module("rebel")
    except (ImportError, OSError):  # OSError: a library that it needs is not there
        return False
    return True


def read_compiled(paths: Iterable[tuple[str, str]], num_blocks: int) -> tuple[ProgramFile, ...]:
    """Return what the programs at `paths`, each with its name, say about their memory.

    Args:
        paths: For every program its name and where it is.
        num_blocks: What the artifact says that they hold; they do not say themselves.

    Raises:
        MissingDependency: The RBLN compiler is not installed.
        CompilerTooOld: It is, but does not tell the sizes.
        CorruptArtifact: It cannot read a program, or what it tells are no sizes.
    """
    programs = []
    for name, path in paths:
        compiled = _open(path)
        with _faults_reported(path):
            memory = ProgramMemory(
                name=name, alloc=read_alloc(path, compiled), caches=read_caches(path, compiled)
            )
        programs.append(
            ProgramFile(name=name, path=path, kvcache_num_blocks=num_blocks, memory=memory)
        )
    padded = pad_to_one_shape(program.memory for program in programs)
    return tuple(
        replace(program, memory=memory) for program, memory in zip(programs, padded, strict=True)
    )


def write_compiled(
    source: str, destination: str, *, caches: Sequence[str], target: int, current: int
) -> None:
    """Write the program at `source` to `destination` with its caches at `target` blocks.

    Raises:
        CompilerTooOld: The compiler cannot resize what it has compiled.
        CorruptArtifact: It refuses to.
        OSError: The destination cannot be written.
    """
    compiled = _open(source)
    require_method(compiled, RESCALE_METHOD)
    with _faults_reported(source):
        rescale(compiled, caches, target, current)
        compiled.save(destination)


def check_caches(program: ProgramFile, caches: Iterable[CacheMeta]) -> None:
    """Check that a program holds what its artifact's configuration says.

    Raises:
        ArtifactMismatch: It does not.
    """
    num_blocks = program.kvcache_num_blocks
    for meta in caches:
        grid = program.memory.caches.get(meta.name)
        if grid is None:
            continue  # the programs share their caches, and need not name all of them
        held, stated = sum(map(sum, grid)), meta.bytes_at(num_blocks)
        # Where there are more devices than heads, several hold the same head.
        num_parts, num_heads = sum(map(len, grid)), meta.shape[1] if len(meta.shape) == 4 else 1
        most = max(1, num_parts // num_heads) * stated
        if held % stated or not stated <= held <= most:
            raise ArtifactMismatch(
                f"its cache {meta.name!r} holds {held:,} bytes, but rbln_config.json says "
                f"{stated:,} for {num_blocks} blocks",
                path=program.path,
            )


def _open(path: str) -> Any:
    try:
        rebel = import_module("rebel")
    except (ImportError, OSError) as error:
        raise MissingDependency(
            f"{path} was compiled by the RBLN compiler and takes it to be read, and it cannot be "
            f"imported here ({error}). Install rebel-compiler as Rebellions' documentation says. "
            "Without it, the commands get and inspect tell what rbln_config.json says",
            package="rebel-compiler",
            install="pip install rebel-compiler",
        ) from error
    if not os.path.isfile(path):
        raise CorruptArtifact("is missing or not a regular file", path=path)
    with _faults_reported(path):
        return rebel.RBLNCompiledModel(path)


@contextmanager
def _faults_reported(path: str) -> Iterator[None]:
    try:
        yield
    except (ReblockError, OSError):
        raise
    except Exception as error:  # the compiler is closed: whatever it raises is of the file
        raise CorruptArtifact(f"the RBLN compiler refuses it: {error}", path=path) from error
