"""In: cases (a config, a number of ranks). Out: FLOPs of the products that ranks of each really compute, by direction.
Does not assert anything: test_computed does. A case runs rank by rank on torch's fake process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from declared_ranks import trainer_of
from fake_world import fake_world
from kept_ranks import OwnMemory, plan_of
from rank_server import Place
from torch.utils.flop_counter import (
    FlopCounterMode,
    addmm_flop,
    baddbmm_flop,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import codescent.operators.attention  # noqa: F401 - defines the operators in FORMULAS
from codescent.operators.saved_attention import pairs_in_blocks
from codescent.plan import Instruction, Verb

BACKWARD = (Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT)
ATEN = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = {
    ATEN.baddbmm_: lambda to, left, right, *_, **__: baddbmm_flop(to, left, right),
    ATEN.addmm_: lambda to, left, right, *_, **__: addmm_flop(to, left, right),
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(
        dy, q, k, v
    ),
    # The projections by head, [B, T, G, E, K] and [E, B G, T, K], of which E - 2 are queries.
    torch.ops.codescent.block_attention: lambda shape, window=0, *_, **__: (
        4 * shape[0] * shape[2] * (shape[3] - 2) * pairs_in_blocks(shape[1], window) * shape[4]
    ),
    torch.ops.codescent.block_attention_backward: lambda _, shape, window=0, *__, **___: (
        10 * shape[1] * (shape[0] - 2) * pairs_in_blocks(shape[2], window) * shape[3]
    ),
}
"""FLOPs of operators that torch's counter does not know: those in place, a CPU's attention, and our own."""


def computed_by_rank(case: dict[str, Any], rank: int) -> dict[str, int]:
    """FLOPs of the products of a rank in a step, forward and backward."""
    plan, found = plan_of(case), {"forward": 0, "backward": 0}

    def counted(verb: Verb, act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def arm(instruction: Instruction) -> None:
            with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
                act(instruction)
            found["backward" if verb in BACKWARD else "forward"] += counter.get_total_flops()

        return arm

    with fake_world(rank, case["world_size"], "cpu") as world:
        trainer = trainer_of(case, plan, rank, OwnMemory(plan), world)
        arms = trainer.executor.arms
        trainer.executor.arms = {
            verb: counted(verb, act) if verb in (Verb.FORWARD, *BACKWARD) else act for verb, act in arms.items()
        }
        trainer.executor.step(0, 1e-3)
        trainer.close()
    return found


def on_fake_ranks(place: Place, cases: dict[str, Any]) -> dict[str, dict[int, dict[str, int]]]:
    """By case, what each of its `ranks` computes, all in this process."""
    return {name: {rank: computed_by_rank(case, rank) for rank in case["ranks"]} for name, case in cases.items()}
