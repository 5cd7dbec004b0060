"""In: a folder, numbers of ranks. Out: JSON files there: the losses of a BERT in every layout of so many ranks.
Does not assert anything: test_hybrids_bert does. Ranks are forked, so that each does not import torch."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_ranks import SURVIVED, fork, join
from declared_ranks import VOCAB, plan_of, trainer_of

from codescent.data.loader import Batch, Portion
from codescent.plan import Plan

STEPS, SAMPLES, LENGTH = 3, 8, 12
SIZES = {"kind": "bert", "num_layers": 4, "num_heads": 4, "hidden_dim": 20, "seq_len": 14, "vocab_size": VOCAB}
SIZES |= {"ffn_dim": 45}  # odd: no multiple of any tp; nor are VOCAB's rows
HEADS = ("mlm", "qa")
QUICK: dict[str, dict[str, Any]] = {
    "dp_replicate=2": {"dp_replicate": 2},
    "dp_shard=2": {"dp_shard": 2},
    "dp_shard=2 zero_stage=1": {"dp_shard": 2, "zero_stage": 1},
    "dp_shard=2 zero_stage=2": {"dp_shard": 2, "zero_stage": 2},
    "pp=2": {"pp": 2},
    "tp=2": {"tp": 2},
    "tp=2 sequence_parallel=false": {"tp": 2, "sequence_parallel": False},
}
SLOW: dict[str, dict[str, Any]] = {
    "pp=2 zero-bubble recompute=full": {"pp": 2, "schedule": "zero-bubble", "recompute": "full"},
    "pp=2 interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": "selective"},
    "pp=4": {"pp": 4, "schedule": "gpipe"},
    "tp=2 recompute=full": {"tp": 2, "recompute": "full"},
    "tp=2 sequence_parallel=false recompute=full": {"tp": 2, "sequence_parallel": False, "recompute": "full"},
    "tp=4": {"tp": 4},
    "tp=4 sequence_parallel=false recompute=selective": {"tp": 4, "sequence_parallel": False, "recompute": "selective"},
    "dp_shard=2 tp=2": {"dp_shard": 2, "tp": 2, "recompute": "full"},
    "dp_shard=2 pp=2 zero_stage=2": {"dp_shard": 2, "pp": 2, "zero_stage": 2},
    "dp_replicate=2 tp=2": {"dp_replicate": 2, "tp": 2},
    "pp=2 tp=2": {"pp": 2, "tp": 2, "schedule": "zero-bubble"},
}


def layouts_of(ranks: int, *, slow: bool) -> dict[str, dict[str, Any]]:
    """By name, those of so many ranks."""
    layouts = SLOW if slow else QUICK
    degrees = ("dp_replicate", "dp_shard", "pp", "tp")
    return {
        name: layout
        for name, layout in layouts.items()
        if torch.tensor([layout.get(axis, 1) for axis in degrees]).prod() == ranks
    }


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
    """The same samples for every layout: pairs of segments, padding behind them; of the first two nothing is wanted by
    the head "mlm", so that there is a micro-batch without a loss."""

    def __init__(self, plan: Plan, head: str, rank: int) -> None:
        self.plan, self.head, self.rank, self.number = plan, head, rank, 0

    def next(self) -> Portion:
        """This rank's micro-batches of a step."""
        whole, self.number = self.of_step(self.number), self.number + 1
        mine = [self.plan.samples(self.rank, number) for number in range(self.plan.work.num_microbatches)]
        losses = SAMPLES if self.head == "qa" else int((whole.targets >= 0).sum())
        return Portion([whole[samples.start : samples.stop] for samples in mine], losses)

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


def work(rank: int, ranks: int, folder: Path, slow: bool) -> None:
    """All layouts of so many ranks, on one process group."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_{ranks}", rank=rank, world_size=ranks)
    layouts = {"alone": dict[str, Any]()} if ranks == 1 else layouts_of(ranks, slow=slow)
    found = {
        f"{name} {head}": losses_of(layout, head, ranks, rank) for name, layout in layouts.items() for head in HEADS
    }
    (folder / f"{ranks}_{rank}").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    target, slow = Path(sys.argv[1]), sys.argv[2] == "slow"
    codes = []
    for ranks in (1, 2, 4) if slow else (1, 2):
        pids = [fork(partial(work, rank, ranks, target, slow)) for rank in range(ranks)]
        codes += [join(pid, 150) for pid in pids]
    sys.exit(any(code != SURVIVED for code in codes))
