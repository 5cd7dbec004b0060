"""In: a plan. Out: ORDER, all strategies in the order in which they are applied; the plan's strategies and collectives.
Does not import torch, so planning starts fast. Only methods that run in training, such as `divide`, import it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codescent.plan import KeptTensor, Plan, Scalar, Traffic
from codescent.plan.activations import RECOMPUTES, SavedTensor, settled
from codescent.plan.operators import LayerOperator
from codescent.strategies.context_parallel import ContextParallel
from codescent.strategies.ddp import DDP
from codescent.strategies.expert_loads import ExpertLoads
from codescent.strategies.expert_parallel import ExpertParallel
from codescent.strategies.fp8 import Fp8Products
from codescent.strategies.gossip import Gossip
from codescent.strategies.local_sgd import LocalSGD
from codescent.strategies.muon import Muon
from codescent.strategies.offload import Offload
from codescent.strategies.pair_averaging import PairAveraging
from codescent.strategies.parameter_server import ParameterServer
from codescent.strategies.pipeline import Pipeline
from codescent.strategies.recompute import Recompute
from codescent.strategies.strategy import Candidate, Gradients, Strategy, ThisRank
from codescent.strategies.tensor import TensorParallel
from codescent.strategies.torch_data_parallel import DataParallel
from codescent.strategies.zero import Zero

ORDER = (
    ContextParallel(),
    TensorParallel(),
    ExpertParallel(),
    Fp8Products(),
    Recompute(),
    Zero(),
    DDP(),
    Pipeline(),
    DataParallel(),
    Offload(),
    Muon(),
    LocalSGD(),
    Gossip(),
    PairAveraging(),
    ParameterServer(),
    ExpertLoads(),
)
"""From inner to outer: a strategy receives the module, and its tensors' placements, from the strategy before it."""


def active(run: Candidate | Plan) -> tuple[Strategy, ...]:
    """The strategies that a run uses, in their order."""
    return tuple(strategy for strategy in ORDER if strategy.active(run))


def traffic_of(strategy: Strategy, plan: Plan) -> tuple[Traffic, ...]:
    """Every collective that a strategy issues in a step, with the pipeline stage whose ranks issue it."""
    return tuple(
        replace(record, stage=stage) if plan.mesh.pp > 1 else record
        for stage in range(plan.mesh.pp)
        for record in strategy.traffic(plan, stage)
    )


def decides(plan: Plan) -> dict[str, Scalar]:
    """The keys of [parallel] that decide the losses of a plan, with their values."""
    return {key: value for strategy in ORDER for key, value in strategy.decides(plan).items()}


def saved_of(tensors: Sequence[SavedTensor], run: Candidate | Plan) -> tuple[SavedTensor, ...]:
    """What forward keeps for backward of a micro-batch, as the strategies leave what the model declares."""
    return tuple(settled(_divided(tensors, run), run.mesh))


def deferred_of(tensors: Sequence[SavedTensor], run: Candidate | Plan) -> tuple[SavedTensor, ...]:
    """What deferred products read of a micro-batch, in the same way; and what a stage receives, where they may read it.

    They read what backward has computed again, too.
    """
    waiting = [replace(tensor, under=RECOMPUTES, small="") for tensor in tensors if tensor.product]
    left = (tensor for tensor in _divided(waiting, run) if tensor.product or tensor.border == "first")
    return tuple(settled(left, run.mesh))


def _divided(tensors: Sequence[SavedTensor], run: Candidate | Plan) -> Sequence[SavedTensor]:
    for strategy in ORDER:
        tensors = tuple(strategy.saved(tensors, run))
    return tensors


def operators_of(operators: Sequence[LayerOperator], run: Candidate | Plan) -> tuple[LayerOperator, ...]:
    """What a rank computes beside products with matrices, as the strategies leave what the model declares."""
    for strategy in active(run):
        operators = tuple(strategy.operators(operators, run))
    return tuple(operators)


def kept_of(strategy: Strategy, plan: Plan) -> tuple[KeptTensor, ...]:
    """What a strategy keeps between steps, with the pipeline stage whose ranks hold it."""
    return tuple(
        replace(kept, stage=stage) if plan.mesh.pp > 1 else kept
        for stage in range(plan.mesh.pp)
        for kept in strategy.kept(plan, stage)
    )


__all__ = [
    "Candidate",
    "DataParallel",
    "Gradients",
    "Recompute",
    "Strategy",
    "TensorParallel",
    "ThisRank",
]
