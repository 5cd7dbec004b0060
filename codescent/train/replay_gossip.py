"""In: the folder of a run with asynchronous gossip. Out: the weights of each replica, computed again in one process.
Does not compare them with the checkpoint (verbs/replay.py does) and does not start a replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import Saved
from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Config
from codescent.plan import Plan
from codescent.record import gossip_order
from codescent.record.order import FOLDER
from codescent.servers.changes import AGREED, AVERAGED, MERGED, SENT, STEPPED, Changed
from codescent.train.alone import gradients_alone, trainer_alone
from codescent.train.optimize import Optimizer, Weight, copy
from codescent.train.trainer import Trainer

Average = tuple[int, int, int, int]
"""Names an average: the active replica, the passive one, the step at which the ranks had last met, the number since."""
Values = list[torch.Tensor]


class _Replica:
    """A replica of the run: its weights, its optimizer, and the rows that it will follow.

    `read`: the weights with which it computes its next gradient: those of its last update, or meeting.
    """

    def __init__(self, weights: Sequence[Weight], config: Config, rows: Sequence[Changed]) -> None:
        own = [_copied(weight) for weight in weights]
        masters = [weight.master for weight in own]
        self.optimizer = Optimizer(own, config.optimizer, (), torch.device("cpu"))
        self.x, self.rows, self.next = masters, rows, 0
        self.read = [master.clone() for master in masters]


def _copied(weight: Weight) -> Weight:
    """The same weights in memory of their own. bf16 ones have masters apart, so that gradients are cast as before."""
    master = weight.master.detach().clone()
    tensor = master if weight.tensor is weight.master else weight.tensor.detach().clone()
    of_whole, factor = (weight.decay, weight.shape, None, weight.counted), weight.rate_factor
    return Weight(weight.name, tensor, master, *of_whole, rate_factor=factor, sign_rate=weight.sign_rate)


class _Replay:
    """All replicas in one process, which computes their gradients one after the other."""

    def __init__(
        self, plan: Plan, config: Config, trainer: Trainer, rows: Sequence[Sequence[Changed]], path: Path
    ) -> None:
        self.plan, self.config, self.trainer, self.path = plan, config, trainer, path
        weights = trainer.optimizer.weights
        self.replicas = [_Replica(weights, config, mine) for mine in rows]
        self.read = [weight.tensor for weight in weights]
        self.sent: dict[Average, Values] = {}  # weights that an active replica has sent
        self.back: dict[Average, Values] = {}  # changes that a passive one has answered

    @torch.no_grad()
    def run(self) -> None:
        """Follow the rows of each replica as far as possible, until all are done.

        Raises:
            UserError: the files do not fit together.
        """
        while left := [index for index, one in enumerate(self.replicas) if one.next < len(one.rows)]:
            before = sum(one.next for one in self.replicas)
            for index in left:
                one = self.replicas[index]
                while one.next < len(one.rows) and self._follow(index, one, one.rows[one.next]):
                    one.next += 1
            if sum(one.next for one in self.replicas) == before:
                raise UserError(f"{self.path / FOLDER}: the orders of the replicas do not fit together")

    def _follow(self, index: int, one: _Replica, row: Changed) -> bool:
        """Do what a row says. False: it needs what another replica has not done yet."""
        if row.kind == SENT:
            self.sent[index, row.partner, row.step, row.number] = [value.clone() for value in one.x]
        elif row.kind == AVERAGED:
            average = row.partner, index, row.step, row.number
            if average not in self.sent:
                return False
            rate = self.plan.layout.gossip_rate / 2
            self.back[average] = changes = [
                sent.sub_(value).mul_(rate) for sent, value in zip(self.sent.pop(average), one.x, strict=True)
            ]
            for value, change in zip(one.x, changes, strict=True):
                value.add_(change)
        elif row.kind == MERGED:
            average = index, row.partner, row.step, row.number
            if average not in self.back:
                return False
            for value, change in zip(one.x, self.back.pop(average), strict=True):
                value.sub_(change)
        elif row.kind == STEPPED:
            self._step(one, row)
            copy(one.read, one.x)
        elif row.kind == AGREED:
            copy(one.read, one.x)
        else:
            raise UserError(f"{self.path / FOLDER}: '{row.kind}' is no kind of change")
        return True

    def _step(self, one: _Replica, row: Changed) -> None:
        """The gradient of a portion, of the weights that the replica had read, and the update of those that it has."""
        copy(self.read, one.read)
        gradients, loss, _ = gradients_alone(self.trainer, self.plan, row.step, row.part, of_step=False)
        rate = learning_rate(self.config.optimizer, self.config.train.num_steps, self.plan.scale_ranks, row.step)
        one.optimizer.step(gradients, rate, lambda square: torch.stack((torch.tensor(loss).to(square), square)))


def replay_gossip(
    config: Config, alone: Config, plan: Plan, run: Path, saved: Saved, recorded: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Follow the orders of all replicas until all ranks had met for a checkpoint, from the initial weights.

    Args:
        config: of the run.
        alone: the same config for one process without gossip.
        plan: of the run.
        run: its folder.
        saved: the checkpoint to which the weights belong.
        recorded: environment.json of the run.

    Returns:
        The weights of each replica, by name of the tensor in a checkpoint.

    Raises:
        UserError: a file of the order is missing or too short, they do not fit together, or the data is not that of the
            run.
    """
    rows = [gossip_order.read(run, replica, saved.step) for replica in range(plan.mesh.dp_replicate)]
    with trainer_alone(alone, plan, recorded, saved) as trainer:
        one = _Replay(plan, config, trainer, rows, run)
        one.run()
        return {
            f"replica{index}.model.{weight.name}": weight.master
            for index, replica in enumerate(one.replicas)
            for weight in replica.optimizer.weights
        }
