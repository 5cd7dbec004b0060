"""In: nothing. Out: the nouns of a plan, re-exported from their files.
Does not import anything but the standard library, and holds no rule: rules live in strategies, prices in cost."""

from codescent.base.dtypes import DTYPE_BYTES, WIDE
from codescent.plan.layout import Layout
from codescent.plan.mesh import AXES, DIVIDING, Mesh
from codescent.plan.model import Lora, ModelFacts, Size
from codescent.plan.plan import OlderPlan, Plan
from codescent.plan.schedule import RECEIVES, SCALARS, SENDS, Instruction, Schedule, Verb
from codescent.plan.shard import Memory, Parameter, Placement, Role, TensorPlan
from codescent.plan.task import Scalar, TaskFacts
from codescent.plan.traffic import Collective, Traffic
from codescent.plan.work import Work

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
    "Layout",
    "Lora",
    "Memory",
    "Mesh",
    "ModelFacts",
    "OlderPlan",
    "Parameter",
    "Placement",
    "Plan",
    "Role",
    "Scalar",
    "Schedule",
    "Size",
    "TaskFacts",
    "TensorPlan",
    "Traffic",
    "Verb",
    "Work",
]
