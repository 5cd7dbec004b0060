"""In: a plan, a kind of device. Out: bytes that its forward passes keep for backward: of a chunk, and of all in flight.
Does not count what operators need while they compute, or what the allocator holds besides. Does not measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.plan import AXES, Instruction, Plan, Verb
from codescent.plan.activations import CUDA, chunk_bytes

_ENDS = (Verb.BACKWARD, Verb.BACKWARD_INPUT)


def is_known(plan: Plan, device: str) -> bool:
    """Whether it is declared what operators keep on a kind of device.

    On CUDA no fused kernel computes attention in fp64, and none of torch's has groups of heads in fp32.
    """
    model, precision = plan.model, plan.work.precision
    grouped = model.num_kv_heads < model.num_heads and plan.mesh.cp == 1
    unknown = precision == "fp64" or (precision == "fp32" and grouped)
    return bool(plan.activations) and not (device == CUDA and unknown)


def bytes_by_chunk(plan: Plan, stage: int, device: str, rank: int | None = None) -> list[int]:
    """Bytes that each chunk of a stage keeps for one micro-batch, on a rank; None: on the stage's first one."""
    if rank is None:
        rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    last = plan.model.num_layers + 1
    return [chunk_bytes(plan.activations, part, last, plan.mesh, device, rank) for part in plan.schedule.parts(stage)]


def most_bytes(plan: Plan, stage: int, device: str, rank: int | None = None) -> int:
    """The most bytes that the forward passes in flight of a stage keep at once. `rank`: see `bytes_by_chunk`."""
    kept = bytes_by_chunk(plan, stage, device, rank)
    return max((held for _, held in in_flight_bytes(plan, stage, kept)), default=0)


def in_flight_bytes(plan: Plan, stage: int, kept: Sequence[int]) -> Iterator[tuple[Instruction, int]]:
    """Each instruction of a stage, with the bytes that forward passes in flight keep while it runs.

    A forward pass has all that it keeps, and a backward pass still has all that its forward pass kept. `kept`: see
    `bytes_by_chunk`.
    """
    held = 0
    for instruction in plan.schedule.programs[stage]:
        if instruction.verb is Verb.FORWARD:
            held += kept[instruction.chunk]
        yield instruction, held
        if instruction.verb in _ENDS:
            held -= kept[instruction.chunk]


def activations_bytes(plan: Plan, device: str) -> int:
    """`most_bytes` of the stage that keeps most."""
    return max(most_bytes(plan, stage, device) for stage in range(plan.mesh.pp))
