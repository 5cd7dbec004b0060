"""In: offloaded steps on stand-ins for streams and events, with copies as late and as early as these allow. Out: the
weights of the plain steps, bit by bit; a wait or an event that is missing shows.
Does not need CUDA. That pinned copies do not block, and their speed, are not seen here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from streams import Device, Event, Schedule, Stream, at_random, copies_early, early, half, late, one_early
from torch import Tensor

from codescent.config.sections import Optimizer as OptimizerConfig
from codescent.train import host_copy, optimize
from codescent.train.host_copy import HostCopy
from codescent.train.optimize import Optimizer, Weight

SHAPES = [(5, 7), (5,), (30, 4), (3,), (2, 2), (11,)]
UNITS = [[0, 1], [2], [3], [4, 5]]
STEPS = 3
SCHEDULES: dict[str, Schedule] = {
    "late": late,
    "half": half,
    "early": early,
    "copies early": copies_early,
    **{f"{name} early": one_early(name) for name in ("compute", "down", "up")},
}
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, summed in fp32": (torch.bfloat16, torch.float32),
}
"""Of weights and gradients."""


def values(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@dataclass
class Run:
    """Offloaded weights, their gradients, and what the computations of the device read.

    Attributes:
        weights: `tensor` in the device's memory, `master` in the host's.
        gradients: in the device's memory.
        seen: the weights as each forward pass has read them.
    """

    weights: list[Weight]
    gradients: list[Tensor]
    seen: list[Tensor]

    @classmethod
    def of(cls, precision: str) -> Run:
        narrow, summed = PRECISIONS[precision]
        masters, tensors = values(0, torch.float32), values(0, narrow)
        weights = [
            Weight(str(number), tensor, master, decay=True, updated_on_host=True)
            for number, (tensor, master) in enumerate(zip(tensors, masters, strict=True))
        ]
        return cls(weights, [torch.full(shape, torch.nan, dtype=summed) for shape in SHAPES], [])

    def compute(self, step: int, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Forward reads the weights, backward writes the gradients; without gradients after the last step."""
        for weight in self.weights:
            self.seen.append(torch.zeros_like(weight.tensor))
            copy(self.seen[-1], weight.tensor)
        if step < STEPS:
            for gradient, value in zip(self.gradients, values(100 + step, self.gradients[0].dtype), strict=True):
                copy(gradient, value)

    def found(self) -> list[Tensor]:
        return [*(weight.master for weight in self.weights), *(weight.tensor for weight in self.weights), *self.seen]


def update(run: Run, copies: HostCopy) -> None:
    """A step of an optimizer on the host."""
    for unit, gradients in zip(copies.units, copies.fetch(run.gradients), strict=True):
        for index, gradient in zip(unit, gradients, strict=True):
            run.weights[index].master.sub_(gradient, alpha=0.1)
        copies.send(unit)
    copies.finish()


def give_streams(copies: HostCopy, device: Device) -> None:
    """What the constructor makes where weights are on CUDA; it finds them on the CPU."""
    copies.down, copies.up = Stream(device, "down"), Stream(device, "up")  # type: ignore[assignment]
    copies.arrived, copies.left = ([Event(device) for _ in range(host_copy.SLOTS)] for _ in range(2))  # type: ignore[misc]


def plain(precision: str) -> list[Tensor]:
    run = Run.of(precision)
    copies = HostCopy(run.weights, UNITS)
    for step in range(STEPS + 1):
        run.compute(step, Tensor.copy_)
        if step < STEPS:
            update(run, copies)
    return run.found()


Fault = Callable[[HostCopy], object]


def replayed(precision: str, schedule: Schedule, fault: Fault = lambda _: None) -> list[Tensor]:
    run = Run.of(precision)
    device = Device(schedule, [])
    copies = HostCopy(run.weights, UNITS)
    give_streams(copies, device)
    fault(copies)
    with device.patched():
        for step in range(STEPS + 1):
            run.compute(step, lambda to, given: device.copy(device.compute, to, given))
            if step < STEPS:
                update(run, copies)
    return run.found()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_copies_at_any_time_give_the_weights_of_the_plain_run(precision: str) -> None:
    expected = plain(precision)
    assert all(bool(tensor.isfinite().all()) for tensor in expected)
    for name, schedule in SCHEDULES.items():
        assert same(replayed(precision, schedule), expected), name
    for seed in range(20):
        assert same(replayed(precision, at_random(seed)), expected), f"seed {seed}"


def no_finish(copies: HostCopy) -> None:
    copies.finish = lambda: None  # type: ignore[method-assign]


def deaf(*path: str) -> Fault:
    """Streams do not wait, or events are not recorded."""

    def plant(copies: HostCopy) -> None:
        for name in path:
            one = getattr(copies, name)
            for part in one if isinstance(one, list) else [one]:
                part.deaf = True

    return plant


# That the stream "up" waits for computations is not among them: no order shows it. The host has waited for gradients,
# and the stream "down" copied them after all that reads weights.
FAULTS: dict[str, Fault] = {
    "gradients are copied before they are computed": deaf("down"),
    "gradients are read before they arrive": deaf("arrived"),
    "a slot is filled while it is copied": deaf("left"),
    "forward does not wait for the weights": no_finish,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_missing_wait_or_event_shows(name: str) -> None:
    """To some schedule, and not where all is done at once, as without streams."""
    expected = plain("bf16")
    broken = {
        schedule for schedule, chosen in SCHEDULES.items() if not same(replayed("bf16", chosen, FAULTS[name]), expected)
    }
    assert broken
    assert "early" not in broken


def test_one_slot_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain("bf16")
    monkeypatch.setattr(host_copy, "SLOTS", 1)
    assert not same(replayed("bf16", late), expected)


def test_an_early_record_shows() -> None:
    """An event that is recorded before the copies of its unit says nothing about them."""
    expected = plain("fp32")

    def plant(copies: HostCopy) -> None:
        begin = copies._begin

        def marked_first(number: int, gradients: list[Tensor]) -> None:
            copies._mark(copies.arrived[number % host_copy.SLOTS], copies.down)
            copies._mark, mark = (lambda *_: None), copies._mark  # type: ignore[method-assign]
            begin(number, gradients)
            copies._mark = mark  # type: ignore[method-assign]

        copies._begin = marked_first  # type: ignore[method-assign, assignment]

    assert not same(replayed("fp32", late, plant), expected)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_optimizer_gives_the_same_weights_at_any_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step: norm, clipping, the update of each unit."""
    monkeypatch.setattr(optimize, "UNIT_NUMEL", 40)
    config = OptimizerConfig.model_validate({"kind": kind, "max_grad_norm": 5.0})

    def steps(schedule: Schedule | None) -> list[Tensor]:
        run = Run.of("bf16")
        optimizer = Optimizer(run.weights, config)
        assert optimizer.host_copy is not None
        assert len(optimizer.host_copy.units) > host_copy.SLOTS
        if schedule is None:
            for step in range(STEPS):
                run.compute(step, Tensor.copy_)
                optimizer.step(run.gradients, 1e-2)
            return run.found()
        device = Device(schedule, [*run.gradients, *(weight.tensor for weight in run.weights)])
        give_streams(optimizer.host_copy, device)
        with device.patched():
            for step in range(STEPS):
                run.compute(step, lambda to, given: device.copy(device.compute, to, given))
                optimizer.step(run.gradients, 1e-2)
        return run.found()

    expected = steps(None)
    for name, schedule in SCHEDULES.items():
        assert same(steps(schedule), expected), name
