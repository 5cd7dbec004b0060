"""In: a layout. Out: losses of a BERT on padded samples; some micro-batches have no target at all.
Does not assert anything (test_models_bert_divided does) and starts no process (rank_server does)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from declared_ranks import VOCAB, plan_of, trainer_of
from rank_server import Place

from codescent.data.loader import Batch, Portion
from codescent.plan import Plan

STEPS, SAMPLES, LENGTH = 3, 8, 12
SIZES = {"kind": "bert", "num_layers": 4, "num_heads": 4, "hidden_dim": 20, "seq_len": 14, "vocab_size": VOCAB}
SIZES |= {"ffn_dim": 45}  # odd: no multiple of any tp; nor are VOCAB's rows
HEADS = ("mlm", "qa")


def case_of(layout: dict[str, Any], head: str, ranks: int) -> dict[str, Any]:
    """As declared_ranks takes it. Micro-batches of two samples; of one process all at once."""
    train = {"global_batch_size": SAMPLES, "microbatch_size": 2 if layout else SAMPLES, "precision": "fp64"}
    config = {
        "model": SIZES | {"dropout": 0.1},
        "data": {"seq_len": LENGTH, "task": head},
        "train": train | {"head_chunk_tokens": 3},
        "optimizer": {"learning_rate": 0.01, "max_grad_norm": 0.1},
        "parallel": layout,
    }
    return {"config": config, "world_size": ranks}


class PaddedSamples:
    """Pairs of segments with padding behind them, the same for every layout.

    The head "mlm" has no target in the first two samples, so one micro-batch has no loss.
    """

    def __init__(self, plan: Plan, head: str, rank: int) -> None:
        self.plan, self.head, self.rank, self.number = plan, head, rank, 0

    def next(self) -> Portion:
        """This rank's micro-batches of a step."""
        whole, self.number = self.of_step(self.number), self.number + 1
        mine = [self.plan.samples(self.rank, number) for number in range(self.plan.work.num_microbatches)]
        losses = SAMPLES if self.head == "qa" else int((whole.targets >= 0).sum())
        return Portion([whole[samples.start : samples.stop] for samples in mine], losses, losses)

    def of_step(self, number: int) -> Batch:
        """The global batch."""
        generator = torch.Generator().manual_seed(number)
        lengths_B = torch.randint(5, LENGTH + 1, (SAMPLES,), generator=generator)
        tokens_BT = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator)
        first_BT = torch.randint(1, LENGTH, (SAMPLES, 1), generator=generator)
        extras = {"segments_BT": (torch.arange(LENGTH) >= first_BT).long(), "lengths_B": lengths_B}
        if self.head == "qa":
            return Batch(tokens_BT, tokens_BT[:, :2] % lengths_B[:, None], extras)
        wanted_BT = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.3
        wanted_BT &= torch.arange(LENGTH) < lengths_B[:, None]
        wanted_BT[:2] = False
        return Batch(tokens_BT, tokens_BT.masked_fill(~wanted_BT, -100), extras)

    def close(self) -> None:
        """Nothing is read ahead."""


def losses_of(layout: dict[str, Any], head: str, ranks: int, rank: int) -> dict[str, list[float]]:
    """Losses and gradient norms of some steps, and the loss of a validation behind them."""
    case = case_of(layout, head, ranks)
    plan = plan_of(case)
    samples = PaddedSamples(plan, head, rank)
    trainer = trainer_of(case, plan, rank, samples)
    results = [trainer.executor.step(number, 0.01) for number in range(STEPS)]
    with trainer.executor.evaluating() as evaluate:
        loss = trainer.executor.sum_of_losses(evaluate(samples.of_step(STEPS)[:3]))
    trainer.close()
    # Of the copies of the model each has found the same.
    validation = loss.item() / (plan.mesh.dp_replicate * plan.mesh.dp_shard)
    return {
        "loss": [result.train_loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "validation": [validation],
    }


def work(place: Place, layout: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By head, what one rank of a layout finds; of one process without a layout."""
    place.join()
    found = {head: losses_of(layout, head, place.ranks, place.rank) for head in HEADS}
    dist.barrier()
    return found
