"""In: the sums of a step on the device, the laps of its parts. Out: its loss, norm, requests to stop and seconds.
Does not sum over ranks (execute.py does). Off the CPU the host can launch the next step before it reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from codescent.base.device import Event, new_event
from codescent.base.stopwatch import Laps
from codescent.coupling import StepSums
from codescent.plan import RECEIVES, SENDS, Verb

WAIT_COLUMN = "exposed_comm_s"
"""Metrics column charged with waiting for other ranks, in whichever verb: for messages and for collectives."""

COLUMN: dict[Verb, str] = {
    Verb.LOAD: "data_s",
    Verb.FORWARD: "forward_s",
    **dict.fromkeys((Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT), "backward_s"),
    **dict.fromkeys((*SENDS, *RECEIVES, Verb.REDUCE, Verb.AVERAGE, Verb.MERGE, Verb.EXCHANGE), WAIT_COLUMN),
    **dict.fromkeys((Verb.PUSH, Verb.PULL, Verb.SERVE), WAIT_COLUMN),
    Verb.STEP: "optimizer_s",
}
"""Metrics column charged with the time of each verb, without waiting."""
ALONE: dict[Verb, str] = {
    verb: column if column != WAIT_COLUMN else "backward_s" if verb is Verb.REDUCE else "optimizer_s"
    for verb, column in COLUMN.items()
}
"""The same of a rank that has no others: it waits for nobody. REDUCE completes gradients, the rest changes weights."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step, equal on all ranks except `seconds` and `step_s`.

    Attributes:
        train_loss: mean loss of the global batch.
        grad_norm: gradient norm before clipping.
        stop: whether any rank has received a request to stop.
        seconds: of this rank, by metrics column: each part of the step, without the others.
        step_s: seconds of the whole step on this rank: see `Laps.step_s`.
        skips: steps of the round that replicas skipped, summed over replicas that train apart.
        staleness: mean and largest number of versions between the weights of a gradient and those that it changed;
            None: the weights are those of the step before.
        late: portions that came too late, and did not count.
        measured: what the model (`Part.measured`) and the objective have measured beside the loss, by metrics column;
            None: nothing was counted.
        culprit: 1 more than the rank that alone gave what is not finite; 0: none, several, or nobody knows.
        consensus: distance of the replicas from their mean, root mean square, relative to the norm of this mean; None
            within a round, and where replicas do not train apart.
    """

    train_loss: float
    grad_norm: float
    stop: bool
    seconds: dict[str, float]
    step_s: float = 0.0
    skips: int = 0
    consensus: float | None = None
    staleness: tuple[float, int] | None = None
    late: int = 0
    culprit: int = 0
    measured: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, float]:
        """The parts of the step by metrics column, in seconds. They sum to `step_s`, without compute_s: forward and
        backward together."""
        parts = {name: self.seconds.get(name, 0.0) for name in dict.fromkeys(COLUMN.values())}
        rest = max(0.0, self.step_s - sum(parts.values()))
        return {**parts, "compute_s": parts["forward_s"] + parts["backward_s"], "other_s": rest}

    @cached_property
    def skipped(self) -> bool:
        """Whether loss or gradients were not finite; then no rank has updated its weights.

        Of a round the last step counts, of any replica: steps that replicas skipped before it (`skips`) have left the
        weights good.
        """
        return not (math.isfinite(self.train_loss) and math.isfinite(self.grad_norm))


class Pending:
    """The result of a step that is launched. On a CPU the step is also done.

    Args:
        known: what the rank knows of the step.
        laps: of the step's parts.
        measured: what the model has measured, on the device.
        pins: the device copies into page-locked memory, so that the copy does not wait.
    """

    def __init__(self, known: StepSums, laps: Laps, measured: Mapping[str, torch.Tensor], *, pins: bool) -> None:
        sums, self.names = known.values, tuple(measured)
        if measured:  # one copy takes all numbers off the device
            sums = torch.cat((sums, torch.stack([value.to(sums.dtype) for value in measured.values()])))
        self.known, self.laps, self.completed, self.earlier = known, laps, known.done, known.earlier
        self.device, self.numbers = sums.device, sums
        self.arrived: Event | None = None
        self.result: StepResult | None = None
        if pins:  # the event says when the copy is done
            self.numbers = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self.numbers.copy_(sums, non_blocking=True)
            self.arrived = new_event(self.device)
            self.arrived.record()

    def read_earlier(self) -> list[StepResult]:
        """The results of `earlier`. Each has its share of the seconds of all steps, as `read` then has."""
        last, number = self.read(), 1 + len(self.earlier)
        seconds = {name: spent / number for name, spent in last.seconds.items()}
        self.result = last = replace(last, seconds=seconds, step_s=last.step_s / number)
        found = []
        for loss, _, square, skips, stale, most_stale, losses, culprit, late in self.earlier:
            norm, staleness = math.sqrt(square), (stale, int(most_stale))
            one = replace(last, train_loss=loss / losses, grad_norm=norm, skips=int(skips), staleness=staleness)
            found.append(replace(one, stop=False, consensus=None, late=int(late), culprit=int(culprit)))
        self.earlier = ()
        return found

    @property
    def is_late(self) -> bool:
        """Whether the device still computes the step, perhaps: the host should launch the next one meanwhile."""
        return self.device.type != "cpu"

    def read(self) -> StepResult:
        """The result. Waits for the device, the first time."""
        if self.result is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            numbers, last = self.numbers.tolist(), len(self.numbers) - len(self.names)
            loss, stops, *more = numbers[:last]
            names = self.known.measures
            sums, (square, *of_round) = more[: 2 * len(names)], more[2 * len(names) :]
            means = (one / count if count else None for one, count in zip(sums[::2], sums[1::2], strict=True))
            of_model = dict(zip(self.names, numbers[last:], strict=True))
            skips, distance, size = (*of_round, 0, 0, 0)[:3]
            self.result = StepResult(
                loss / self.known.losses,
                math.sqrt(square),
                stops > 0,
                seconds=self.laps.read(),
                step_s=self.laps.step_s(),
                skips=int(skips),
                consensus=math.sqrt(distance / size) if size else None,
                staleness=self.known.staleness,
                late=self.known.late,
                culprit=self.known.culprit,
                measured={**of_model, **dict(zip(names, means, strict=True))},
            )
        return self.result


@dataclass(frozen=True)
class Launched:
    """A step that is launched: its number (from 1), its learning rate, and its result, which may come later."""

    step: int
    rate: float
    pending: Pending
