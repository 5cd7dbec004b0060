"""In: a push of a round that a worker has taken, the weights of its begin. Out: the change, computed again.
Does not apply the change and does not choose the weights (replay.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from codescent.base.errors import UserError
from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Config
from codescent.coupling.outer_optimizer import OuterOptimizer
from codescent.plan import Plan
from codescent.record import RunFolder, order
from codescent.record.order import Applied
from codescent.train.alone import gradients_alone
from codescent.train.optimize import Weight
from codescent.train.trainer import Trainer


def was_refused(rows: Sequence[Applied], events: Iterable[Mapping[str, Any]], steps: int) -> bool:
    """Whether no server has applied a push before the end of step `steps`: a number is missing, or an event says so.

    Its steps are in the state of that worker's optimizer, but not in the order.
    """
    last: dict[int, int] = {}
    for row in rows:
        if row.number not in (last.get(row.worker, 0) + 1, 1):  # 1: the command was resumed
            return True
        last[row.worker] = row.number
    late: list[int] = []
    for event in events:
        if event["kind"] == "late":
            late.append(event["step"])
        elif event["kind"] == "rewind":  # what came after this step was done again
            late = [step for step in late if step <= event["step"]]
    return any(step <= steps for step in late)


class RoundPushes:
    """Pushes of the changes of rounds. The optimizers of all workers are in one process, and a worker's state stays
    from one round to its next.

    Call `computed` for the pushes of each worker in their order.

    Args:
        trainer: of one process; its weights are overwritten.
        plan: of the run.
        config: of the run.
    """

    def __init__(self, trainer: Trainer, plan: Plan, config: Config) -> None:
        self.trainer, self.plan, self.config = trainer, plan, config
        self.fresh = self._state()
        self.states: dict[int, list[torch.Tensor]] = {}
        self.tokens: dict[tuple[int, int, int], int] = {}

    def _state(self) -> list[torch.Tensor]:
        named = self.trainer.optimizer.named_state()
        return [value.clone() for _, name, value in named if not name.startswith("model.")]

    @staticmethod
    def refuse(rows: Sequence[Applied], run: Path, steps: int) -> None:
        """Raise UserError if a push until the end of step `steps` was refused. `rows`: of server 0."""
        if was_refused(rows, RunFolder.open(run).read_events(), steps):
            raise UserError(
                f"{order.file_of(run, 0)}: a push was refused; its steps changed the state of the worker's optimizer, "
                "and are not in the order, so the run cannot be replayed"
            )

    def optimizer(self, weights: Sequence[Weight]) -> OuterOptimizer:
        """What a server updates its weights with."""
        return OuterOptimizer(weights, self.plan)

    def computed(self, row: Applied) -> tuple[list[torch.Tensor], float]:
        """The change of each weight in a push, and the sum of its losses. The weights are those that were pulled."""
        optimizer = self.trainer.optimizer
        named = (value for _, name, value in optimizer.named_state() if not name.startswith("model."))
        with torch.no_grad():
            for value, kept in zip(named, self.states.get(row.worker, self.fresh), strict=True):
                value.copy_(kept)
            for weight in optimizer.weights:
                weight.master.copy_(weight.tensor)
            begins = [weight.master.clone() for weight in optimizer.weights]
        total, tokens = 0.0, 0
        for step in range(row.step + row.first, row.step + row.first + row.count):
            gradients, loss, losses = gradients_alone(self.trainer, self.plan, step, row.part, of_step=False)
            rate = learning_rate(self.config.optimizer, self.config.train.num_steps, self.plan.scale_ranks, step)
            own = torch.tensor(loss, dtype=torch.float64)
            optimizer.step(gradients, rate, lambda square, own=own: torch.stack((own, square)))  # type: ignore[misc]
            total, tokens = total + loss, tokens + losses
        self.states[row.worker] = self._state()
        self.tokens[row.step, row.part, row.first] = tokens
        with torch.no_grad():
            found = [begin - weight.master for begin, weight in zip(begins, optimizer.weights, strict=True)]
        return found, total

    def weighted(self, parts: Sequence[torch.Tensor], rows: Sequence[Applied]) -> list[torch.Tensor]:
        """The summands of the mean of these pushes."""
        tokens = [self.tokens[row.step, row.part, row.first] for row in rows]
        return [part * (number / max(1, sum(tokens))) for part, number in zip(parts, tokens, strict=True)]
