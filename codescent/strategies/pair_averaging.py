"""In: the keys gossip* of a plan. Out: asynchronous gossip: pairs of replicas average weights beside the computation.
Sends nothing (coupling/pair_exchange.py does) and hands out no samples (coupling/work_queue.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codescent.base.refusal import Change, Refusal
from codescent.plan import (
    AXES,
    DTYPE_BYTES,
    Collective,
    Instruction,
    Plan,
    Scalar,
    Schedule,
    TensorPlan,
    Traffic,
    Verb,
)
from codescent.plan.wire import Wire
from codescent.strategies.gossip import alone, gossip_of, twice
from codescent.strategies.gossip_graphs import AXIS
from codescent.strategies.local_sgd import unsent_gradients
from codescent.strategies.strategy import Candidate, Strategy

GRAPHS = ("ring", "pairs")
"""Values of parallel.gossip that have an asynchronous form."""


class PairAveraging(Strategy):
    """AD-PSGD (Lian et al. 2018, "Asynchronous decentralized parallel SGD", algorithm 1).

    A replica computes a gradient while others average with it. Its update is applied to the weights as they are then.
    Replicas are active or passive, and each average is of one of both kinds: so nobody waits in a circle.
    """

    weights_apart_by = "gossip"

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.gossip_mode is asynchronous."""
        return run.layout.averages_beside

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse a single replica, replicas of several ranks, graphs that are not bipartite, and lossy wires."""
        if self.active(candidate):
            yield from alone(candidate)
            yield from twice(candidate)
            yield from _several_ranks(candidate)
            yield from _wrong_graph(candidate)
            yield from _wrong_wire(candidate)
            yield from unsent_gradients(candidate)

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Weights and optimizer state differ between replicas."""
        return replace(tensor, apart=(AXIS,))

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """MERGE takes the weights as they are, STEP updates them, AVERAGE begins the next average, if it is due."""
        (program,) = schedule.programs
        at = next(number for number, one in enumerate(program) if one.verb is Verb.STEP)
        merge, average = Instruction(Verb.MERGE, fragment=0), Instruction(Verb.AVERAGE, fragment=0)
        programs = ((*program[:at], merge, program[at], average),)
        due = {*candidate.due.values(), candidate.layout.agree_every or 0}
        return replace(schedule, programs=programs, dues=tuple(sorted(due - {0})))

    def decides(self, plan: Plan) -> dict[str, Scalar]:
        """The keys of gossip."""
        return gossip_of(plan) if self.active(plan) else {}

    def exact(self, plan: Plan) -> bool:
        """False: a gradient is of older weights than those that it changes."""
        return False

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """The weights of an average. An active replica sends them; a passive one answers with their change.

        Meetings of all ranks are not counted: 8 KiB of projections for the distance, and two scalars.
        """
        dtype, every = plan.trained[0].optimizer_dtype, plan.layout.gossip_every
        size = sum(tensor.parameter.numel for tensor in plan.trained) * DTYPE_BYTES[dtype]
        what = "weights, to a drawn passive neighbour; a passive replica answers as often, on average"
        sent = Traffic(Collective.SEND, AXIS, size, dtype, Verb.AVERAGE, Verb.BACKWARD, what)
        yield replace(sent, every=every, at=every - 1)


def _synchronous(**changes: str) -> Change:
    """The synchronous form, and other keys of [parallel]."""
    return Change({"parallel.gossip_mode": "synchronous", **{f"parallel.{key}": to for key, to in changes.items()}})


def _several_ranks(candidate: Candidate) -> Iterator[str]:
    """Problems: the ranks of a replica would average at different times."""
    for axis in AXES:
        if axis != AXIS and (degree := candidate.mesh.degree(axis)) > 1:
            yield Refusal(
                f'parallel.gossip_mode = "asynchronous": a replica is one rank with the whole model, but '
                f"parallel.{axis} = {degree}",
                [Change({f"parallel.{axis}": 1, "parallel.dp_replicate": None}), _synchronous()],
            )


def _wrong_graph(candidate: Candidate) -> Iterator[str]:
    """Problems: a graph without active and passive replicas that alternate."""
    layout, replicas = candidate.layout, candidate.mesh.degree(AXIS)
    if layout.gossip not in GRAPHS:
        yield Refusal(
            f'parallel.gossip = "{layout.gossip}": parallel.gossip_mode = "asynchronous" averages pairs of an active '
            "and a passive replica",
            [Change({"parallel.gossip": "pairs"}), _synchronous()],
        )
    elif layout.gossip == "ring" and replicas > 1 and replicas % 2:
        yield Refusal(
            f'parallel.gossip = "ring": {replicas} replicas, an odd number, cannot be active and passive in turn, '
            'which parallel.gossip_mode = "asynchronous" needs',
            [
                Change({"parallel.gossip": "pairs"}),
                _synchronous(),
                *(
                    Change({"parallel.dp_replicate": number}, ranks=candidate.world_size // replicas * number)
                    for number in (replicas - 1, replicas + 1)
                ),
            ],
        )


def _wrong_wire(candidate: Candidate) -> Iterator[str]:
    """Problems: a lossy wire, whose public copies need the same neighbours in the same order."""
    layout = candidate.layout
    if Wire.parse(layout.wire).lossy:
        yield Refusal(
            f'parallel.wire = "{layout.wire}": would round whole weights in parallel.gossip_mode = "asynchronous", '
            "and nothing would send what is lost",
            [Change({"parallel.wire": "none"}), _synchronous(gossip="ring")],
        )
