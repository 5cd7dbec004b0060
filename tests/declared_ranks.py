"""In: cases (a config, a number of ranks). Out: what ranks of each really issue in a step and hold.
Does not assert anything: test_declared does. A case runs rank by rank on torch's fake process group, or on gloo."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake_world import fake_world
from rank_server import Place
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.build import build
from codescent.config.sections import Config
from codescent.data.documents import extras_of, separate_samples
from codescent.data.loader import Batch, Portion
from codescent.plan import Collective, Instruction, Plan, Verb
from codescent.strategies.wire import Channel, PendingSum
from codescent.train import assemble
from codescent.train.trainer import Trainer
from codescent.train.world import World

VOCAB = 97
KINDS: dict[str, str] = {
    "allreduce_": Collective.ALL_REDUCE,
    "broadcast_": Collective.BROADCAST,
    "_allgather_base_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "send": Collective.SEND,
    "alltoall_base_": Collective.ALL_TO_ALL,
}
Answer = dict[str, Any]
PASSES = (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT)


class Watch(TorchDispatchMode):
    """Notes what this rank hands in to process groups while `verb` is one, and the group, by its global ranks.

    What a fake group would have received is made zero: its buffers hold whatever memory held before.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. torch's guard around each of a million operators takes longer than they do."""
        return False

    def __init__(self, *, fake: bool) -> None:
        super().__init__()
        self.fake = fake
        self.verb: Verb | None = None
        self.issued: list[list[Any]] = []
        self.leaves = False
        self.moved = [0, 0]  # bytes that all uneven all-to-alls of passes have sent and received

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        done = args
        if self.fake and name == "alltoall_base_":  # the fake group refuses that a rank receives and sends nothing
            done = (torch.empty(0), torch.empty(0), args[2], [], [], *args[5:])
        result = func(*done, **(kwargs or {}))
        if func.namespace == "c10d":
            # (tensors, ...) or (output, input, ...); of an all-gather its size is that of the output.
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            if self.verb is not None and name != "recv_":
                payload = args[1] if name in ("_reduce_scatter_base_", "alltoall_base_") else first
                if name == "alltoall_base_" and self.verb in PASSES and payload.is_floating_point():
                    payload = self._of_tokens(payload, first)
                size = payload.numel() * payload.element_size()
                kind, dtype = KINDS.get(name, name), str(payload.dtype).removeprefix("torch.")
                self.issued.append([kind, _ranks(args), size, dtype, str(self.verb)])
            if self.fake and name in ("recv_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
                first.zero_()
        return result

    def _of_tokens(self, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's own tokens, of which a plan knows how many there are: they leave, then they come back."""
        self.moved = [sum(pair) for pair in zip(self.moved, (sent.nbytes, received.nbytes), strict=True)]
        self.leaves = not self.leaves
        return sent if self.leaves else received

    def watched(
        self, act: Callable[[Instruction], None], before: Callable[[Instruction], None] = lambda _: None
    ) -> Callable[[Instruction], None]:
        """An arm of the executor that is watched. What runs between two instructions is not: it issues nothing."""

        def arm(instruction: Instruction) -> None:
            before(instruction)
            self.verb = instruction.verb
            with self:
                act(instruction)
            self.verb = None

        return arm


class FixedLoader:
    """Random tokens, in place of a corpus; of a BERT with segments, padding, and as many wanted as its plan says."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.work = plan, plan.work

    def next(self) -> Portion:
        """A step's micro-batches."""
        sizes = (self.work.num_microbatches, self.work.microbatch_size, self.work.seq_len + 1)
        batches = [Batch(row[:, :-1], row[:, 1:]) for row in torch.randint(0, VOCAB, sizes)]
        if self.plan.model.kind == "bert":
            batches = [self._of_bert(batch) for batch in batches]
        elif self.plan.model.sizes.get("head") == "mlm":
            batches = [Batch(batch.inputs, self._wanted(batch.targets)) for batch in batches]
        if self.plan.objective.preference is not None:
            batches = [self._of_pairs(batch) for batch in batches]
        elif self.plan.task.documents:
            batches = [Batch.of(separate_samples(one.inputs.numpy(), one.targets.numpy(), 0)) for one in batches]
        replicas = self.plan.mesh.dp_replicate if self.plan.apart else 1
        return Portion(batches, self.work.tokens, self.work.tokens // replicas)

    def _of_bert(self, batch: Batch) -> Batch:
        length, share = self.work.seq_len, self.plan.task.head_share
        extras = {
            "segments_BT": (torch.arange(length) >= length // 3).long().expand_as(batch.inputs),
            "lengths_B": torch.arange(len(batch.inputs)) % 2 + length - 1,
        }
        if share == 1:  # where an answer begins and ends
            return Batch(batch.inputs, batch.targets[:, :2] % (length // 2), extras)
        return Batch(batch.inputs, self._wanted(batch.targets), extras)

    def _of_pairs(self, batch: Batch) -> Batch:
        """Samples of two documents: the first half of the positions, which begins with a prompt, and the second."""
        samples, length = batch.inputs.shape
        places_T, half = torch.arange(length), length // 2
        spans_T = torch.where(places_T < half // 2, 2, (places_T >= half).long())
        is_last_T = (places_T == half - 1) | (places_T == length - 1)
        documents = extras_of(is_last_T.expand(samples, length).numpy())
        extras = {name: torch.from_numpy(array) for name, array in documents.items()}
        extras |= {"spans_BT": spans_T.repeat(samples, 1), "references_BK": torch.randn(samples, 3).double()}
        return Batch(batch.inputs, batch.targets, extras)

    def _wanted(self, targets: torch.Tensor) -> torch.Tensor:
        """Targets, of which the share that the head reads is wanted."""
        places = torch.randperm(targets.numel())
        unwanted = places >= round(self.plan.task.head_share * len(places))
        return targets.masked_fill(unwanted.view_as(targets), -100)

    def close(self) -> None:
        """Nothing is read ahead."""


def plan_of(case: dict[str, Any]) -> Plan:
    """The plan of a case."""
    return build(Config.model_validate(case["config"]), VOCAB, case["world_size"])


def trainer_of(case: dict[str, Any], plan: Plan, rank: int, loader: Any = None, world: World | None = None) -> Trainer:
    """A rank's parts, in a World, or on the process group that there is."""
    world = world or joined(plan, rank)
    world.divide(plan)
    dataset: Any = SimpleNamespace(vocab_size=VOCAB)
    stop: Any = SimpleNamespace(is_requested=lambda: False)
    # Put back afterwards: some tests call this in their own process.
    with patch.object(assemble, "_loader", lambda *_: loader or FixedLoader(plan)):
        return assemble.assemble(Config.model_validate(case["config"]), plan, world, dataset, 0, stop)


def joined(plan: Plan, rank: int) -> World:
    """A World on the CPU around the process group that there is."""
    world: Any = World.__new__(World)
    world.this_rank = SimpleNamespace(rank=rank, world_size=plan.mesh.world_size)
    world.device, world.timeout, world.groups = torch.device("cpu"), timedelta(seconds=60), {}
    world.pages, world.living = None, tuple(range(plan.world_size))
    return cast(World, world)


def observed_step(case: dict[str, Any], rank: int, world: World | None = None) -> Answer:
    """What a rank issues in a step, and what it holds. `world`: on the fake process group."""
    plan = plan_of(case)
    trainer = trainer_of(case, plan, rank, world=world)
    executor, held = trainer.executor, Held(trainer)
    watch = Watch(fake=world is not None)
    # A validation beforehand changes nothing: what it gathered is not kept for the step.
    batch = FixedLoader(plan).next().batches[0]
    with watch, executor.evaluating() as evaluate:
        evaluate(batch)
    executor.arms = {verb: watch.watched(act, held.look) for verb, act in executor.arms.items()}
    executor.step(0, 1e-3)
    answer = {"issued": watch.issued, "held": held.answer(), "counted": executor.memory.most, "moved": watch.moved}
    trainer.close()
    return answer


def observed_steps(case: dict[str, Any], rank: int, world: World | None = None) -> Answer:
    """What a rank issues in each step: of the opening ones, those before a `wire` begins, and two rounds after them."""
    plan = plan_of(case)
    inline()
    trainer = trainer_of(case, plan, rank, world=world)
    executor, issued = trainer.executor, []
    watch = Watch(fake=world is not None)
    executor.arms = {verb: watch.watched(act) for verb, act in executor.arms.items()}
    for number in range(max(plan.layout.synchronous_steps, plan.layout.wire_from) + 2 * plan.schedule.period):
        executor.step(number, 1e-3)
        issued.append(watch.issued)
        watch.issued = []
    kept = dict(executor.gradients.state()) | dict(executor.coupling.state())
    answer = {"issued": issued, "counted": executor.memory.most}
    answer["kept"] = {name: [list(value.shape), value.element_size()] for name, value in kept.items()}
    trainer.close()
    return answer


def inline() -> None:
    """Sums in other formats run in the thread that begins them: a Watch sees one thread only."""

    def start(channel: Channel, job: Callable[[], None]) -> PendingSum:
        pending = PendingSum(job, channel.device)
        pending.run(None)
        return pending

    Channel.start = start  # type: ignore[method-assign]


class Held:
    """Bytes that a rank holds, looked at before each instruction of a step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.read = dict.fromkeys(range(len(trainer.parts)), 0)
        self.whole = dict(self.read)
        self.gradients = 0

    def look(self, instruction: Instruction) -> None:
        """Weights as backward reads them; sums of micro-batches before the last one; what the optimizer is given."""
        part = self.trainer.parts[instruction.chunk]
        if instruction.verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT):
            self.read[instruction.chunk] = nbytes(_weights(part))
        if instruction.last:
            self.whole[instruction.chunk] = nbytes(_whole_gradients(part))
        if instruction.last or instruction.verb is Verb.STEP:
            self.gradients = max(self.gradients, self._gradients(complete=instruction.verb is Verb.STEP))

    def _gradients(self, *, complete: bool) -> int:
        """Of all gradients, wherever they are, each once."""
        owner: Any = self.trainer.executor.gradients
        kept = list(owner.collect()) if complete else []
        while hasattr(owner, "before"):
            owner = owner.before
        # What is under way when backward ends, of one unit of fully_shard, is not state yet: it is added to the sums.
        arrived = {p: gradient for road in getattr(owner, "roads", ()) for p, gradient in road.sums.items()}
        parameters = [parameter for part in self.trainer.parts for parameter in part.parameters()]
        kept += [arrived.get(parameter, parameter.grad) for parameter in parameters]
        kept += getattr(owner, "sums", {}).values()
        buffers = getattr(owner, "buffers", [])
        inside = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        apart = [local(tensor) for tensor in kept if tensor is not None]
        apart = [tensor for tensor in apart if tensor.untyped_storage().data_ptr() not in inside]
        return nbytes([*buffers, *{tensor.data_ptr(): tensor for tensor in apart}.values()])

    def answer(self) -> dict[str, int]:
        """After the step. `masters` are the tensors that are updated, even where they are what forward reads."""
        optimizer = self.trainer.optimizer
        state = (tensor for _, name, tensor in optimizer.named_state() if name.startswith("optimizer."))
        moments = [tensor for tensor in state if tensor.ndim]
        return {
            "read": sum(self.read.values()),
            "parameters": nbytes(tensor for part in self.trainer.parts for tensor in _weights(part)),
            "whole_gradients": sum(self.whole.values()),
            "gradients": self.gradients,
            "masters": nbytes(weight.master for weight in optimizer.weights),
            "moments": nbytes(moments),
        }


def _weights(part: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, and the scales of quantized ones."""
    yield from part.parameters()
    for layer in part.modules():
        if (packed := getattr(layer, "packed", None)) is not None:
            yield from packed


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of what is on this rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(local, tensors))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_gradients(part: nn.Module) -> Iterator[torch.Tensor]:
    for module in part.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for shard in group.fsdp_params if group else ():
                if shard.unsharded_accumulated_grad is not None:
                    yield shard.unsharded_accumulated_grad
                elif (whole := getattr(shard, "_unsharded_param", None)) is not None and whole.grad is not None:
                    yield whole.grad


def _ranks(args: Sequence[Any]) -> list[int]:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    raise AssertionError("a collective without a process group")


def on_fake_ranks(place: Place, cases: dict[str, Any], *, rounds: bool = False) -> dict[str, dict[int, Answer]]:
    """By case, each of its `ranks`, all in this process; a failure is its traceback. `rounds`: several steps."""
    observed = observed_steps if rounds else observed_step
    answers: dict[str, dict[int, Answer]] = {}
    for name, case in cases.items():
        answers[name] = {}
        for rank in case["ranks"]:
            try:
                with fake_world(rank, case["world_size"], "cpu") as world:
                    answers[name][rank] = observed(case, rank, world)
            except Exception:  # of this case; the others go on
                answers[name][rank] = {"failed": traceback.format_exc()}
    return answers


def on_gloo_rank(place: Place, case: dict[str, Any], *, rounds: bool = False) -> Answer:
    """One rank of a case, each a process. `rounds`: several steps."""
    place.join()
    answer = (observed_steps if rounds else observed_step)(case, place.rank)
    dist.barrier()
    return answer
