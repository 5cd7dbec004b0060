"""In: cases of declared_cases. Out: a step of single ranks on a device that is no CPU, without computing it:
what it sends, copies, launches, and where the host waits for the device.
Does not assert anything (test_fake_ranks does). The device is "meta", the process group torch's fake one."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from declared_ranks import Watch, plan_of, trainer_of
from device_spy import DeviceSpy, fused_kernels, fused_optimizers, make_tables
from fake_world import fake_world, fully_shard_on_meta
from rank_server import Place

from codescent.base import device
from codescent.plan import Instruction, Plan, Verb
from codescent.strategies import ddp, sequence
from codescent.train.messages import Messages

Answer = dict[str, Any]
NUMBERS = 4
"""A copy of at most so many elements is no tensor of the model: losses, norms, requests to stop."""


class WatchCopies(Watch):
    """Notes the copies between device and host, too: `copied` has the bytes by (verb, dtype)."""

    def __init__(self) -> None:
        super().__init__(fake=True)
        self.copied: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name, options = func._schema.name, kwargs or {}
        if name in ("aten::copy_", "aten::_to_copy") and self.verb is not None:
            to, given = (args[0], args[1]) if name == "aten::copy_" else (result, args[0])
            if to.is_meta != given.is_meta and given.numel() > NUMBERS:
                # A copy that the host waits for is converted on the host, any other one on the device.
                on_device = bool(options.get("non_blocking") or args[2:])
                sent = given if to.is_meta == on_device else to
                dtype = str(sent.dtype).removeprefix("torch.")
                self.copied[str(self.verb), dtype] += sent.numel() * sent.element_size()
        return result


def selected(plan: Plan) -> int:
    """The positions that BERT's head reads, as FixedLoader makes them."""
    return round(plan.task.head_share * plan.work.microbatch_size * plan.work.seq_len)


def step(case: dict[str, Any], rank: int) -> Answer:
    """A step, as each one but the first of a run: what is made once is there. Nobody reads its result yet."""
    plan, spy, watch = plan_of(case), DeviceSpy(), WatchCopies()
    spy.selected = selected(plan)
    with (
        fully_shard_on_meta(),
        fused_kernels(),
        fused_optimizers(),
        spy.clock(),
        fake_world(rank, case["world_size"], "meta") as world,
    ):
        trainer = trainer_of(case, plan, rank, world=world)
        executor = trainer.executor
        for part in trainer.parts:
            make_tables(part, plan)
            part.losses_per_sample = round(plan.task.head_share * plan.work.seq_len)  # as the source of "mlm" says
        executor.watch.events, executor.memory.counted = True, True  # meta tensors have no place in memory to count
        launches: Counter[str] = Counter()
        executor.arms = {verb: noted(verb, act, spy, watch, launches) for verb, act in executor.arms.items()}
        with spy, watch:
            executor.launch(0, 1e-3)
        trainer.close()
    waits = [[why, place, number] for (why, place), number in spy.waits.items()]
    copied = [[*key, size] for key, size in watch.copied.items()]
    return {"issued": watch.issued, "copied": copied, "waits": waits, "launches": launches}


def noted(
    verb: Verb, act: Callable[[Instruction], None], spy: DeviceSpy, watch: Watch, launches: Counter[str]
) -> Callable[[Instruction], None]:
    """The method of a verb, which says while it runs that it does, and what it launched."""

    def arm(instruction: Instruction) -> None:
        before, watch.verb = spy.launches, verb
        act(instruction)
        watch.verb = None
        launches[str(verb)] += spy.launches - before

    return arm


def on_meta_ranks(place: Place, cases: dict[str, Any], fault: str = "") -> dict[str, dict[int, Answer]]:
    """By case, each of its `ranks`, all in this process; a failure is its traceback."""
    if fault:
        FAULTS[fault]()
    answers: dict[str, dict[int, Answer]] = {}
    for name, case in cases.items():
        answers[name] = {}
        for rank in case["ranks"]:
            try:
                answers[name][rank] = step(case, rank)
            except Exception:  # of this case; the others go on
                answers[name][rank] = {"failed": traceback.format_exc()}
    return answers


def bucket_not_sent() -> None:
    """The first bucket of gradients is never reduced."""
    whole = ddp.BucketedGradients.before_backward

    def before_backward(self: ddp.BucketedGradients, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        whole(self, last=last, chunk=chunk, step=step)
        self.next_bucket = max(1, self.next_bucket)

    ddp.BucketedGradients.before_backward = before_backward  # type: ignore[method-assign]


def fp64_refused() -> None:
    """A tensor in fp64 on the device is an error, as on MPS. Nobody says so before."""
    DeviceSpy.has_fp64 = False


def without_fp64() -> None:
    """The device has no fp64, and says so."""
    device.has_fp64 = lambda of: of.type != "meta"
    fp64_refused()


def message_twice() -> None:
    """A stage sends each activation twice."""
    whole = Messages.send

    def send(self: Messages, instruction: Instruction, message: torch.Tensor) -> None:
        whole(self, instruction, message)
        whole(self, instruction, message)

    Messages.send = send  # type: ignore[method-assign]


def wide_sums() -> None:
    """Activations are summed over tp in fp32."""
    whole = sequence.all_reduce

    def all_reduce(tensor: torch.Tensor, **options: Any) -> None:
        whole(tensor.float(), **options)

    sequence.all_reduce = all_reduce


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault for fault in (bucket_not_sent, message_twice, wide_sums, fp64_refused, without_fp64)
}
