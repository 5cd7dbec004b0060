"""In: a plan, the FLOPs that a device computes while it sends one byte. Out: the relative length of each instruction.
Does not measure a device or a link, and does not simulate a step (simulate.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from codescent.cost.amounts import phases, runs_in
from codescent.cost.simulate import Costs
from codescent.plan import SENDS, Instruction, Plan, Traffic, Verb

FLOPS_PER_BYTE = 1000
"""Between a fast link inside a machine (400 TFLOP/s and 400 GB/s) and a network of 25 GB/s: 16,000."""


@dataclass(frozen=True)
class InstructionCollectives:
    """The collectives of one instruction of a stage, in units.

    Attributes:
        waits_s: the stage waits for them after it has computed the instruction.
        overlapped_s: they begin with the instruction. What is left of them when it ends is part of `waits_s`; sums of
            gradients are waited for by the instruction `reduce`, after the last message to another stage.
    """

    waits_s: float = 0.0
    overlapped_s: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """The lengths of the instructions of a step, in units: the same unit for every schedule of a model.

    Attributes:
        costs: of computing an instruction, and of a message between stages.
        exchanges: by stage and instruction. Instructions without collectives are absent.
        unit: what one unit is, in words.
        unit_flops: FLOPs of a rank in a unit.
    """

    costs: Costs = field(default_factory=Costs)
    exchanges: Mapping[tuple[int, Instruction], InstructionCollectives] = field(default_factory=dict)
    unit: str = "a forward pass"
    unit_flops: float = 1.0

    @property
    def waits(self) -> dict[tuple[int, Instruction], float]:
        """`InstructionCollectives.waits_s` of each stage and instruction."""
        return {at: exchange.waits_s for at, exchange in self.exchanges.items()}


def lengths(plan: Plan, flops_per_byte: float = FLOPS_PER_BYTE) -> Lengths:
    """The lengths of the instructions of a plan.

    One unit is the mean forward pass of a stage: of a micro-batch through 1/p of the model, on one rank. A backward
    pass computes twice as much, less the weight gradients of frozen parameters (`StepFlops.weight_share`). With
    recompute = "full" it first computes its blocks again, with "products" a share of them. What "selective" computes
    again is left out: it is small.

    Args:
        plan: of a run.
        flops_per_byte: FLOPs of a device in the time in which it sends a byte. Copies to the host count as sent.
    """
    flops, mesh, weights = plan.model.forward_flops, plan.mesh, plan.flops().weight_share
    unit_flops = sum(flops) * plan.work.microbatch_size * plan.work.seq_len / (mesh.tp * mesh.cp * plan.devices)
    unit_flops /= mesh.pp
    forward = tuple(mesh.pp * sum(flops[first:stop]) / sum(flops) for first, stop in plan.schedule.depths)
    again = [0.0] * len(forward)
    if plan.layout.computes_blocks_again:
        whole = replace(plan, layout=replace(plan.layout, recompute="full")).flops().recomputed_flops
        share = plan.flops().recomputed_flops / whole if whole else 0.0
        blocks = [0.0, *(share * each for each in flops[1 : plan.model.num_layers + 1]), 0.0]
        again = [mesh.pp * sum(blocks[first:stop]) / sum(flops) for first, stop in plan.schedule.depths]
    scale = flops_per_byte / unit_flops
    sends = [record for record in plan.traffic if record.verb in SENDS]
    costs = Costs(
        forward_s=forward,
        backward_s=tuple((1 + weights) * each + more for each, more in zip(forward, again, strict=True)),
        backward_input_s=tuple(each + more for each, more in zip(forward, again, strict=True)),
        backward_weight_s=tuple(weights * each for each in forward),
        transfer_s=max((_bytes(record, plan) * scale for record in sends), default=0.0),
    )
    part = "the model" if mesh.pp == 1 else f"1/{mesh.pp} of the model"
    unit = f"the forward pass of a micro-batch through {part}, {unit_flops:.3g} FLOPs of a rank"
    return Lengths(costs, _exchanges(plan, costs, scale), unit, unit_flops)


def _exchanges(plan: Plan, costs: Costs, scale: float) -> dict[tuple[int, Instruction], InstructionCollectives]:
    found: dict[tuple[int, Instruction], InstructionCollectives] = {}
    steady = list(runs_in(plan, phases(plan)[-1]))
    for stage, program in enumerate(plan.schedule.programs):
        waits, overlapped, sums = (dict.fromkeys(program, 0.0) for _ in range(3))
        last = [at for at in program if at.verb is Verb.REDUCE]
        for record in steady:
            if record.stage in (None, stage) and record.verb not in SENDS:
                instructions = instructions_of(record, plan, program)
                share_s = record.times * _bytes(record, plan) * scale / len(instructions)
                for at in instructions:
                    (waits if record.during is None else overlapped)[at] += share_s
                    if record.during is not None and record.verb is Verb.REDUCE:
                        sums[at] += share_s
        for at in program:
            left_s = max(0.0, overlapped[at] - _computing_s(at, stage, costs, len(plan.schedule.programs)))
            later_s = min(left_s, sums[at]) if last else 0.0
            waits[at] += left_s - later_s
            if later_s:
                waits[last[-1]] += later_s
        for at in program:
            if waits[at] or overlapped[at]:
                found[stage, at] = InstructionCollectives(waits[at], overlapped[at])
    return found


def instructions_of(record: Traffic, plan: Plan, program: tuple[Instruction, ...]) -> list[Instruction]:
    """The instructions of a stage during or after which a collective runs; each runs the same number of them.

    With fewer collectives than micro-batches they are the first forward passes (weights are gathered), or the last
    instructions of their kind (gradients are reduced, or waited for).
    """
    averages = record.verb is Verb.AVERAGE  # whatever it overlaps with begins after it
    verb = record.verb if record.during is None or averages else record.during
    if verb is Verb.BACKWARD:  # a split backward pass: gradients of activations begin it
        verb = plan.schedule.weight_verb if record.verb is Verb.REDUCE else plan.schedule.input_verb
    alike = [at for at in program if at.verb is verb and at.step in (None, record.at % plan.schedule.period)]
    if record.verb is verb and record.times >= plan.work.num_microbatches:
        return alike
    times = record.times if record.verb is verb else 1
    return alike[:times] if verb is Verb.FORWARD else alike[-times:]


def _bytes(record: Traffic, plan: Plan) -> float:
    return record.wire_bytes(plan.mesh.degree(record.axis)) if record.axis else record.inside_bytes


def _computing_s(at: Instruction, stage: int, costs: Costs, stages: int) -> float:
    seconds = getattr(costs, f"{at.verb}_s", 0.0)
    computing_s: float = seconds[at.chunk * stages + stage] if isinstance(seconds, tuple) else seconds
    return computing_s
