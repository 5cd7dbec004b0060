"""In: plans with gossip. Out: what real ranks find: weights after steps and after exchanges, messages, stopped steps.
Does not assert anything (test_gossip does) and starts no process (rank_server does)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from declared_ranks import VOCAB, FixedLoader, Watch, joined, plan_of, trainer_of
from rank_server import Place

from codescent.coupling.mixing import Mixing
from codescent.data.loader import Batch, Portion
from codescent.plan import Instruction, Plan, Verb
from codescent.plan.state import state_of_rank
from codescent.strategies import ThisRank
from codescent.train.optimize import Weight
from codescent.train.trainer import Trainer

Case = dict[str, Any]


class SameTokens(FixedLoader):
    """The samples of this rank, of global batches that do not depend on the layout."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan)
        self.rank, self.number = rank, 0

    def next(self) -> Portion:
        """See FixedLoader."""
        seeded = torch.Generator().manual_seed(self.number)
        self.number += 1
        sizes = (self.work.global_batch_size, self.work.seq_len + 1)
        tokens = torch.randint(0, VOCAB, sizes, generator=seeded)
        mine = (self.plan.samples(self.rank, number) for number in range(self.work.num_microbatches))
        batches = [Batch(tokens[one.start : one.stop, :-1], tokens[one.start : one.stop, 1:]) for one in mine]
        own = len(self.plan.samples_of_replica(self.rank)) * self.work.seq_len
        return Portion(batches, self.work.tokens, own)


def trained(place: Place, cases: dict[str, Case], steps: int) -> dict[str, Any]:
    """By case: losses, and after the last step the sum of all weights, some weights, the consensus."""
    place.join()
    found = {}
    for name, case in cases.items():
        plan = plan_of(case)
        trainer = trainer_of(case, plan, place.rank, SameTokens(plan, place.rank))
        results = [trainer.executor.step(number, 0.1) for number in range(steps)]
        weights = torch.cat([weight.master.reshape(-1) for weight in trainer.optimizer.weights])
        with trainer.with_means():
            means = torch.cat([weight.tensor.reshape(-1) for weight in trainer.optimizer.weights])
        losses = [result.train_loss for result in results]
        found[name] = {"losses": losses, "weights": weights.tolist(), "means": means.tolist()}
        found[name]["consensus"] = results[-1].consensus
        trainer.close()
    dist.barrier()
    return found


def mixed(place: Place, cases: dict[str, Case], rounds: int, drift: float = 0.0, share: float = 0.0) -> dict[str, Any]:
    """By case: the weights of this rank before each exchange and after the last, the means, what was estimated.

    Before each exchange a replica adds `drift` times its index to its weights. Then its weights go a share of the way
    to its index.
    """
    place.join()
    found = {}
    for name, case in cases.items():
        plan = plan_of(case)
        world = joined(plan, place.rank)
        world.divide(plan)
        tensors = [torch.zeros(tensor.parameter.shape, dtype=torch.float64) for tensor in plan.trained]
        one = Mixing(
            [Weight("", tensor, tensor, decay=False) for tensor in tensors], ThisRank(plan, place.rank, world.groups)
        )
        for tensor, value in zip(tensors, initial(plan, place.rank)):
            tensor.copy_(value)
        seen = [flat(tensors)]
        for number in range(rounds):
            for tensor in tensors:
                tensor += drift * place.rank + share * (place.rank - tensor)
            one.stepped(number, 1, place.ranks)
            one.average(0)
            one.merge(0)
            seen.append(flat(tensors))
        found[name] = {
            "weights": [one_round.tolist() for one_round in seen],
            "means": flat(one.means()).tolist(),
            "distance": one.distance().tolist(),
        }
        one.close()
    dist.barrier()
    return found


def initial(plan: Plan, rank: int) -> list[torch.Tensor]:
    """The weights of a rank before the first exchange of `mixed`."""
    seeded = torch.Generator().manual_seed(100 + rank)
    shapes = [tensor.parameter.shape for tensor in plan.trained]
    return [torch.randn(shape, generator=seeded, dtype=torch.float64) for shape in shapes]


def flat(tensors: Any) -> torch.Tensor:
    """All elements in one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def issued(place: Place, cases: dict[str, Case], steps: int) -> dict[str, Any]:
    """By case: what this rank has issued in each step, and what it has held for longer than a step."""
    place.join()
    found = {}
    for name, case in cases.items():
        plan = plan_of(case)
        trainer = trainer_of(case, plan, place.rank)
        found[name] = {"steps": [_watched_step(trainer, number) for number in range(steps)]}
        counted = trainer.executor.memory.most["optimizer_bytes"]
        found[name] |= {"held": counted, "declared": state_of_rank(plan, place.rank).optimizer_bytes}
        exchange = trainer.coupling.exchange
        assert exchange is not None
        kept = {key: [list(value.shape), str(value.dtype)] for key, value in exchange.state().items()}
        found[name]["kept"] = kept
        trainer.close()
    dist.barrier()
    return found


def _watched_step(trainer: Trainer, number: int) -> list[list[Any]]:
    executor = trainer.executor
    arms = executor.arms
    with Watch(fake=False) as watch:

        def watched(act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
            def arm(instruction: Instruction) -> None:
                watch.verb = instruction.verb
                act(instruction)
                watch.verb = None

            return arm

        executor.arms = {verb: watched(act) for verb, act in arms.items()}
        executor.step(number, 1e-3)
        executor.arms = arms
    return [one for one in watch.issued if one[-1] in (Verb.EXCHANGE, Verb.STEP)]
