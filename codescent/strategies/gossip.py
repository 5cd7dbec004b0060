"""In: the keys gossip* of a plan. Out: gossip: replicas that train apart and mix their weights with neighbours.
Does not say who the neighbours are (gossip_graphs.py does) and does not send anything (coupling/mixing.py does)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from codescent.base.counted import counted
from codescent.base.nearest import divisors, nearest, nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.plan import (
    AXES,
    DTYPE_BYTES,
    Collective,
    Instruction,
    KeptTensor,
    Plan,
    Scalar,
    Schedule,
    TensorPlan,
    Traffic,
    Verb,
)
from codescent.plan.schedule import with_round
from codescent.plan.wire import Wire
from codescent.strategies.decides import compression_of, degrees_of, keys_of
from codescent.strategies.gossip_graphs import AXIS, SYMMETRIC, graph_of
from codescent.strategies.local_sgd import by_holders, unsent_gradients
from codescent.strategies.strategy import Candidate, Strategy

SKETCH = 1024
"""Random projections of the weights from which the distance of the replicas is estimated: standard error
sqrt(2 / 1024), 4.4 % of its square."""

MOST_EXCHANGES = 32
"""With agree_every = "auto", ranks agree after so many exchanges at most: a request to stop waits no longer."""


class Gossip(Strategy):
    """Every `gossip_every` steps each replica mixes its weights with those of its neighbours: x_i = sum_j W_ij x_j.

    The graphs: ring (Lian et al. 2017, "D-PSGD", algorithm 1), pairs drawn anew (Boyd et al. 2006), complete, one peer
    of a directed exponential graph (Assran et al. 2019, "SGP", appendix A), push-sum to a drawn replica (Kempe et al.
    2003; unlike SGP, a change by training counts w_i times: see `Mixing`). With a lossy `wire`, replicas send
    differences to public copies (Koloskova et al. 2019, "CHOCO-SGD", algorithm 2).
    """

    weights_apart_by = "gossip"

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.gossip is given, in its synchronous form: PairAveraging is the other."""
        return run.layout.gossip != "none" and not run.layout.averages_beside

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse a single replica, a second way to average, wires that a graph cannot use, and keys that act within a
        round."""
        if self.active(candidate):
            yield from alone(candidate)
            yield from twice(candidate)
            yield from _wrong_wire(candidate)
            yield from _wrong_periods(candidate)
            yield from unsent_gradients(candidate)

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Weights and optimizer state differ between replicas."""
        return replace(tensor, apart=(AXIS,))

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """A round ends with an exchange. All ranks agree after some rounds: see `agreement`."""
        every = candidate.layout.gossip_every
        exchange = Instruction(Verb.EXCHANGE, step=every - 1)
        return replace(with_round(schedule, every, [exchange]), agreement=agreement(candidate))

    def decides(self, plan: Plan) -> dict[str, Scalar]:
        """The keys of gossip. Each rank has its own weight of push-sum."""
        if not self.active(plan):
            return {}
        own = degrees_of(plan, *AXES) if plan.layout.gossip == "push-sum" else {}
        return gossip_of(plan) | own | compression_of(plan)

    def exact(self, plan: Plan) -> bool:
        """True if all replicas take the mean of all after each step, and the update is linear: see `LocalSGD.exact`.

        Replicas count alike here, whatever losses they have computed.
        """
        layout, update = plan.layout, plan.update
        is_linear = update.get("kind") == "sgd" and not update.get("max_grad_norm")
        is_mean = layout.gossip == "complete" and layout.gossip_every == 1 and layout.gossip_rate == 1.0
        return is_linear and is_mean and plan.task.equal_losses and Wire.parse(layout.wire).exact

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """The messages of an exchange, and the sum of the projections where the ranks agree."""
        numels, dtype, every = numels_of(plan, stage), plan.trained[0].optimizer_dtype, plan.schedule.agrees_every
        if not numels:
            return
        for numel in numels:
            yield from _messages(plan, numel, dtype)
        if plan.layout.gossip == "push-sum":
            yield replace(_message(plan, 1, "fp64"), what="push-sum weight")
        what = "projections of the weights, for the distance of the replicas"
        sum_of = Traffic(Collective.ALL_REDUCE, AXIS, SKETCH * 8, "fp64", Verb.EXCHANGE, None, what)
        yield replace(sum_of, every=every, at=every - 1)

    def kept(self, plan: Plan, stage: int) -> Iterator[KeptTensor]:
        """Push-sum: the weight. With a lossy wire: the public copies, and the neighbours' mixed."""
        numels, dtype = numels_of(plan, stage), plan.trained[0].optimizer_dtype
        if numels and plan.layout.gossip == "push-sum":
            yield KeptTensor("gossip.weight", (1,), "fp64")
        for number, numel in enumerate(numels if Wire.parse(plan.layout.wire).lossy else ()):
            yield KeptTensor(f"gossip.{number}.public", (numel,), dtype)
            yield KeptTensor(f"gossip.{number}.mixed", (numel,), dtype)


def gossip_of(plan: Plan) -> dict[str, Scalar]:
    """The keys of gossip that decide the losses. A batch is divided by replicas."""
    return keys_of(plan, "gossip", "gossip_mode", "gossip_every", "gossip_rate") | degrees_of(plan, AXIS)


def numels_of(plan: Plan, stage: int) -> list[int]:
    """Elements of each message of an exchange: of the tensors that the same ranks of a replica hold."""
    trained = [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained]
    return [
        sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in tensors)
        for tensors in by_holders(plan, trained)
    ]


def _message(plan: Plan, numel: int, dtype: str) -> Traffic:
    """The messages of an exchange to all neighbours, of so many elements."""
    layout, graph = plan.layout, graph_of(plan)
    rests = f", {counted(graph.resting, 'replica')} in turn without a partner" if graph.resting else ""
    what, size = f"weights, to {counted(graph.messages, 'neighbour')}{rests}", numel * DTYPE_BYTES[dtype]
    sent = Traffic(Collective.SEND, AXIS, size, dtype, Verb.EXCHANGE, None, what, graph.messages)
    return replace(sent, every=layout.gossip_every, at=layout.gossip_every - 1)


def _messages(plan: Plan, numel: int, dtype: str) -> Iterator[Traffic]:
    """`_message` in the format of parallel.wire, and before wire_from as it is."""
    wire, since, sent = Wire.parse(plan.layout.wire), plan.layout.wire_from, _message(plan, numel, dtype)
    if not wire.lossy:
        yield sent
        return
    if since:
        yield replace(sent, until=since)
    kind, size = wire.message_dtype if wire.coded else "uint8", message_bytes(wire, numel, dtype)
    yield replace(sent, payload_bytes=size, dtype=kind, what=f"{sent.what}: differences in {wire}", since=since)


def message_bytes(wire: Wire, numel: int, dtype: str) -> int:
    """Bytes of a message of differences in the format of a lossy wire."""
    if wire.method == "topk":
        return wire.top_message(numel, dtype)
    return wire.message(wire.part(numel, 2)) * DTYPE_BYTES[wire.message_dtype]


def agreement(candidate: Candidate) -> int:
    """After how many steps all ranks agree: parallel.agree_every. auto: the largest number that fits all keys that need
    it, of at most MOST_EXCHANGES exchanges."""
    layout, every = candidate.layout, candidate.layout.gossip_every
    if layout.agree_every is not None:
        return layout.agree_every
    exchanges = math.gcd(*candidate.due.values()) // every
    if not exchanges:
        return MOST_EXCHANGES * every
    return every * max(number for number in range(1, MOST_EXCHANGES + 1) if exchanges % number == 0)


def alone(candidate: Candidate) -> Iterator[str]:
    """A problem: one replica has no neighbours."""
    if candidate.mesh.degree(AXIS) == 1:
        yield Refusal(
            f'parallel.gossip = "{candidate.layout.gossip}": there is one replica, which has no neighbours',
            [
                Change({"parallel.gossip": "none"}),
                Change({"parallel.dp_replicate": 2}, ranks=2 * candidate.world_size),
            ],
        )


def twice(candidate: Candidate) -> Iterator[str]:
    """Problems: another method has the weights of the replicas."""
    layout = candidate.layout
    if layout.average_every:
        yield Refusal(
            f'parallel.gossip = "{layout.gossip}": parallel.average_every = {layout.average_every} averages the same '
            "replicas",
            [Change({"parallel.average_every": 0}), Change({"parallel.gossip": "none"})],
        )
    if layout.served:
        yield Refusal(
            f'parallel.gossip = "{layout.gossip}": parallel.servers = {json.dumps(layout.servers)} has the weights of '
            "the same replicas",
            [Change({"parallel.servers": 0}), Change({"parallel.gossip": "none"})],
        )
    if layout.offload != "none":
        yield Refusal(
            f'parallel.gossip = "{layout.gossip}": parallel.offload = "{layout.offload}" has the weights in host '
            "memory, which are not exchanged there",
            [Change({"parallel.offload": "none"})],
        )


def _wrong_wire(candidate: Candidate) -> Iterator[str]:
    """Problems: formats that need a sum, and lossy ones on a graph that changes from round to round."""
    layout = candidate.layout
    wire = Wire.parse(layout.wire)
    if not wire.lossy:
        return
    if wire.method == "powersgd":
        yield Refusal(
            f'parallel.wire = "{wire}": its factors are summed over all replicas, and gossip has no such sum',
            [Change({"parallel.wire": "int4"}), Change({"parallel.wire": "none"})],
        )
    elif layout.gossip not in SYMMETRIC:
        yield Refusal(
            f'parallel.wire = "{wire}": needs the same neighbours in every round, and parallel.gossip = '
            f'"{layout.gossip}" changes them',
            [Change({"parallel.gossip": SYMMETRIC[0]}), Change({"parallel.wire": "none"})],
        )


def _wrong_periods(candidate: Candidate) -> Iterator[str]:
    """Problems: keys whose steps are not where all ranks agree."""
    layout = candidate.layout
    key, period, unit = "parallel.gossip_every", layout.gossip_every, 1
    if layout.agree_every is not None and layout.agree_every % period:
        yield Refusal(
            f"parallel.agree_every = {layout.agree_every}: not a multiple of {key} = {period}; ranks agree after an "
            "exchange",
            each("parallel.agree_every", nearest_multiples(layout.agree_every, period)),
        )
    elif layout.agree_every is not None:
        key, period, unit = "parallel.agree_every", layout.agree_every, layout.gossip_every
    for name, steps in candidate.due.items():
        if steps % period:
            fitting = divisors(math.gcd(*candidate.due.values()))
            yield Refusal(
                f"{name} = {steps}: not a multiple of {key} = {period}; all ranks agree after such steps only",
                [
                    *each(name, nearest_multiples(steps, period)),
                    *each(key, nearest([number for number in fitting if number % unit == 0], period)),
                ],
            )
