"""What a model that the RBLN compiler made says of its memory, in the terms of the core.

Nothing of the compiler is imported: whatever has its methods is a compiled model. What they
return is checked. Grids in which some nodes or chiplets are left out are filled up with zeros
here, because the core takes grids of one shape only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from reblock.errors import CompilerTooOld, CorruptArtifact
from reblock.memory import ProgramMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reblock.memory import Grid

__all__ = [
    "RESCALE_METHOD",
    "CompiledModel",
    "check_grids",
    "pad_to_one_shape",
    "program_memories",
    "program_memory",
    "read_alloc",
    "read_caches",
    "require_method",
    "rescale",
]

RESCALE_METHOD = "exp_rescale_buffer_size"

# The one term that is KV cache. It is aligned and a sum, so the caches are asked for by name.
_CACHE_TERM = "DramTensor"


class CompiledModel(Protocol):
    """The methods that every compiled model has; see `require_method` for those that may lack."""

    def get_alloc_per_chiplet_by_key(self) -> Mapping[str, Sequence[Sequence[int]]]:
        """Return the bytes per node and chiplet of every term, "DramTensor" being the KV cache."""
        ...

    def exp_get_dram_tensor_sizes(self) -> Mapping[str, Sequence[Sequence[int]]]:
        """Return the unaligned bytes per node and chiplet of every cache tensor."""
        ...


def program_memory(name: str, compiled: CompiledModel) -> ProgramMemory:
    """Return what one compiled model reports; its grids have one shape.

    Args:
        name: The program's name, or the path of its file: errors begin with it.
        compiled: The compiled model.

    Raises:
        CompilerTooOld: It lacks a method that tells.
        CorruptArtifact: What it reports are no sizes.
    """
    return program_memories({name: compiled})[0]


def program_memories(compiled_models: Mapping[str, CompiledModel]) -> list[ProgramMemory]:
    """Return what the compiled models of one artifact report; all grids have one shape.

    Raises:
        CompilerTooOld: One lacks a method that tells.
        CorruptArtifact: What one reports are no sizes.
    """
    return pad_to_one_shape(
        ProgramMemory(name=name, alloc=read_alloc(name, model), caches=read_caches(name, model))
        for name, model in compiled_models.items()
    )


def read_alloc(name: str, compiled: CompiledModel) -> dict[str, Grid]:
    """Return the bytes of everything but the KV cache, by term, as the compiler reports them."""
    grids = _report(name, compiled, "get_alloc_per_chiplet_by_key")
    grids.pop(_CACHE_TERM, None)
    return grids


def read_caches(name: str, compiled: CompiledModel) -> dict[str, Grid]:
    """Return the unaligned bytes of every cache tensor, as the compiler reports them."""
    return _report(name, compiled, "exp_get_dram_tensor_sizes")


def require_method(compiled: object, method: str) -> Callable[..., object]:
    """Return a method of a compiled model, which an older compiler may lack.

    Raises:
        CompilerTooOld: It lacks the method.
    """
    found = getattr(compiled, method, None)
    if not callable(found):
        raise CompilerTooOld(
            f"the compiled model has no method {method!r}: the installed rebel-compiler is too old "
            "for this; upgrade rebel-compiler to a version whose RBLNCompiledModel has it",
            method=method,
        )
    bound: Callable[..., object] = found
    return bound


def rescale(compiled: object, names: Iterable[str], target: int, current: int) -> None:
    """Scale the cache tensors called `names` from `current` blocks to `target`.

    Raises:
        CompilerTooOld: The compiler that made the model cannot rescale.
    """
    require_method(compiled, RESCALE_METHOD)(dict.fromkeys(names, (target, current)))


def check_grids(grids: object, *, source: str, title: str) -> dict[str, Grid]:
    """Return grids that somebody else made, after checking that they are sizes in bytes.

    Args:
        grids: A mapping from names to a list for every node of the bytes on every chiplet.
        source: Where they come from; errors begin with it.
        title: What they are called, for errors.

    Raises:
        CorruptArtifact: They are something else.
    """
    if not isinstance(grids, Mapping):
        raise CorruptArtifact(f"{title} must be a dictionary, not {_type_name(grids)}", path=source)
    checked: dict[str, Grid] = {}
    for key, rows in grids.items():
        if not isinstance(key, str):
            raise CorruptArtifact(f"{title} has the key {key!r}, which is no text", path=source)
        where = f"{title}[{key!r}]"
        checked[key] = tuple(
            tuple(_check_size(size, where, source) for size in _check_list(row, where, source))
            for row in _check_list(rows, where, source)
        )
    return checked


def pad_to_one_shape(programs: Iterable[ProgramMemory]) -> list[ProgramMemory]:
    """Return the programs with all grids filled up with zeros to the largest shape among them."""
    programs = list(programs)
    grids = [
        grid for program in programs for grid in (*program.alloc.values(), *program.caches.values())
    ]
    num_nodes = max(map(len, grids), default=0)
    num_chiplets = max((len(row) for grid in grids for row in grid), default=0)

    def pad(grid: Grid) -> Grid:
        rows = [*grid, *[()] * (num_nodes - len(grid))]
        return tuple((*row, *[0] * (num_chiplets - len(row))) for row in rows)

    return [
        ProgramMemory(
            name=program.name,
            alloc={term: pad(grid) for term, grid in program.alloc.items()},
            caches={cache: pad(grid) for cache, grid in program.caches.items()},
        )
        for program in programs
    ]


def _report(name: str, compiled: CompiledModel, method: str) -> dict[str, Grid]:
    return check_grids(require_method(compiled, method)(), source=name, title=f"{method}()")


def _check_list(value: object, where: str, source: str) -> Sequence[object]:
    if isinstance(value, (list, tuple)):
        return value
    raise CorruptArtifact(f"{where} must hold lists, not {_type_name(value)}", path=source)


def _check_size(value: object, where: str, source: str) -> int:
    # Whole numbers of other libraries are welcome; True is one to Python, but no size.
    if hasattr(value, "__index__") and not isinstance(value, bool):
        size = operator.index(value)
        if size >= 0:
            return size
    raise CorruptArtifact(f"{where} must hold numbers of bytes, not {value!r}", path=source)


def _type_name(value: object) -> str:
    return f"the type {type(value).__name__}"
