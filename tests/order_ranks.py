"""In: one pipeline stage, cases. Out: what the stage really runs in which order, and how many micro-batches it holds.
Does not assert anything (test_execute_order does) and starts no process (rank_server does)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from declared_ranks import plan_of, trainer_of
from rank_server import Place

from codescent.plan import Instruction, Verb
from codescent.train.execute import Executor

Live = dict[tuple[int, int | None], "weakref.WeakSet[Kept]"]


class Kept:
    """A tensor that autograd keeps for a backward pass; gone when that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def observed(executor: Executor) -> dict[str, Any]:
    """The instructions of a step, in the order in which they ended, and a peak.

    After each instruction, micro-batches whose activations still exist are counted, for each chunk.
    """
    ran: list[str] = []
    live: Live = {}
    peak = 0

    def watched(act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def arm(instruction: Instruction) -> None:
            nonlocal peak
            if instruction.verb is Verb.FORWARD:
                kept = live[instruction.chunk, instruction.microbatch] = weakref.WeakSet()

                def pack(tensor: torch.Tensor) -> Kept:
                    kept.add(one := Kept(tensor))
                    return one

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
                    act(instruction)
            else:
                act(instruction)
            ran.append(str(instruction))
            held = {place for place, kept in live.items() if kept}
            held |= {
                (number, mb)
                for number, chunk in enumerate(executor.chunks)
                for mb, one in chunk.in_flight.items()
                if one.deferred
            }
            peak = max(peak, len(held))

        return arm

    executor.arms = {verb: watched(act) for verb, act in executor.arms.items()}
    executor.step(0, 1e-3)
    return {"ran": ran, "peak_live": peak}


def work(place: Place, cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By case, what one stage of a pipeline of that many ranks did."""
    place.join()
    answers = {}
    for name, case in cases.items():
        trainer = trainer_of(case, plan_of(case), place.rank)
        answers[name] = observed(trainer.executor)
        trainer.close()
    dist.barrier()
    return answers
