"""In: a case (a config, a number of ranks), a fault. Out: two steps of one rank, as they are and by NCCL's rules.
Does not assert anything (test_nccl_rules does) and starts no process (rank_server does)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from declared_ranks import VOCAB, local, plan_of, trainer_of
from nccl_rules import Rules
from rank_server import Place

from codescent.data.loader import Batch, Portion
from codescent.plan import Instruction, Plan
from codescent.strategies import collectives, ddp, overlap, shards
from codescent.strategies.collectives import Awaited, start_all_reduce
from codescent.train.messages import Message, Messages

Answer = dict[str, Any]
STEPS = 2


class Tokens:
    """Random tokens of a step's global batch; each rank takes its samples of them."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.generator = torch.Generator().manual_seed(1)

    def next(self) -> Portion:
        """A step's micro-batches."""
        work = self.plan.work
        sizes = (work.global_batch_size, work.seq_len + 1)
        tokens = torch.randint(0, VOCAB, sizes, generator=self.generator)
        mine = [self.plan.samples(self.rank, number) for number in range(work.num_microbatches)]
        rows = [tokens[samples.start : samples.stop] for samples in mine]
        return Portion([Batch(row[:, :-1], row[:, 1:]) for row in rows], work.tokens, work.tokens)

    def close(self) -> None:
        """Nothing is read ahead."""


def trained(case: dict[str, Any], rank: int, *, as_cuda: bool) -> list[Any]:
    """Loss and gradient norm of each step, then a hash of the rank's weights."""
    plan = plan_of(case)
    trainer = trainer_of(case, plan, rank, Tokens(plan, rank))
    trainer.executor.messages.ahead = not as_cuda
    results = [trainer.executor.step(number, 1e-2) for number in range(STEPS)]
    found: list[Any] = [[result.train_loss, result.grad_norm] for result in results]
    digest = hashlib.sha256()
    for part in trainer.parts:
        for parameter in part.parameters():
            digest.update(local(parameter).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    trainer.close()
    return [*found, digest.hexdigest()]


def steps(place: Place, case: dict[str, Any], as_cuda: bool, fault: str = "", by_messages: bool = False) -> Answer:
    """Two steps without the rules, and two by them, in which the last rank has the fault.

    `as_cuda`: fully_shard makes its collectives by itself, and a receive is posted at its place in the list.
    `by_messages`: a reduce-scatter is that of gloo. Else it is one collective, as over NCCL.
    """
    place.join()
    if not by_messages:
        collectives.over_gloo = lambda *_: False  # type: ignore[assignment]
    if as_cuda:
        shards._overlap = lambda *arguments: None
    plain = trained(case, place.rank, as_cuda=as_cuda)
    rules = Rules()
    if fault and place.rank == place.ranks - 1:
        FAULTS[fault]()
    with rules.hold():
        ruled = trained(case, place.rank, as_cuda=as_cuda)
    dist.barrier()
    return {"plain": plain, "ruled": ruled, "problems": rules.problems, "log": rules.log, "made": rules.made}


def crossed(place: Place, cross: bool) -> Answer:
    """Two groups of the same ranks. With `cross` the last rank uses them in the other order."""
    place.join()
    rules = Rules()
    with rules.hold():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if cross and place.rank == 1:
            groups.reverse()
        for work in [start_all_reduce(torch.ones(4), group=group) for group in groups]:
            work.wait()
    dist.barrier()
    return {"problems": rules.problems, "log": rules.log, "made": rules.made}


def tagged(place: Place, cross: bool) -> list[float]:
    """Rank 0 sends 1 and 2 with these tags; rank 1 receives them by tag, with `cross` 2 first. What tags 1, 2 have."""
    group = place.join()
    values = {tag: torch.full((4,), float(tag) if place.rank == 0 else 0.0) for tag in (1, 2)}
    act: Any = dist.isend if place.rank == 0 else dist.irecv
    tags = (2, 1) if cross and place.rank == 1 else (1, 2)
    with Rules().hold():
        for work in [act(values[tag], 1 - place.rank, group=group, tag=tag) for tag in tags]:
            work.wait()
    dist.barrier()
    return [float(values[tag].mean()) for tag in (1, 2)]


def no_wait() -> None:
    """Nobody waits for the handles of collectives."""
    Awaited.wait = lambda self, *timeout: True  # type: ignore[method-assign]


def read_early() -> None:
    """A message is read, then waited for."""
    whole = Message.wait

    def wait(self: Message) -> torch.Tensor:
        early = self.memory.clone()
        whole(self)
        return early

    Message.wait = wait  # type: ignore[method-assign]


def message_overwritten() -> None:
    """A message is written to once its send has begun."""
    whole = Messages.send

    def send(self: Messages, instruction: Instruction, message: torch.Tensor) -> None:
        whole(self, instruction, message)
        message.data.add_(1)

    Messages.send = send  # type: ignore[method-assign]


def bucket_overwritten() -> None:
    """A bucket is written to once its all-reduce has begun."""
    whole = ddp.BucketedGradients.reduce

    def reduce(self: ddp.BucketedGradients) -> None:
        for buffer in self.buffers[: len(self.works)]:
            buffer.data.zero_()
        whole(self)

    ddp.BucketedGradients.reduce = reduce  # type: ignore[method-assign]


def gradients_overwritten() -> None:
    """What fully_shard reduce-scatters is written to once that has begun."""
    whole = overlap.AsyncReduceScatter.__call__

    def call(self: overlap.AsyncReduceScatter, **options: Any) -> None:
        whole(self, **options)
        options["input_tensor"].zero_()

    overlap.AsyncReduceScatter.__call__ = call  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (no_wait, read_early, message_overwritten, bucket_overwritten, gradients_overwritten)
}
