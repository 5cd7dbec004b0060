"""In: a plan, this rank's weights, what the run gives. Out: the coupling of this rank, by the strategies of the plan.
Does not act: the files of this room do. strategies/ declares and divides, this room acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codescent.coupling.averaging import Averaging
from codescent.coupling.coupling import Coupling, Present, StepSums, WorkItem
from codescent.coupling.local_steps import LocalSteps
from codescent.coupling.mixing import Mixing
from codescent.coupling.pair_exchange import PairExchange
from codescent.coupling.pairs import introduced
from codescent.coupling.served import served
from codescent.coupling.services import Services, TrainedWeight
from codescent.plan import Plan
from codescent.strategies import active
from codescent.strategies.gossip import Gossip
from codescent.strategies.local_sgd import LocalSGD
from codescent.strategies.pair_averaging import PairAveraging
from codescent.strategies.parameter_server import ParameterServer
from codescent.strategies.strategy import Strategy, ThisRank

Make = Callable[[Plan, Sequence[TrainedWeight], Services], Coupling]


def of(plan: Plan, weights: Sequence[TrainedWeight], services: Services) -> Coupling:
    """The coupling of this rank, by COUPLINGS; where no strategy of it is active, all ranks take every step together.

    Args:
        plan: of the run.
        weights: the trained tensors of this rank, in the plan's order, with initial values.
        services: what the run gives.
    """
    found = [make for kind, make in COUPLINGS.items() if any(type(one) is kind for one in active(plan))]
    return (found or [_together])[-1](plan, weights, services)


def reads_ahead(plan: Plan) -> bool:
    """Whether a rank knows its samples before the step: not, where work is given out."""
    return not plan.layout.hands_out


def _together(plan: Plan, weights: Sequence[TrainedWeight], services: Services) -> Coupling:
    return Coupling(plan, services.own_optimizer(weights), services)


def _averages(plan: Plan, weights: Sequence[TrainedWeight], services: Services) -> Coupling:
    optimizer = services.own_optimizer(weights)
    return LocalSteps(plan, optimizer, services, Averaging(weights, services.this_rank))


def _mixes(plan: Plan, weights: Sequence[TrainedWeight], services: Services) -> Coupling:
    return LocalSteps(plan, services.own_optimizer(weights), services, Mixing(weights, services.this_rank))


def _in_pairs(plan: Plan, weights: Sequence[TrainedWeight], services: Services) -> Coupling:
    optimizer = services.own_optimizer(weights)
    return introduced(plan, optimizer, services, PairExchange(weights, services.this_rank))


COUPLINGS: dict[type[Strategy], Make] = {
    LocalSGD: _averages,
    Gossip: _mixes,
    PairAveraging: _in_pairs,
    ParameterServer: served,
}
"""By strategy. Of several that are active, the last one of this table."""

__all__ = ["Coupling", "Present", "Services", "StepSums", "ThisRank", "TrainedWeight", "WorkItem", "of", "reads_ahead"]
