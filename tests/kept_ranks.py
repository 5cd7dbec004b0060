"""In: cases (a config, a number of ranks). Out: bytes that ranks of each really keep for backward, by chunk.
Does not assert anything: test_activations does. A case runs rank by rank on torch's fake process group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import declared_ranks
import torch
from declared_ranks import FixedLoader, local, trainer_of
from fake_world import fake_world
from rank_server import Place
from torch.utils._pytree import tree_leaves

from codescent.build import build
from codescent.config.sections import Config
from codescent.data.loader import Batch, Portion
from codescent.models.part import Part
from codescent.operators import kept
from codescent.plan import Instruction, Plan, Verb
from codescent.train.execute import Executor

Answer = dict[str, Any]


class OwnMemory(FixedLoader):
    """Micro-batches whose tensors have memory of their own; with lengths, or vectors, where the model reads them."""

    def next(self) -> Portion:
        """A step's micro-batches."""
        portion = super().next()
        return replace(portion, batches=[self._own(batch) for batch in portion.batches])

    def _own(self, batch: Batch) -> Batch:
        extras, sizes = {name: extra.clone() for name, extra in batch.extras.items()}, self.plan.model.sizes
        if self.plan.task.extras and self.work.streams:
            names = ("source_lengths_B", "target_lengths_B")
            places = torch.arange(len(batch.inputs)) % 2 - 1
            extras |= {name: places + length for name, length in zip(names, self.work.streams, strict=True)}
        if sizes.get("embedding") == "none":
            shape = (*batch.inputs.shape, self.plan.model.hidden_dim)
            return Batch(torch.randn(shape), torch.randn(shape), extras)
        return Batch(batch.inputs.clone(), batch.targets.clone(), extras)


class Kept:
    """What the forward passes of a rank keep: each storage once, without parameters, tables and numbers.

    A chunk holds what it receives and sends, too. `by_chunk`: bytes of the first micro-batch. `most`: of all in flight.
    `waiting`: bytes of a chunk's first micro-batch whose gradients of weights are deferred: what the lists hold.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.by_chunk: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.flying: dict[tuple[int, int | None], int] = {}
        self.most = 0

    def watched(self, act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        """An instruction, with the bytes that it keeps or that nothing keeps after it."""

        def arm(instruction: Instruction) -> None:
            at = (instruction.chunk, instruction.microbatch)
            if instruction.verb is Verb.FORWARD:
                self.flying[at] = self._forward(act, instruction)
                self.by_chunk.setdefault(instruction.chunk, self.flying[at])
                self.most = max(self.most, sum(self.flying.values()))
                return
            act(instruction)
            if instruction.verb is Verb.BACKWARD_INPUT:
                self.flying[at] = self._deferred(instruction)
                self.waiting.setdefault(instruction.chunk, self.flying[at])
                self.most = max(self.most, sum(self.flying.values()))
            elif instruction.verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
                self.flying.pop(at)

        return arm

    def _deferred(self, instruction: Instruction) -> int:
        """What the functions of a micro-batch read, and the gradients of weights that were computed at once."""
        assert instruction.microbatch is not None
        one = self.executor.chunks[instruction.chunk].in_flight[instruction.microbatch]
        assert one.deferred is not None
        ready, deferred = one.deferred
        held = [gradient for _, gradient in ready] + [tensor for _, compute in deferred for tensor in compute.args]
        storages = {(storage := local(tensor).untyped_storage()).data_ptr(): storage.nbytes() for tensor in held}
        return sum(storages.values())

    def _forward(self, act: Callable[[Instruction], None], instruction: Instruction) -> int:
        chunk = self.executor.chunks[instruction.chunk]
        found: dict[int, torch.UntypedStorage] = {}  # held here, so that no other one takes their place
        sizes: dict[int, int] = {}
        left = {
            tensor.untyped_storage().data_ptr()
            for tensor in (chunk.part.tokens_T, chunk.part.rows_T)
            if tensor is not None
        }

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = local(tensor).untyped_storage()
            if storage.data_ptr() not in {local(p).untyped_storage().data_ptr() for p in chunk.part.parameters()}:
                found.setdefault(storage.data_ptr(), storage)
                sizes.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            kept.noted(pack),
            entering(chunk.part) as entered,
        ):
            act(instruction)
        for tensor in (one() for one in entered):
            if tensor is not None:
                pack(tensor)
        assert instruction.microbatch is not None
        one = chunk.in_flight[instruction.microbatch]
        for tensor in (one.inputs, one.outputs):
            if tensor is not None and tensor.ndim:
                pack(tensor)
        left |= {tensor.untyped_storage().data_ptr() for table in chunk.part.tables for tensor in table.tensors()}
        return sum(size for place, size in sizes.items() if place not in left)


@contextmanager
def entering(part: Part) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """A block in which tensors are noted with which blocks are called by keyword. torch's checkpoint keeps them until
    backward, and no hook of autograd sees it: those that are alive after the forward pass are kept."""
    found: list[weakref.ref[torch.Tensor]] = []

    def note(_block: object, _inputs: object, options: dict[str, Any]) -> None:
        found.extend(weakref.ref(one) for one in tree_leaves(options) if isinstance(one, torch.Tensor))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in part.blocks.values()]
    yield found
    for handle in handles:
        handle.remove()


def plan_of(case: dict[str, Any]) -> Plan:
    """The plan of a case."""
    vectors = case["config"]["model"].get("embedding") == "none"
    return build(Config.model_validate(case["config"]), None if vectors else declared_ranks.VOCAB, case["world_size"])


def kept_by_rank(case: dict[str, Any], rank: int) -> Answer:
    """What one rank keeps in a step."""
    plan = plan_of(case)
    with fake_world(rank, case["world_size"], "cpu") as world:
        trainer = trainer_of(case, plan, rank, OwnMemory(plan), world)
        found = Kept(trainer.executor)
        trainer.executor.arms = {verb: found.watched(act) for verb, act in trainer.executor.arms.items()}
        trainer.executor.step(0, 1e-3)
        trainer.close()
    chunks, waiting = ([held[chunk] for chunk in sorted(held)] for held in (found.by_chunk, found.waiting))
    return {"chunks": chunks, "waiting": waiting, "most": found.most}


def on_fake_ranks(place: Place, cases: dict[str, Any]) -> dict[str, dict[int, Answer]]:
    """By case, what each of its `ranks` keeps, all in this process."""
    return {name: {rank: kept_by_rank(case, rank) for rank in case["ranks"]} for name, case in cases.items()}
