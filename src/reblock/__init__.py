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
    from reblock.planning.plan import plan
    from reblock.planning.result import Plan, SharedPlan
    from reblock.planning.share import plan_together
    from reblock.sizing import Sizing, estimate

__all__ = [
    "Artifact",
    "Engine",
    "MemoryBudget",
    "Plan",
    "ReblockError",
    "ResizePlan",
    "SharedPlan",
    "Sizing",
    "__version__",
    "apply_resize",
    "estimate",
    "open_artifact",
    "parse_budget",
    "plan",
    "plan_resize",
    "plan_together",
    "read_num_blocks",
]

_HOMES = {
    "Artifact": "reblock.artifact.reader",
    "Engine": "reblock.engine",
    "MemoryBudget": "reblock.budget",
    "Plan": "reblock.planning.result",
    "ReblockError": "reblock.errors",
    "ResizePlan": "reblock.artifact.resize",
    "SharedPlan": "reblock.planning.result",
    "Sizing": "reblock.sizing",
    "apply_resize": "reblock.artifact.resize",
    "estimate": "reblock.sizing",
    "open_artifact": "reblock.artifact.reader",
    "parse_budget": "reblock.budget",
    "plan": "reblock.planning.plan",
    "plan_resize": "reblock.artifact.resize",
    "plan_together": "reblock.planning.share",
    "read_num_blocks": "reblock.artifact.count",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
