"""In: nothing. Out: the nouns of a plan (mesh, shard, schedule, traffic, plan), re-exported from their files.
Does not import anything but the standard library, and holds no rule: rules live in strategies, prices in cost."""

from codescent.plan.mesh import AXES, DIVIDING, Mesh
from codescent.plan.plan import Plan, Work
from codescent.plan.schedule import RECEIVES, SCALARS, SENDS, Instruction, Schedule, Verb
from codescent.plan.shard import DTYPE_BYTES, WIDE, Memory, Parameter, Placement, Role, TensorPlan
from codescent.plan.traffic import Collective, Traffic

__all__ = [
    "AXES",
    "DIVIDING",
    "DTYPE_BYTES",
    "RECEIVES",
    "SCALARS",
    "SENDS",
    "WIDE",
    "Collective",
    "Instruction",
    "Memory",
    "Mesh",
    "Parameter",
    "Placement",
    "Plan",
    "Role",
    "Schedule",
    "TensorPlan",
    "Traffic",
    "Verb",
    "Work",
]
