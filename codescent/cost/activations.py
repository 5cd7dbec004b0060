"""In: a plan, a kind of device. Out: bytes that its forward passes keep for backward: of a chunk, and of all in flight.
Does not count what operators need while they compute, or what the allocator holds besides. Does not measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.operators.saved_attention import AttentionSizes, by_formula
from codescent.plan import AXES, Instruction, Plan, Verb
from codescent.plan.activations import COMPILED, CPU, CUDA, KEPT_ON, chunk_bytes, deferred_bytes, kept_on

UNDECLARED = ""
"""Where blocks compute, if the compiler chooses what they keep and nothing declares it."""


def computed_on(plan: Plan, device: str, compiled: str) -> str:
    """Where blocks compute, as `kept_on` knows it: the device, COMPILED or UNDECLARED.

    It is declared what blocks keep that are compiled one by one, and not on a CPU.

    Args:
        device: a kind of device.
        compiled: what torch.compile compiles: "none", "blocks" or "model" (`config.decided.compiles`).
    """
    if compiled == "none" or plan.uncompiled:
        return device
    return COMPILED if compiled == "blocks" and device != CPU else UNDECLARED


def is_known(plan: Plan, device: str) -> bool:
    """Whether it is declared what operators keep. `device`: see `kept_on`.

    With cp, CUDA has no kernel for attention in fp64.
    """
    unknown = device not in KEPT_ON or (device != CPU and plan.work.precision == "fp64" and plan.mesh.cp > 1)
    return not unknown and any(True for _ in kept_on(plan.activations, device))


def is_windowed(plan: Plan) -> bool:
    """Whether attention of a layer sees a window that is shorter than the samples."""
    return any(0 < window < plan.work.seq_len for window in plan.model.windows)


def has_kernel(plan: Plan, device: str) -> bool:
    """Whether a kernel of the device computes attention as a whole on all layers. Else it is done by a formula, or with
    a window or a cap block by block.

    The rings of cp read heads that share keys by the kernels of others.
    """
    model, precision = plan.model, plan.work.precision
    groups = model.num_heads if plan.mesh.cp > 1 else model.num_kv_heads
    sizes = AttentionSizes(model.num_heads, groups, model.head_dim, plan.work.seq_len)
    return not (device == CUDA and (by_formula(precision, sizes) or is_windowed(plan) or model.score_cap))


def bytes_by_chunk(plan: Plan, stage: int, device: str, rank: int | None = None) -> list[int]:
    """Bytes that each chunk of a stage keeps for one micro-batch, on a rank; None: on the stage's first one."""
    rank, last = _first(plan, stage) if rank is None else rank, plan.model.num_layers + 1
    return [chunk_bytes(plan.activations, part, last, plan.mesh, device, rank) for part in plan.schedule.parts(stage)]


def deferred_by_chunk(plan: Plan, stage: int, device: str, rank: int | None = None) -> list[int]:
    """Bytes that each chunk of a stage keeps for one micro-batch whose gradients of weights are not computed yet."""
    rank, last = _first(plan, stage) if rank is None else rank, plan.model.num_layers + 1
    return [deferred_bytes(plan.deferred, part, last, plan.mesh, device, rank) for part in plan.schedule.parts(stage)]


def _first(plan: Plan, stage: int) -> int:
    return plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})


def most_bytes(plan: Plan, stage: int, device: str, rank: int | None = None) -> int:
    """The most bytes that the micro-batches in flight of a stage keep at once. `rank`: see `bytes_by_chunk`."""
    kept, waiting = (count(plan, stage, device, rank) for count in (bytes_by_chunk, deferred_by_chunk))
    return max((held for _, held in in_flight_bytes(plan, stage, kept, waiting)), default=0)


def in_flight_bytes(
    plan: Plan, stage: int, kept: Sequence[int], waiting: Sequence[int]
) -> Iterator[tuple[Instruction, int]]:
    """Each instruction of a stage, with the bytes that micro-batches in flight keep while it runs.

    A forward pass has all that it keeps, and a backward pass still has all that its forward pass kept. With deferred
    gradients of weights a micro-batch is in flight until they are computed.

    Args:
        plan, stage: of which the instructions are.
        kept: see `bytes_by_chunk`.
        waiting: see `deferred_by_chunk`.
    """
    held = 0
    for instruction in plan.schedule.programs[stage]:
        at, verb = instruction.chunk, instruction.verb
        if verb is Verb.FORWARD:
            held += kept[at]
        yield instruction, held
        if verb is Verb.BACKWARD:
            held -= kept[at]
        elif verb is Verb.BACKWARD_INPUT:
            held += waiting[at] - kept[at]
        elif verb is Verb.BACKWARD_WEIGHT:
            held -= waiting[at]


def activations_bytes(plan: Plan, device: str) -> int:
    """`most_bytes` of the stage that keeps most."""
    return max(most_bytes(plan, stage, device) for stage in range(plan.mesh.pp))
