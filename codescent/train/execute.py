"""In: a plan's instruction list, a module, its gradients, an optimizer, a loader. Out: one step done, and its times.
Does not decide what a step consists of (the plan does) and knows no strategy by name: cost/simulate is its twin."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from codescent.data.loader import Batch, Loader
from codescent.plan import Instruction, Plan, Verb
from codescent.strategies import Gradients
from codescent.train.optimize import Optimizer

PART: dict[Verb, str] = {
    Verb.LOAD: "data_s",
    Verb.FORWARD: "compute_s",
    Verb.BACKWARD: "compute_s",
    Verb.REDUCE: "exposed_comm_s",
    Verb.STEP: "optimizer_s",
}
"""Which column of the metrics the time of a verb counts towards."""


@dataclass(frozen=True)
class StepResult:
    """What one step gave: the mean loss over the global batch, the gradient norm before clipping, seconds by part.

    `stop` says that some rank was asked to stop: every rank sees it after the same step.
    """

    train_loss: float
    grad_norm: float
    stop: bool
    seconds: dict[str, float]


class Trainable(Protocol):
    """What the executor asks of a module: the sum of a micro-batch's token losses, its gradients scaled."""

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: torch.Tensor) -> None:
        """Says which samples the next forward pass reads."""

    def __call__(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, *, loss_scale: float) -> torch.Tensor:
        """The sum of the losses; their gradients come out multiplied by `loss_scale`."""


class Stopwatch:
    """Seconds between laps, on the device's own clock: CUDA work is timed by events, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.laps: list[tuple[str, float | torch.cuda.Event]] = []

    def lap(self, part: str) -> None:
        """What came since the last lap was `part`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.laps.append((part, event))
        else:
            self.laps.append((part, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Seconds by part, from the first lap to the last; the next lap begins anew."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, begin), (part, end) in zip(self.laps, self.laps[1:]):
            if isinstance(begin, float) and isinstance(end, float):
                elapsed = end - begin
            else:
                assert isinstance(begin, torch.cuda.Event)
                assert isinstance(end, torch.cuda.Event)
                elapsed = begin.elapsed_time(end) / 1e3
            seconds[part] = seconds.get(part, 0.0) + elapsed
        self.laps.clear()
        return seconds


class Executor:
    """Walks one pipeline stage's instruction list, step after step.

    Args:
        plan: the plan; `stage` is this rank's program in it.
        module: as the strategies have left it.
        gradients: who looks after its gradients.
        optimizer: owner of the weights.
        loader: owner of this rank's batches.
        device: where the module computes.
        seed: the run's seed, for dropout masks.
        wish_to_stop: asked once per step; its answer is shared by all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        module: torch.nn.Module,
        gradients: Gradients,
        optimizer: Optimizer,
        loader: Loader,
        device: torch.device,
        seed: int,
        wish_to_stop: Callable[[], bool],
    ) -> None:
        self.plan = plan
        self.program = plan.schedule.programs[stage]
        self.module = cast(Trainable, module)
        self.gradients = gradients
        self.optimizer = optimizer
        self.loader = loader
        self.device = device
        self.seed = seed
        self.wish_to_stop = wish_to_stop
        self.watch = Stopwatch(device)
        self.arms: dict[Verb, Callable[[Instruction], None]] = {
            Verb.LOAD: self._load,
            Verb.FORWARD: self._forward,
            Verb.BACKWARD: self._backward,
            Verb.REDUCE: self._reduce,
            Verb.STEP: self._step,
        }
        self.number = 0
        self.rate = 0.0
        self.batches: list[Batch] = []
        self.losses: dict[int, torch.Tensor] = {}
        self.batch: Batch | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.grad_norm = 0.0

    def step(self, number: int, rate: float) -> StepResult:
        """Do the step with number `number` (from 0) at learning rate `rate`."""
        self.number, self.rate = number, rate
        self.loss_sum.zero_()
        self.watch.lap("begin")
        for instruction in self.program:
            self.arms[instruction.verb](instruction)
            self.watch.lap(PART[instruction.verb])
        loss, stops = self.sums.tolist()
        return StepResult(loss / self.plan.work.tokens, self.grad_norm, stops > 0, self.watch.read())

    def _load(self, instruction: Instruction) -> None:
        if instruction.microbatch == 0:
            self.batches = self.loader.next()
        assert instruction.microbatch is not None
        batch = self.batches[instruction.microbatch]
        self.batch = Batch(
            batch.tokens_BT.to(self.device, non_blocking=True),
            batch.targets_BT.to(self.device, non_blocking=True),
            batch.sample_ids_B.to(self.device, non_blocking=True),
        )

    def _forward(self, instruction: Instruction) -> None:
        assert self.batch is not None
        assert instruction.microbatch is not None
        self.module.set_dropout_context(self.seed, self.number, self.batch.sample_ids_B)
        self.losses[instruction.microbatch] = self.module(
            self.batch.tokens_BT, self.batch.targets_BT, loss_scale=1.0 / self.plan.work.tokens
        )

    def _backward(self, instruction: Instruction) -> None:
        assert instruction.microbatch is not None
        loss = self.losses.pop(instruction.microbatch)
        self.gradients.before_backward(last=instruction.last)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss_sum += loss.detach()

    def _reduce(self, instruction: Instruction) -> None:
        scalars = torch.stack((self.loss_sum, torch.full_like(self.loss_sum, float(self.wish_to_stop()))))
        self.gradients.reduce(scalars)
        self.sums = scalars.cpu()

    def _step(self, instruction: Instruction) -> None:
        self.grad_norm = self.optimizer.step(self.gradients.collect(), self.rate)
        self.gradients.release()
