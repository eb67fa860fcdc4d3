"""How many blocks and requests a model or an artifact has room for, and why; nothing is compiled.

sources      a name becomes a model's configuration, and the size of its weights
settings     what was asked becomes the shapes of programs
candidate    these become a memory plan, as an artifact has one
answer       the code that sizes real caches answers for either
plan, share  one of them on its devices, or several on the same
"""

from reblock.planning.plan import make_plan, open_subject, plan
from reblock.planning.result import Plan, SharedPlan
from reblock.planning.settings import PlanSettings
from reblock.planning.share import plan_together, share_device
from reblock.planning.target import Target, parse_target

__all__ = [
    "Plan",
    "PlanSettings",
    "SharedPlan",
    "Target",
    "make_plan",
    "open_subject",
    "parse_target",
    "plan",
    "plan_together",
    "share_device",
]
