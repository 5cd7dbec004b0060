"""In: the keys servers, updates and staleness of a plan. Out: parameter servers: workers push gradients, pull weights.
Does not send anything (coupling/worker.py does) and does not update weights (coupling/parameter_server.py does)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from codescent.base.refusal import Change, Refusal
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
from codescent.plan.served import Piece
from codescent.plan.wire import Wire, kept_name
from codescent.strategies.decides import compression_of, degrees_of, keys_of, rounds_of
from codescent.strategies.served_rounds import are_exact, not_in_rounds, refusals
from codescent.strategies.strategy import Candidate, Strategy

AXIS = "dp_replicate"
DECIDING = ("servers", "updates", "staleness", "momentum_every", "local_steps", "quorum")
WORKERS, SERVERS = 0, 1
"""Indices of the lists of the workers and of the servers."""


class ParameterServer(Strategy):
    """Li et al. 2014, "Scaling distributed machine learning with the parameter server" (OSDI).

    The weights and the optimizer are cut over the servers by bytes. With synchronous updates a server adds the pushes
    of a step, as DDP does. With asynchronous ones it applies each push at once (Dean et al. 2012, "DistBelief"), or
    with a bound on the staleness the pushes of a step together (Ho et al. 2013, "SSP"; Zhang et al. 2016). With
    `average_every` workers push the changes of rounds (Liu et al. 2024, arXiv 2401.09135).
    """

    weights_apart_by = "servers"

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.servers is given."""
        return run.layout.served

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse layouts in which a worker is not one rank, and keys that look after the same gradients."""
        layout, mesh = candidate.layout, candidate.mesh
        if not self.active(candidate):
            return
        said, off = f"parallel.servers = {json.dumps(layout.servers)}", Change({"parallel.servers": 0})
        for axis in AXES:
            if axis != AXIS and mesh.degree(axis) > 1:
                yield Refusal(
                    f"{said}: a worker is one rank with the whole model, but parallel.{axis} = {mesh.degree(axis)}",
                    [Change({f"parallel.{axis}": 1, "parallel.dp_replicate": None}), off],
                )
        yield from refusals(candidate) if layout.average_every else not_in_rounds(candidate)
        if layout.offload != "none":
            yield Refusal(
                f'{said}: parallel.offload = "{layout.offload}": the optimizer is on the servers',
                [Change({"parallel.offload": "none"}), off],
            )
        if layout.data_parallel > 1:
            yield Refusal(
                f"{said}: parallel.data_parallel = {layout.data_parallel}: a worker is one rank with one device",
                [Change({"parallel.data_parallel": 1})],
            )
        if candidate.update.get("kind") == "muon":
            yield Refusal(
                f'{said}: optimizer.kind = "muon" updates whole matrices, which are cut over the servers',
                [Change({"optimizer.kind": "adamw"}), off],
            )
        if not candidate.update.get("elementwise", True):
            yield Refusal(
                f"{said}: optimizer.kind = {candidate.update['kind']} updates whole tensors (it does not say "
                "elementwise = True), which are cut over the servers",
                [off],
            )
        if layout.wire.startswith("powersgd"):
            yield Refusal(
                f'{said}: parallel.wire = "{layout.wire}" is of use in a sum over ranks only',
                [Change({"parallel.wire": "int4"}), Change({"parallel.wire": "none"})],
            )
        if layout.reduce_dtype != "auto":
            yield Refusal(
                f'{said}: parallel.reduce_dtype = "{layout.reduce_dtype}": servers add in fp32, or in fp64, and '
                "parallel.wire is the format of pushes",
                [Change({"parallel.reduce_dtype": "auto"})],
            )
        if layout.wire_from:
            yield Refusal(
                f"{said}: parallel.wire_from = {layout.wire_from}: pushes have one format in all steps",
                [Change({"parallel.wire_from": 0})],
            )
        if layout.staleness is not None and layout.updates == "synchronous":
            yield Refusal(
                f'parallel.staleness = {layout.staleness}: parallel.updates = "synchronous" has none',
                [Change({"parallel.staleness": None}), Change({"parallel.updates": "asynchronous"})],
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Workers have weights and gradients; master copies and optimizer state are on the servers. In rounds of steps
        workers have these too, and only what the outer optimizer keeps is on the servers."""
        if candidate.layout.served_rounds:
            return replace(tensor, apart=(AXIS,))
        return replace(tensor, master_dtype="")

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """Workers push instead of the update, and pull. All ranks agree where something is due at a step."""
        (program,) = schedule.programs
        layout, period = candidate.layout, max(1, candidate.layout.average_every)
        worker = [at for at in program if at.verb is not Verb.STEP or layout.average_every]
        last = period - 1 if period > 1 else None
        worker += [Instruction(Verb.PUSH, step=last), Instruction(Verb.PULL, step=last)]
        programs = (tuple(worker), (Instruction(Verb.SERVE),)) if layout.server_ranks else (tuple(worker),)
        return replace(
            schedule, programs=programs, period=period, dues=tuple(sorted({n for n in candidate.due.values() if n}))
        )

    def decides(self, plan: Plan) -> dict[str, Scalar]:
        """The keys of servers, unless they add the pushes of each step: then the losses are those of DDP. In a lossy
        format each server has its own part of a message."""
        layout = plan.layout
        if not layout.served:
            return {}
        keys: dict[str, Scalar] = {}
        if layout.average_every or not (layout.updates == "synchronous" or layout.staleness == 0):
            keys = keys_of(plan, *DECIDING) | degrees_of(plan, AXIS)
        rounds = rounds_of(plan) if layout.average_every else {}
        compression = compression_of(plan)
        return keys | rounds | compression | (keys_of(plan, "servers") if compression else {})

    def exact(self, plan: Plan) -> bool:
        """True if servers add the pushes of each step, computed with the weights of the step before; or if there is
        one worker, whose pushes are never late."""
        layout = plan.layout
        if layout.average_every:
            return are_exact(plan)
        is_synchronous = layout.updates == "synchronous" or layout.staleness == 0
        return (is_synchronous or plan.mesh.world_size == 1) and Wire.parse(layout.wire).exact

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """A worker pushes each server's part once a step, or once a round. A server, here the largest, sends its part
        to each worker.

        Not counted are the weights with which a command begins, which are pulled once, and the squared norm of 8 bytes
        that several servers sum in an update. With steps by speed, the least is declared: speeds decide the rest.
        """
        wire, wide = Wire.parse(plan.layout.wire), plan.trained[0].optimizer_dtype
        period, what = plan.schedule.period, "changes" if plan.layout.average_every else "gradients"
        least = ", at least: slower workers push and pull more often" if plan.layout.local_steps == "by_speed" else ""
        for server, pieces in enumerate(plan.pieces):
            numel = _numel(pieces)
            yield Traffic(
                Collective.PUSH,
                AXIS,
                wire.message_bytes(numel, wide),
                wide if wire.method == "none" else wire.message_dtype,
                Verb.PUSH,
                None,
                f"{what}, to server {server}{least}",
                stage=WORKERS,
                every=period,
                at=period - 1,
            )
        yield Traffic(
            Collective.PULL,
            AXIS,
            max(map(_numel, plan.pieces)) * DTYPE_BYTES[plan.work.precision],
            plan.work.precision,
            Verb.SERVE if plan.layout.server_ranks else Verb.PULL,
            None,
            f"weights of a server, to each worker{least}",
            plan.mesh.world_size,
            stage=SERVERS if plan.layout.server_ranks else WORKERS,
            every=period,
            at=period - 1,
        )

    def kept(self, plan: Plan, stage: int) -> Iterator[KeptTensor]:
        """What a worker has not sent yet of its gradients, for each server."""
        wire, dtype = Wire.parse(plan.layout.wire), plan.trained[0].optimizer_dtype
        if wire.lossy:
            for server, pieces in enumerate(plan.pieces):
                yield KeptTensor(kept_name(server, "residual"), (_numel(pieces),), dtype, stage=WORKERS)


def _numel(pieces: Sequence[Piece]) -> int:
    """Number of elements of a server."""
    return sum(piece.numel for piece in pieces)
