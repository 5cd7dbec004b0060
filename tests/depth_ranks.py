"""In: cases (a config, a number of ranks). Out: the collectives that ranks issue, with the depth that computes.
Does not assert anything: test_traffic_depths does. A case runs rank by rank on torch's fake process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from declared_ranks import Watch, plan_of, trainer_of
from fake_world import fake_world
from rank_server import Place
from torch import nn

from codescent.plan import Instruction, Plan, Verb

COMPUTES = (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT)


class AtDepth(Watch):
    """Notes the depth that computes behind each collective."""

    depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.issued)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for one in self.issued[before:]:
            one.append(self.depth)
        return result

    def follow(self, part: nn.Module) -> None:
        """Know which depth of a part computes, forward and backward."""
        for number, block in part.blocks.items():  # type: ignore[operator, union-attr]
            block.register_forward_pre_hook(self._enters(int(number) + 1), with_kwargs=False)
            block.register_forward_hook(self._leaves(int(number) + 1))

    def _set(self, depth: int) -> None:
        self.depth = depth

    def _enters(self, depth: int) -> Callable[..., None]:
        def hook(block: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._set(depth)
            if isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: self._set(depth - 1))

        return hook

    def _leaves(self, depth: int) -> Callable[..., None]:
        def hook(block: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self._set(depth + 1)
            if output.requires_grad:
                output.register_hook(lambda _: self._set(depth))

        return hook


def issued_by_rank(case: dict[str, Any], rank: int) -> list[list[Any]]:
    """(collective, ranks, bytes, dtype, verb, depth) of each collective of a rank's forward and backward passes."""
    plan = plan_of(case)
    with fake_world(rank, case["world_size"], "cpu") as world:
        trainer = trainer_of(case, plan, rank, world=world)
        executor = trainer.executor
        with AtDepth(fake=True) as watch:
            for chunk in executor.chunks:
                watch.follow(chunk.part)

            def watched(verb: Verb, act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
                def arm(instruction: Instruction) -> None:
                    watch.verb = verb if verb in COMPUTES else None
                    watch.depth = _begins(plan, rank, instruction)
                    act(instruction)
                    watch.verb = None

                return arm

            executor.arms = {verb: watched(verb, act) for verb, act in executor.arms.items()}
            executor.step(0, 1e-3)
        trainer.close()
    return watch.issued


def _begins(plan: Plan, rank: int, instruction: Instruction) -> int:
    """The first depth that an instruction computes."""
    part = plan.schedule.parts(plan.mesh.coordinates(rank)["pp"])[instruction.chunk]
    return part.start if instruction.verb is Verb.FORWARD else part.stop - 1


def on_fake_ranks(place: Place, cases: dict[str, Any]) -> dict[str, dict[int, list[list[Any]]]]:
    """By case, what each of its `ranks` issues, all in this process."""
    return {name: {rank: issued_by_rank(case, rank) for rank in case["ranks"]} for name, case in cases.items()}
