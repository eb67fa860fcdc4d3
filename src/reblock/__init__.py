"""Size, read and change the KV cache of language models that are compiled ahead of time.

The names below are loaded when they are first used, so that `import reblock` alone, which every
start of the command line pays for, costs next to nothing.
"""

from reblock._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reblock.artifact.count import read_num_blocks
    from reblock.artifact.reader import Artifact, open_artifact
    from reblock.artifact.resize import ResizePlan, apply_resize, plan_resize
    from reblock.budget import MemoryBudget, parse_budget
    from reblock.engine import Engine
    from reblock.errors import ReblockError
    from reblock.sizing import Sizing, estimate

__all__ = [
    "Artifact",
    "Engine",
    "MemoryBudget",
    "ReblockError",
    "ResizePlan",
    "Sizing",
    "__version__",
    "apply_resize",
    "estimate",
    "open_artifact",
    "parse_budget",
    "plan_resize",
    "read_num_blocks",
]

_HOMES = {
    "Artifact": "reblock.artifact.reader",
    "Engine": "reblock.engine",
    "MemoryBudget": "reblock.budget",
    "ReblockError": "reblock.errors",
    "ResizePlan": "reblock.artifact.resize",
    "Sizing": "reblock.sizing",
    "apply_resize": "reblock.artifact.resize",
    "estimate": "reblock.sizing",
    "open_artifact": "reblock.artifact.reader",
    "parse_budget": "reblock.budget",
    "plan_resize": "reblock.artifact.resize",
    "read_num_blocks": "reblock.artifact.count",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
