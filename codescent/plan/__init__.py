"""In: nothing. Out: the dataclasses of a plan. `codescent.plan(...)` calls the function of codescent/api/plan.py.
Does not import torch, does not divide a model (strategies does) and does not estimate seconds (cost does)."""

import sys

from codescent.base.callable_room import CallableRoom
from codescent.base.dtypes import DTYPE_BYTES as DTYPE_BYTES
from codescent.base.dtypes import WIDE as WIDE
from codescent.plan.flops import FlopFormula as FlopFormula
from codescent.plan.layout import Layout as Layout
from codescent.plan.mesh import AXES as AXES
from codescent.plan.mesh import MOST_RANKS as MOST_RANKS
from codescent.plan.mesh import Mesh as Mesh
from codescent.plan.mesh import product_of as product_of
from codescent.plan.model import Lora as Lora
from codescent.plan.model import ModelFacts as ModelFacts
from codescent.plan.model import Size as Size
from codescent.plan.objective import CROSS_ENTROPY as CROSS_ENTROPY
from codescent.plan.objective import Objective as Objective
from codescent.plan.plan import DECAY_STEPS as DECAY_STEPS
from codescent.plan.plan import SCALE_RANKS as SCALE_RANKS
from codescent.plan.plan import OlderPlan as OlderPlan
from codescent.plan.plan import Plan as Plan
from codescent.plan.schedule import RECEIVES as RECEIVES
from codescent.plan.schedule import ROUND_SCALARS as ROUND_SCALARS
from codescent.plan.schedule import SCALARS as SCALARS
from codescent.plan.schedule import SENDS as SENDS
from codescent.plan.schedule import Instruction as Instruction
from codescent.plan.schedule import Schedule as Schedule
from codescent.plan.schedule import Verb as Verb
from codescent.plan.served import Piece as Piece
from codescent.plan.shard import KeptTensor as KeptTensor
from codescent.plan.shard import Memory as Memory
from codescent.plan.shard import Parameter as Parameter
from codescent.plan.shard import Placement as Placement
from codescent.plan.shard import Role as Role
from codescent.plan.shard import TensorPlan as TensorPlan
from codescent.plan.traffic import Collective as Collective
from codescent.plan.traffic import Traffic as Traffic
from codescent.plan.work import Scalar as Scalar
from codescent.plan.work import TaskFacts as TaskFacts
from codescent.plan.work import Work as Work

sys.modules[__name__].__class__ = CallableRoom
