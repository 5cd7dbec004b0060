"""In: a plan. Out: FLOPs of a step by each formula that papers and programs use, and those that are executed.
Does not say them to a reader (explain/topics/flops.py does) and does not measure."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.cost.operators import operators_of_depth
from codescent.plan import AXES, FlopFormula, Plan
from codescent.plan.activations import CPU


@dataclass(frozen=True)
class Formula:
    """FLOPs of a token, by a rule.

    Attributes:
        name: as it is written.
        flops: of a token, forward and backward, unless `is_forward`.
        source: who uses it.
    """

    name: str
    flops: float
    source: str
    is_forward: bool = False


@dataclass(frozen=True)
class FormulaSizes:
    """What the formulas are made of.

    N: parameters, without an embedding that is only looked up. L: layers. C: channels.
    T: positions of a sample. B: samples of a step.
    """

    n: int
    layers: int
    channels: int
    positions: int
    samples: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.positions * self.samples


def sizes_of(plan: Plan) -> FormulaSizes:
    """The sizes of a plan with one sequence."""
    positions, work = plan.work.positions(-1), plan.work
    tokens = work.global_batch_size * positions
    n = round(plan.flops().dense_flops / (6 * tokens))
    channels = (plan.model.num_heads * plan.model.head_dim + plan.model.values) // 2  # of keys, and of values
    return FormulaSizes(n, plan.model.num_layers, channels, positions, work.global_batch_size)


def formulas(sizes: FormulaSizes) -> tuple[Formula, ...]:
    """Each formula with the sizes put in."""
    n, pairs = sizes.n, sizes.layers * sizes.channels * sizes.positions
    return (
        Formula("2N", 2.0 * n, "Kaplan et al. 2020", is_forward=True),
        Formula("2N + 2LCT", 2.0 * n + 2.0 * pairs, "Kaplan et al. 2020, table 1", is_forward=True),
        Formula("6N", 6.0 * n, "Kaplan et al. 2020; Hoffmann et al. 2022"),
        Formula("6N + 6LCT", 6.0 * n + 6.0 * pairs, "llm.c"),
        Formula("6N + 12LCT", 6.0 * n + 12.0 * pairs, "Chowdhery et al. 2022 (PaLM); nanoGPT"),
    )


def flops_by(formula: FlopFormula, plan: Plan, device: str = CPU) -> float:
    """FLOPs of a step of all ranks. `device`: CPU or CUDA, whose operators are executed."""
    if formula is FlopFormula.EXECUTED:
        return executed_flops(plan, device)
    flops = plan.flops()
    return flops.dense_flops if formula is FlopFormula.DENSE else flops.total_flops


def refused(formula: FlopFormula, plan: Plan) -> str:
    """Why a formula cannot count the FLOPs of a plan; "": it can."""
    if formula is FlopFormula.EXECUTED and not plan.operators:
        others = f"{FlopFormula.DENSE} or {FlopFormula.ATTENTION}"
        return f"--formula {formula}: its plan does not say all operators; take {others}"
    return ""


def executed_flops(plan: Plan, device: str = CPU) -> float:
    """FLOPs of a step, of all operators of all ranks, with what backward computes again."""
    total, samples = 0.0, plan.work.microbatch_size
    devices = samples / -(-samples // plan.devices)  # of a rank: the operators are those of its first device
    alike = plan.mesh.world_size // (plan.mesh.pp * plan.mesh.tp)
    for stage in range(plan.mesh.pp):
        for part_of_tp in range(plan.mesh.tp):  # the vocabulary need not divide into equal parts
            rank = plan.mesh.rank_at({**dict.fromkeys(AXES, 0), "pp": stage, "tp": part_of_tp})
            depths = (depth for part in plan.schedule.parts(stage) for depth in part)
            every = (one for depth in depths for one in operators_of_depth(plan, depth, device, rank))
            total += alike * sum(one.forward_flops + one.backward_flops for one in every)
    return total * devices * plan.work.num_microbatches
