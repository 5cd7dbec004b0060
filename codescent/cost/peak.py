"""In: a plan, a stage, what its first rank holds. Out: the instruction of a step during which it holds most.
Does not say how much that is for the verdict (stage_memory.py does), and does not measure (train/memory.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from codescent.clusters.cluster import Software
from codescent.cost.activations import bytes_by_chunk, deferred_by_chunk, in_flight_bytes
from codescent.cost.stage_memory import StageMemory, where
from codescent.plan import AXES, Instruction, Plan, Verb

PASSES = {
    Verb.FORWARD: "forward pass",
    Verb.BACKWARD: "backward pass",
    Verb.BACKWARD_INPUT: "backward pass",
    Verb.BACKWARD_WEIGHT: "gradients of weights",
}
"""What instructions that hold activations are called."""
MAKES = (Verb.BACKWARD, Verb.BACKWARD_WEIGHT)
"""Instructions after which the gradients of their chunk are there."""


@dataclass(frozen=True)
class PeakPlace:
    """Where the memory of a rank is highest.

    Attributes:
        stage: of the rank.
        instruction: of the stage's list. As text it is that of `peak_at` in memory.csv.
        in_head: whether it is the forward pass of the head, which then holds logits.
        held_bytes: what the plan has there: state, activations, logits, gathered units.
    """

    stage: int
    instruction: Instruction
    in_head: bool
    held_bytes: float

    @property
    def words(self) -> str:
        """Such as "backward pass of micro-batch 3" or "the update of the weights"."""
        at = self.instruction
        if at.verb is Verb.STEP:
            return "the update of the weights"
        chunk = f", chunk {at.chunk}" if at.chunk else ""
        return f"{PASSES[at.verb]} of micro-batch {at.microbatch}{chunk}{', in the head' * self.in_head}"


def peak_place(plan: Plan, stage: int, held: StageMemory, device: str, software: Software) -> PeakPlace | None:
    """Where the first rank of a stage holds most in a step. None: not all that it keeps is declared.

    The first such instruction, as a run notes where its peak rose. The update wins where it holds as much: it has
    temporary tensors besides, which no part counts.

    Args:
        plan, stage, software: what is priced.
        held: by the rank (stage_memory.py).
        device: the kind of its device.
    """
    if not held.whole:
        return None
    most: PeakPlace | None = None
    device = where(plan, device, software)
    last = len(plan.schedule.parts(stage)) - 1
    for at, size in _held_during(plan, stage, held, device, software):
        if most is None or size > most.held_bytes or (at.verb is Verb.STEP and size == most.held_bytes):
            in_head = at.verb is Verb.FORWARD and at.chunk == last and held.logits > 0
            most = PeakPlace(stage, at, in_head, size)
    return most


def _held_during(
    plan: Plan, stage: int, held: StageMemory, device: str, software: Software
) -> Iterator[tuple[Instruction, float]]:
    """Bytes of each pass and update. Gradients come with the first backward pass of a chunk, and go with the update.

    While they come, the activations of the same pass go. So a pass holds most at its begin or at its end.
    """
    kept, gradients = bytes_by_chunk(plan, stage, device), _gradients_by_chunk(plan, stage, held.gradients)
    made, last = set[int](), len(kept) - 1
    waiting = deferred_by_chunk(plan, stage, device)
    for at, flying in in_flight_bytes(plan, stage, kept, waiting):
        ready = held.weights + held.optimizer + sum(gradients[chunk] for chunk in made)
        comes = gradients[at.chunk] if at.verb in MAKES and at.chunk not in made else 0.0
        logits = _logits(plan, held, at, software) if at.chunk == last else 0.0
        if at.verb is Verb.FORWARD:
            yield at, ready + flying + logits + held.gathered - held.scattered
        elif at.verb is Verb.BACKWARD_WEIGHT:
            yield at, ready + comes + flying + held.gathered
        elif at.verb in PASSES:
            has_logits = software.logit_bytes or plan.objective.by_token  # computed again
            begins = flying + held.again + (logits if has_logits else 0.0)
            waits = waiting[at.chunk] if at.verb is Verb.BACKWARD_INPUT else 0
            yield at, ready + max(begins, comes + flying + waits - kept[at.chunk]) + held.gathered
        elif at.verb is Verb.STEP:
            yield at, ready
            made.clear()
        if at.verb in MAKES:
            made.add(at.chunk)


def _logits(plan: Plan, held: StageMemory, at: Instruction, software: Software) -> float:
    """Of a pass through the head. A program that joins all outputs has had those of the micro-batches before."""
    if software.joins_outputs and at.microbatch is not None:
        return held.logits * (at.microbatch + 1) / plan.work.num_microbatches
    return held.logits


def _gradients_by_chunk(plan: Plan, stage: int, whole: float) -> list[float]:
    """The gradients of each chunk. Of a tensor that several chunks read, the last one has them first."""
    parts = plan.schedule.parts(stage)
    rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    sizes = [0] * len(parts)
    for tensor in plan.held_by(stage):
        reads = [chunk for chunk, part in enumerate(parts) if any(depth in part for depth in tensor.parameter.depths)]
        sizes[max(reads, default=0)] += tensor.gradients_bytes(plan.mesh, rank)
    total = sum(sizes)
    return [whole * size / total if total else 0.0 for size in sizes]
