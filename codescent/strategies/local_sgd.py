"""In: the keys average_every and outer_* of a plan. Out: local SGD: replicas that train apart for a round of steps.
Does not sum gradients over replicas and does not send anything: coupling/averaging.py averages the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from codescent.base.nearest import divisors, nearest, nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.plan import (
    AXES,
    DTYPE_BYTES,
    Collective,
    Instruction,
    KeptTensor,
    Layout,
    Plan,
    Scalar,
    Schedule,
    TensorPlan,
    Traffic,
    Verb,
)
from codescent.plan.schedule import with_round
from codescent.plan.wire import Wire, kept_name
from codescent.strategies.decides import compression_of, degrees_of, rounds_of
from codescent.strategies.strategy import Candidate, Strategy

AXIS = "dp_replicate"
LOSSES = "outer.losses"
"""Name of the tensor that counts, for each fragment, the losses of this replica and of all since the fragment left."""


class LocalSGD(Strategy):
    """Replicas take `average_every` steps alone, then average their weights (McMahan et al. 2017, "FedAvg", algorithm
    1; Stich 2019, "Local SGD converges fast").

    With an outer optimizer the mean change of a round is a gradient for it (Douillard et al. 2023, "DiLoCo", algorithm
    1). With `fragments` parts of the weights leave one after the other, and come back `overlap_steps` later (Douillard
    et al. 2025, "Streaming DiLoCo").
    """

    weights_apart_by = "average_every"

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.average_every is given, and no servers take the changes (parameter_server.py)."""
        return run.layout.average_every > 0 and not run.layout.served

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse keys that act within a round, rounds without room for their exchanges, and layouts that know one copy
        of the weights only."""
        if self.active(candidate):
            yield from _lonely(candidate)
            yield from wrong_rounds(candidate)
            yield from _wrong_fragments(candidate)
            yield from wrong_outer(candidate)
            yield from _wrong_quorum(candidate)
            yield from unsent_gradients(candidate)
        elif candidate.layout.outer_optimizer != "none" and not candidate.layout.average_every:
            yield Refusal(
                f'parallel.outer_optimizer = "{candidate.layout.outer_optimizer}": needs parallel.average_every',
                [Change({"parallel.outer_optimizer": "none"})],
            )
        if self.active(candidate) and candidate.layout.offload != "none":
            yield Refusal(
                f'parallel.average_every = {candidate.layout.average_every}: parallel.offload = "'
                f'{candidate.layout.offload}" has the weights in host memory, which are not averaged there',
                [Change({"parallel.offload": "none"})],
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Weights and optimizer state differ between replicas."""
        return replace(tensor, apart=(AXIS,))

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """Each fragment leaves after its step, and is merged `overlap_steps` later: see `departures`."""
        layout = candidate.layout
        added: list[tuple[int, Instruction]] = []
        leaving = departures(layout.average_every, layout.fragments, layout.overlap_steps)
        for fragment, step in enumerate(leaving):
            back, last = step + layout.overlap_steps, fragment == layout.fragments - 1
            added.append((2 * step, Instruction(Verb.AVERAGE, fragment=fragment, step=step)))
            added.append((2 * back + 1, Instruction(Verb.MERGE, fragment=fragment, step=back, last=last)))
        ordered = [instruction for _, instruction in sorted(added, key=lambda one: one[0])]
        return with_round(schedule, layout.average_every, ordered, layout.synchronous_steps)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """The sums of each fragment, in the format of `wire`; in the opening steps the sum of the gradients."""
        layout, opening = plan.layout, plan.schedule.opening_steps
        if plan.mesh.degree(AXIS) == 1:
            return
        if opening:
            trained = [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained]
            for tensors in by_holders(plan, trained):
                dtype = tensors[0].bucket_dtype or tensors[0].gradient_dtype
                numel = sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in tensors)
                size, what = numel * DTYPE_BYTES[dtype], "gradients of an opening step"
                yield Traffic(Collective.ALL_REDUCE, AXIS, size, dtype, Verb.REDUCE, None, what, until=opening)
        leaving = departures(layout.average_every, layout.fragments, layout.overlap_steps)
        during = Verb.BACKWARD if layout.overlap_steps else None
        for fragment, tensors in messages_of(plan, stage):
            step, shapes = leaving[fragment], _shapes(plan, tensors)
            what = "weights" if layout.fragments == 1 else f"weights of fragment {fragment}"
            for record in sums_of(plan, shapes):
                yield replace(
                    record,
                    verb=Verb.AVERAGE,
                    during=during,
                    what=f"{what}{record.what}",
                    every=layout.average_every,
                    at=step,
                    since=max(opening, record.since),
                )

    def kept(self, plan: Plan, stage: int) -> Iterator[KeptTensor]:
        """The anchors (weights after the last average), the outer momentum, and what `wire` keeps."""
        if plan.layout.keeps_anchor:
            for tensor in plan.held_by(stage):
                if not tensor.parameter.trained:
                    continue
                name, shape, dtype = tensor.parameter.name, tensor.parameter.shape, tensor.optimizer_dtype
                yield KeptTensor(f"outer.anchor.model.{name}", shape, dtype, tensor.optimizer)
                if plan.layout.has_outer_momentum:
                    yield KeptTensor(f"outer.momentum.model.{name}", shape, dtype, tensor.optimizer)
        if plan.mesh.degree(AXIS) == 1:
            return
        if not plan.layout.agrees_at_ends:  # else nothing is counted at the end of a round
            yield KeptTensor(LOSSES, (plan.layout.fragments, 2), "fp64")
        for number, (_, tensors) in enumerate(messages_of(plan, stage)):
            for state in Wire.parse(plan.layout.wire).state(
                _shapes(plan, tensors), tensors[0].optimizer_dtype, plan.mesh.degree(AXIS)
            ):
                yield KeptTensor(kept_name(number, state.name), state.shape, state.dtype)

    def decides(self, plan: Plan) -> dict[str, Scalar]:
        """The keys of rounds. Fragments that come back later count losses by rank."""
        if not self.active(plan):
            return {}
        by_rank = plan.layout.fragments > 1 or plan.layout.overlap_steps > 0
        return rounds_of(plan) | (degrees_of(plan, *AXES) if by_rank else {}) | compression_of(plan)

    def exact(self, plan: Plan) -> bool:
        """True if each step is averaged and the update is linear in the gradient: the mean of x - r g_i is x - r g.

        Adam divides by a root of squared gradients, and clipping by a norm: their means are of other values. Replicas
        are weighted by their losses of the present step, but a momentum has those of earlier steps.
        """
        layout, is_linear = plan.layout, averages_linearly(plan)
        if plan.mesh.degree(AXIS) > 1 and not (layout.average_every == 1 and is_linear):
            return False
        outer = (layout.outer_optimizer, layout.outer_learning_rate, layout.outer_momentum)
        is_mean = layout.outer_optimizer == "none" or outer == ("sgd", 1.0, 0.0)
        shapes = [shape for stage in range(plan.mesh.degree("pp")) for shape in _trained_shapes(plan, stage)]
        return is_mean and Wire.parse(layout.wire).exact_for(shapes)


def averages_linearly(plan: Plan) -> bool:
    """Whether the mean of replicas' updates, weighted by losses, is the update of the mean gradient."""
    update = plan.update
    keeps_weights = plan.task.equal_losses or not update.get("momentum")
    return update.get("kind") == "sgd" and not update.get("max_grad_norm") and keeps_weights


def unsent_gradients(candidate: Candidate) -> Iterator[Refusal]:
    """Refuse a format of gradients where no rank sends any but in opening steps, which sum them in their own."""
    mesh, given = candidate.mesh, candidate.layout.reduce_dtype
    if given != "auto" and mesh.degree(AXIS) > 1 and mesh.degree("cp") == mesh.degree("dp_shard") == 1:
        yield Refusal(
            f'parallel.reduce_dtype = "{given}": replicas that train apart send no gradients in rounds',
            [Change({"parallel.reduce_dtype": "auto"})],
        )


def departures(period: int, fragments: int, overlap: int) -> list[int]:
    """The step of the round (from 0) after which each fragment leaves: evenly spaced, and the last one comes back at
    the end of the round."""
    return [(number + 1) * (period - overlap) // fragments - 1 for number in range(fragments)]


def fragments_of(plan: Plan, stage: int) -> list[list[TensorPlan]]:
    """The trained tensors of a stage by fragment. Blocks are dealt out in turn (Douillard et al. 2025, 2.2, strided);
    what is outside of blocks goes with the first block that reads beside it.

    A fragment of a stage may be empty.
    """
    fragments, layers = plan.layout.fragments, plan.model.num_layers
    found: list[list[TensorPlan]] = [[] for _ in range(fragments)]
    for tensor in plan.held_by(stage):
        if tensor.parameter.trained:
            block = min(max(tensor.parameter.depths[0], 1), layers) - 1
            found[block % fragments].append(tensor)
    return found


def messages_of(plan: Plan, stage: int) -> list[tuple[int, list[TensorPlan]]]:
    """The tensors of each sum of a stage, with the fragment that they belong to."""
    fragments = enumerate(fragments_of(plan, stage))
    return [(fragment, tensors) for fragment, whole in fragments for tensors in by_holders(plan, whole)]


def by_holders(plan: Plan, tensors: Sequence[TensorPlan]) -> list[list[TensorPlan]]:
    """Tensors that the same ranks of a replica hold, in one list.

    Some tensors have copies on all ranks of tp, or on two stages. These ranks then send equal messages. In messages
    with other tensors the copies would be rounded, or added, in other ways on each of these ranks, and drift apart.
    """
    found: dict[object, list[TensorPlan]] = {}
    for tensor in tensors:
        found.setdefault(("tp" in tensor.optimizer.shards, plan.stages_of(tensor)), []).append(tensor)
    return list(found.values())


def _trained_shapes(plan: Plan, stage: int) -> list[tuple[int, ...]]:
    return _shapes(plan, [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained])


def _shapes(plan: Plan, tensors: Sequence[TensorPlan]) -> list[tuple[int, ...]]:
    """Of what the largest rank of a stage updates of each tensor."""
    return [tensor.optimizer.sizes(tensor.parameter.shape, plan.mesh) for tensor in tensors]


def sums_of(plan: Plan, shapes: Sequence[tuple[int, ...]]) -> Iterator[Traffic]:
    """The collectives of one sum over replicas of tensors of these shapes, in the format of `wire`."""
    layout, degree = plan.layout, plan.mesh.degree(AXIS)
    dtype = plan.trained[0].optimizer_dtype
    wire, whole = Wire.parse(layout.wire), Wire()
    since = layout.wire_from if wire.lossy else 0
    for form, first, until in ((whole, 0, since), (wire, since, None)):
        if until == 0:
            continue
        for record in form.collectives(shapes, dtype, degree):
            what = f", {record.what}" if record.what else ""
            yield Traffic(
                record.collective,
                AXIS,
                record.payload_bytes,
                record.dtype,
                Verb.AVERAGE,
                None,
                what,
                record.times,
                since=first,
                until=until,
            )


def _lonely(candidate: Candidate) -> Iterator[str]:
    """A problem: several ranks, but one replica. The ranks of other axes hold parts of it, and work on every step."""
    if candidate.mesh.degree(AXIS) == 1 and candidate.world_size > 1:
        yield Refusal(
            f"parallel.average_every = {candidate.layout.average_every}: needs replicas that can train apart, and "
            "parallel.dp_replicate is 1; ranks along dp_shard, tp, pp and cp share each step",
            [
                Change({"parallel.average_every": 0}),
                Change({"parallel.dp_replicate": 2}, ranks=2 * candidate.world_size),
            ],
        )


def wrong_outer(candidate: Candidate) -> Iterator[str]:
    """A problem: Nesterov's method without a momentum."""
    if candidate.layout.outer_optimizer == "nesterov" and candidate.layout.outer_momentum == 0:
        yield Refusal(
            'parallel.outer_optimizer = "nesterov": parallel.outer_momentum = 0 leaves plain SGD',
            [Change({"parallel.outer_optimizer": "sgd"}), Change({"parallel.outer_momentum": 0.9})],
        )


def _wrong_quorum(candidate: Candidate) -> Iterator[str]:
    """A problem: a quorum without servers."""
    if candidate.layout.quorum is not None:
        yield Refusal(
            f"parallel.quorum = {candidate.layout.quorum}: a collective waits for all ranks, a server need not",
            [
                Change({"parallel.servers": 1, "parallel.dp_replicate": None}),
                Change({"parallel.quorum": None}),
            ],
        )


def wrong_rounds(candidate: Candidate) -> Iterator[str]:
    """Problems: keys whose steps are not at the end of a round."""
    layout, period = candidate.layout, candidate.layout.average_every
    due = {**candidate.due, "parallel.synchronous_steps": layout.synchronous_steps}
    periods = [number for number in divisors(math.gcd(*due.values())) if _has_room(layout, number)]
    for key, steps in due.items():
        if steps % period:
            yield Refusal(
                f"{key} = {steps}: not a multiple of parallel.average_every = {period}; replicas agree at the end of a "
                "round only",
                [
                    *each(key, nearest_multiples(steps, period)),
                    *each("parallel.average_every", nearest(periods, period)),
                ],
            )


def _has_room(layout: Layout, period: int) -> bool:
    """Whether a round of so many steps has room for the fragments and their way."""
    return period >= layout.fragments + layout.overlap_steps


def _wrong_fragments(candidate: Candidate) -> Iterator[str]:
    """Problems: more fragments than blocks or than steps of a round, an overlap as long as the round."""
    layout, layers = candidate.layout, candidate.model.num_layers
    most = min(layers, layout.average_every)
    if layout.fragments > most:
        yield Refusal(
            f"parallel.fragments = {layout.fragments}: the model has {layers} blocks, and a round "
            f"{layout.average_every} steps (parallel.average_every)",
            each("parallel.fragments", [most]),
        )
    fragments = min(layout.fragments, most)
    room = layout.average_every - fragments
    if layout.overlap_steps > room:
        yield Refusal(
            f"parallel.overlap_steps = {layout.overlap_steps}: a round has {layout.average_every} steps "
            f"(parallel.average_every), and {fragments} of them send a fragment",
            each("parallel.overlap_steps", [room]),
        )
