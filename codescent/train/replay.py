"""In: the folder of a run with asynchronous parameter servers. Out: its weights, computed again in one process.
Does not compare them with the checkpoint (verbs/replay.py does) and does not start a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from codescent.base.errors import UserError
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.checkpoint.checkpoints import Saved
from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Config
from codescent.coupling.worker import gather, scatter, square_of
from codescent.plan import Plan
from codescent.plan.served import pushes_together
from codescent.plan.wire import Wire
from codescent.record import order
from codescent.record.order import Applied
from codescent.strategies.wire_messages import Messages
from codescent.train.alone import gradients_alone, trainer_alone
from codescent.train.optimize import Optimizer, Weight
from codescent.train.replay_rounds import RoundPushes
from codescent.train.server_weights import server_weights
from codescent.train.trainer import Trainer


class StepPushes:
    """Pushes of the gradients of steps.

    Args:
        trainer: of one process; its weights are overwritten.
        plan: of the run.
        config: of the run.
    """

    def __init__(self, trainer: Trainer, plan: Plan, config: Config) -> None:
        self.trainer, self.plan, self.config = trainer, plan, config
        self.of_step = pushes_together(plan.layout, plan.mesh.world_size) > 1

    @staticmethod
    def refuse(rows: Sequence[Applied], run: Path, steps: int) -> None:
        """A push that was refused changes nothing: the order has it, and says so."""

    def optimizer(self, weights: Sequence[Weight]) -> Optimizer:
        """What a server updates its weights with."""
        return Optimizer(weights, self.config.optimizer, (), torch.device("cpu"))

    def computed(self, row: Applied) -> tuple[Sequence[torch.Tensor], float]:
        """The gradient of each weight in a push, and the sum of its losses. The weights are those that were pulled."""
        return gradients_alone(self.trainer, self.plan, row.step, row.part, of_step=self.of_step)[:2]

    def weighted(self, parts: Sequence[torch.Tensor], rows: Sequence[Applied]) -> Sequence[torch.Tensor]:
        """The summands of an update: the parts of a step's mean add up."""
        return parts


def _kind_of(plan: Plan) -> type[StepPushes | RoundPushes]:
    """What the pushes of a run are."""
    return RoundPushes if plan.layout.served_rounds else StepPushes


class _Server:
    """A server of the run: its part of the weights, its optimizer, and the pushes that it will apply.

    `versions`: weights by version, in the dtype in which workers pull them; of those that are still needed.
    """

    def __init__(self, plan: Plan, index: int, pushes: StepPushes | RoundPushes, rows: Sequence[Applied]) -> None:
        self.pieces, self.rows, self.applied = plan.pieces[index], rows, 0
        self.narrow = TORCH_DTYPE[plan.work.precision]
        weights = server_weights(plan, index, replaced=False)
        self.optimizer = pushes.optimizer(weights)
        self.needed = Counter(row.base for row in rows)
        self.bases = {_portion(row): row.base for row in rows}
        self.version = 0
        self.versions = {0: self._flat()}

    def _flat(self) -> torch.Tensor:
        return torch.cat([weight.master.reshape(-1) for weight in self.optimizer.weights]).to(self.narrow)

    def read(self, version: int) -> torch.Tensor:
        """The weights of a version, for one of the pushes that need it."""
        found = self.versions[version]
        self.needed[version] -= 1
        self._forget(version)
        return found

    def _forget(self, version: int) -> None:
        if not self.needed[version] and version != self.version:
            del self.versions[version]

    def update(
        self, parts: Sequence[torch.Tensor], number: int, rate: float, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """One step of the optimizer with the sum of the parts, as coupling/parameter_server.py makes it.

        `number`: of pushes, also those that were refused. No part: none was good.
        """
        if parts:
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            split = torch.split(total, [piece.numel for piece in self.pieces])
            views = [view.view_as(weight.master) for view, weight in zip(split, self.optimizer.weights, strict=True)]
            self.optimizer.step(views, rate, agree)
        before, self.version = self.version, self.version + 1
        self.applied += number
        self.versions[self.version] = self._flat()
        self._forget(before)


def _portion(row: Applied) -> tuple[int, int, int]:
    """What a push has computed: step and part, and in rounds the first of its steps."""
    return row.step, row.part, row.first


class _Replay:
    """The servers of a run, and one process that computes the gradients of all workers."""

    def __init__(
        self, plan: Plan, config: Config, trainer: Trainer, rows: Sequence[Sequence[Applied]], run_path: Path
    ) -> None:
        self.plan, self.config, self.trainer, self.run_path = plan, config, trainer, run_path
        self.pushes = _kind_of(plan)(trainer, plan, config)
        self.servers = [_Server(plan, index, self.pushes, mine) for index, mine in enumerate(rows)]
        self.weights = [weight.tensor for weight in trainer.optimizer.weights]
        self.together = pushes_together(plan.layout, plan.mesh.world_size)
        self.known: dict[tuple[int, int, int], tuple[list[torch.Tensor], float]] = {}
        self.uses: Counter[tuple[int, int, int]] = Counter()
        self.wire = Wire.parse(plan.layout.wire)
        self.messages: dict[int, list[Messages]] = {}  # by worker: to each server

    def run(self) -> None:
        """Apply all pushes. A push can be computed as soon as each server has the version that it was computed with.

        Raises:
            UserError: the files do not fit together.
        """
        while left := [server for server in self.servers if server.applied < len(server.rows)]:
            ready = [server for server in left if all(self._computed(row) for row in self._next(server))]
            if self.together > 1 and len(ready) == len(self.servers):
                self._update_together()
            elif self.together == 1 and ready:
                self._update_alone(ready[0])
            else:
                raise UserError(f"{self.run_path / order.FOLDER}: the orders of the servers do not fit together")

    def _next(self, server: _Server) -> Sequence[Applied]:
        """The pushes of the next update, in the order in which they are added."""
        rows = server.rows[server.applied : server.applied + self.together]
        return sorted(rows, key=lambda row: (row.step, row.part, row.worker))

    def _computed(self, row: Applied) -> bool:
        """Compute the gradients of a push, if that is possible yet."""
        portion = _portion(row)
        if portion in self.known:
            return True
        if any(server.bases[portion] > server.version for server in self.servers):
            return False
        for server in self.servers:
            with torch.no_grad():
                scatter(server.read(server.bases[portion]), self.weights, server.pieces)
        gradients, loss = self.pushes.computed(row)
        wide = TORCH_DTYPE[self.plan.trained[0].optimizer_dtype]
        parts = [torch.empty(sum(piece.numel for piece in one.pieces), dtype=wide) for one in self.servers]
        for part, server in zip(parts, self.servers, strict=True):
            gather(part, gradients, server.pieces)
        self.known[portion] = self._sent(row.worker, parts), loss
        self.uses[portion] = len(self.servers)
        return True

    @torch.no_grad()
    def _sent(self, worker: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a worker's messages with these parts stand for: they carry what its earlier ones lacked, too.

        Its pushes come here in their order: it computes the next one with weights that the last one has changed.
        """
        if self.wire.method == "none":
            return parts
        if worker not in self.messages:
            dtype = self.plan.trained[0].optimizer_dtype
            self.messages[worker] = [Messages(self.wire, part.numel(), dtype) for part in parts]
        for message, part in zip(self.messages[worker], parts, strict=True):
            part.copy_(message.encode(part)[1])
            message.delivered()
        return parts

    def _take(self, row: Applied, index: int) -> torch.Tensor:
        """The part of a push for a server; the last server that takes it frees it."""
        portion = _portion(row)
        part = self.known[portion][0][index]
        self.uses[portion] -= 1
        if not self.uses[portion]:
            del self.known[portion]
        return part

    def _rate(self, server: _Server) -> float:
        """The learning rate of the next push: that of the step which it makes complete or is a part of."""
        last = server.applied + self.together - 1
        step = last // self.plan.mesh.world_size
        return learning_rate(self.config.optimizer, self.config.train.num_steps, self.plan.scale_ranks, step)

    @torch.no_grad()
    def _update_alone(self, server: _Server) -> None:
        (row,), index = self._next(server), self.servers.index(server)
        parts, loss = self.known[_portion(row)]
        scalars = torch.tensor([loss, sum(map(square_of, parts))], dtype=torch.float64)
        part = self._take(row, index)
        server.update([] if row.refused else [part], 1, self._rate(server), lambda _: scalars)

    @torch.no_grad()
    def _update_together(self) -> None:
        """A version of every server: its gradients are clipped by the norm over all of them."""
        rows = [self._next(server) for server in self.servers]
        losses = [sum(self.known[_portion(row)][1] for row in mine) for mine in rows]
        taken = [{row: self._take(row, index) for row in mine} for index, mine in enumerate(rows)]
        good = [{row: part for row, part in found.items() if not row.refused} for found in taken]
        parts = [list(self.pushes.weighted(list(found.values()), list(found))) for found in good]
        square = sum(torch.stack(mine).sum(0).double().square().sum() for mine in parts if mine)
        for server, mine, loss in zip(self.servers, parts, losses, strict=True):
            scalars = torch.tensor([loss, float(square)], dtype=torch.float64)
            server.update(mine, self.together, self._rate(server), lambda _, found=scalars: found)  # type: ignore[misc]


def _refuse_other_orders(rows: Sequence[Sequence[Applied]], run: Path, workers: int, together: int) -> None:
    """Raise UserError if a row contradicts the rows before it, or those of another server.

    Args:
        rows: of each server.
        run: the run folder.
        workers: ranks that push.
        together: pushes of an update.
    """
    pushed = {_portion(row): (row.worker, row.number, row.count) for row in rows[0]}
    for server, mine in enumerate(rows):
        path, own = order.file_of(run, server), {_portion(row) for row in mine}
        if len(own) != len(mine):
            raise UserError(f"{path}: has a push twice: {len(mine)} pushes, but {len(own)} portions")
        for at, row in enumerate(mine):
            updates, push, place = at // together, (row.worker, row.number, row.count), f"{path} line {at + 1}"
            if row.version != updates:
                raise UserError(f"{place}: version {row.version}, but {updates} updates come before this line")
            if row.base > row.version:
                raise UserError(f"{place}: base {row.base} is newer than version {row.version}")
            if row.worker >= workers:
                raise UserError(f"{place}: worker {row.worker}: there are {workers} workers, counted from 0")
            if pushed.get(_portion(row)) != push:
                raise UserError(f"{place}: worker {row.worker}, push {row.number}: server 0 has another push instead")
        if len(mine) != len(pushed):
            raise UserError(f"{path}: has {len(mine)} pushes, but server 0 has {len(pushed)}")


def replay(
    config: Config, alone: Config, plan: Plan, run: Path, saved: Saved, recorded: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Apply the pushes of the steps until a checkpoint in their order, from the initial weights.

    Args:
        config: of the run.
        alone: the same config for one process without servers.
        plan: of the run.
        run: its folder.
        saved: the checkpoint to which the weights belong.
        recorded: environment.json of the run.

    Returns:
        The weights of the servers, by name of the tensor in a checkpoint, whole.

    Raises:
        UserError: a file of the order is missing or too short; orders contradict each other; a push of a round was
            refused; or the data is not that of the run.
    """
    workers, period = plan.mesh.world_size, plan.schedule.period
    rows = [order.read(run, index, saved.step, workers, period) for index in range(len(plan.servers))]
    _refuse_other_orders(rows, run, workers, pushes_together(plan.layout, workers))
    _kind_of(plan).refuse(rows[0], run, saved.step)
    with trainer_alone(alone, plan, recorded, saved) as trainer:
        one = _Replay(plan, config, trainer, rows, run)
        one.run()
        wide = TORCH_DTYPE[plan.trained[0].optimizer_dtype]
        found = {f"model.{t.parameter.name}": torch.empty(t.parameter.shape, dtype=wide) for t in plan.trained}
        for server in one.servers:
            for piece, weight in zip(server.pieces, server.optimizer.weights, strict=True):
                found[f"model.{plan.trained[piece.index].parameter.name}"][piece.first : piece.stop] = weight.master
        return found
